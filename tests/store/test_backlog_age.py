"""The age of a backlog counts available events only: a held workflow raises no alert and scales no worker."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from pipeline.admin import gauges
from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.states import Phase
from pipeline.domain.values import HandlerSpec, NewEvent, RunFailure, TopicSpec, WorkflowSpec
from pipeline.store.database import Database
from pipeline.transitions import events, registration, stops, workflows
from tests.factories import IN, OUT, SOMEBODY, a_run, a_workflow, held, some_events

HOUR = timedelta(hours=1)


def backlog(db: Database, handler: str = "send") -> tuple[float, float]:
    """How many events wait for the handler of an hour later, and how old the oldest is that may be taken."""
    found = {
        name: float(value)
        for name, labels, value in gauges.read(Database(db.engine, clock_offset=db.clock_offset + HOUR))
        if labels.get("handler") == handler and labels.get("topic") == IN
    }
    return found["pipeline.backlog.events"], found["pipeline.backlog.age"]


def pause(db: Database) -> None:
    with db.transaction() as tx:
        workflows.pause(tx, "billing", SOMEBODY)


def resume(db: Database) -> None:
    with db.transaction() as tx:
        workflows.resume(tx, "billing", SOMEBODY)


def mend(db: Database) -> None:
    with db.transaction() as tx:
        workflows.enter_maintenance(tx, "billing", "wrong code")


def end_maintenance(db: Database) -> None:
    with db.transaction() as tx:
        workflows.exit_maintenance(tx, "billing", SOMEBODY)


def block(db: Database) -> None:
    run = a_run(db, Phase.PREPARED)
    failure = Failure(kind=FailureKind.AUTH, message="the mail server said 401")
    with db.transaction() as tx:
        stops.stop(tx, [RunFailure(lease=held(run), failure=failure)]).only()


Act = Callable[[Database], None]
WAYS = [
    pytest.param(pause, resume, id="paused"),
    pytest.param(block, resume, id="blocked"),
    pytest.param(mend, end_maintenance, id="maintenance"),
]


@pytest.mark.parametrize(("hold", "let_go"), WAYS)
def test_a_backlog_has_no_age_while_its_workflow_is_held_back_and_has_it_again_afterwards(
    db: Database, hold: Act, let_go: Act
) -> None:
    a_workflow(db)
    some_events(db, "old", "new")
    hold(db)
    waiting, age = backlog(db)
    assert waiting >= 1
    assert age == 0
    let_go(db)
    assert backlog(db)[1] >= 3600


def test_the_same_holds_for_a_consumer_of_several_topics(db: Database) -> None:
    both = HandlerSpec(name="both", subscribes=(IN, OUT))
    topics = (TopicSpec(name=IN), TopicSpec(name=OUT))
    with db.transaction() as tx:
        registration.register(tx, WorkflowSpec(name="billing", topics=topics, handlers=(both,)))
        events.publish(tx, "billing", [NewEvent(topic=IN, message_id="a", payload={})])
    pause(db)
    assert backlog(db, "both") == (1, 0)
    resume(db)
    assert backlog(db, "both")[1] >= 3600


def test_a_workflow_that_is_held_back_takes_no_age_from_another(db: Database) -> None:
    a_workflow(db)
    a_workflow(db, "other", consumers=("file",))
    some_events(db, "old", workflow="other")
    pause(db)
    assert backlog(db, "file")[1] >= 3600
