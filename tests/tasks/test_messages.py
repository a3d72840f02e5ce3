"""The messages that a scheduler leaves on the broker: one task for each cohort, chained with the later phases."""

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from pipeline.background.messages import DispatchMessage
from pipeline.background.scheduler import Scheduler
from pipeline.celery import Installation, _settings
from pipeline.domain.states import Phase, PhaseTask
from pipeline.domain.values import HandlerSpec, TopicSpec, WorkflowSpec
from pipeline.domain.workflows import HandlerKind
from pipeline.embedded import servers
from pipeline.store.database import Database, Statement
from pipeline.tasks import messages
from pipeline.transitions import registration, runs
from tests.factories import LEASE, a_run, a_workflow, held, some_events
from tests.support.rule import rule

QUEUES = ("pipeline.prepare", "pipeline.mutate", "pipeline.next", "pipeline.schedule")


Message = tuple[str, dict[str, Any], list[Any]]
Broker = Callable[[], list[Message]]


@pytest.fixture
def broker(embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch, worker_id: str) -> Iterator[Broker]:
    """The broker of this process, with the settings of a real worker: what was sent to it.

    A message is its queue, its headers, and its body: args, kwargs and what follows.
    """
    monkeypatch.setenv("PIPELINE_BROKER_URL", embedded.broker_url)
    prefix = f"messages.{worker_id}."
    keys = [prefix + queue for queue in QUEUES]
    with redis.Redis.from_url(embedded.broker_url) as client, Celery("pipeline", set_as_current=False) as app:
        app.add_defaults(_settings)
        app.add_defaults(Installation(app, is_own=True).configure)
        app.conf.broker_transport_options = {**app.conf.broker_transport_options, "global_keyprefix": prefix}
        monkeypatch.setattr(messages, "app", app)

        def sent() -> list[Message]:
            found = [(key, json.loads(raw)) for key in keys for raw in client.lrange(key, 0, -1)]
            return [
                (key.removeprefix(prefix), each["headers"], json.loads(base64.b64decode(each["body"])))
                for key, each in found
            ]

        client.delete(*keys)
        yield sent
        client.delete(*keys)


def chained(followers: list[dict[str, Any]] | None) -> list[tuple[str, list[Any], bool]]:
    """The tasks that follow, in their order: Celery keeps them last first."""
    return [(each["task"], each["args"], each["immutable"]) for each in reversed(followers or [])]


@rule("L-1")
def test_a_cohort_is_one_message_for_prepare_with_mutate_and_next_chained_behind_it(
    db: Database, broker: Broker
) -> None:
    a_workflow(db, concurrency=8)
    some_events(db, *[f"m{number}" for number in range(8)])
    Scheduler(db, messages.dispatch, cohort_time=LEASE).schedule(["billing"])
    cohorts = broker()
    for queue, headers, (args, _, embedded) in cohorts:
        assert (queue, headers["task"]) == ("pipeline.prepare", "pipeline.prepare")
        assert chained(embedded["chain"]) == [("pipeline.mutate", args, True), ("pipeline.next", args, True)]
        assert (embedded["callbacks"], embedded["errbacks"], embedded["chord"]) == (None, None, None)
    assert len(cohorts) < 8, "runs travel together"
    with db.transaction() as tx:
        started = [str(row.id) for row in tx.all(Statement[Any]("SELECT id FROM pipeline.runs"))]
    assert sorted(id_ for _, _, ((ids, _), *_) in cohorts for id_ in ids) == sorted(started)
    assert len(started) == 8


@pytest.mark.parametrize(
    ("phase", "task", "following"),
    [
        (Phase.PREPARED, "pipeline.mutate", ["pipeline.next"]),
        (Phase.EMITTING, "pipeline.next", []),
    ],
)
def test_a_run_that_was_handed_back_is_one_message_for_the_phases_that_are_left(
    db: Database, broker: Broker, phase: Phase, task: str, following: list[str]
) -> None:
    a_workflow(db)
    some_events(db, "m1")
    run = a_run(db, phase)
    with db.transaction() as tx:
        runs.hand_back(tx, [held(run)]).only()
    messages.dispatch(DispatchMessage(task=PhaseTask(task), run_ids=(str(run.id),)))
    ((queue, headers, (args, _, embedded)),) = broker()
    assert (queue, headers["task"], args) == (task, task, [[str(run.id)], 0])
    assert [name for name, *_ in chained(embedded["chain"])] == following


def test_a_producer_is_one_message_with_nothing_behind_it(db: Database, broker: Broker) -> None:
    spec = WorkflowSpec(
        name="billing",
        topics=(TopicSpec(name="out"),),
        handlers=(HandlerSpec(name="poll", kind=HandlerKind.PRODUCER, first_run_at=_now(db)),),
    )
    with db.transaction() as tx:
        registration.register(tx, spec)
    Scheduler(db, messages.dispatch, cohort_time=LEASE).schedule(["billing"])
    ((queue, headers, (_, _, embedded)),) = broker()
    assert (queue, headers["task"]) == ("pipeline.prepare", "pipeline.produce")
    assert not embedded["chain"]


def _now(db: Database) -> Any:
    with db.transaction() as tx:
        return tx.clock()
