"""Runs and workflows name what they wait for: a breaker, an approval, a pause."""

from typing import Any

import pytest

from pipeline import Topic, Workflow
from pipeline.background.messages import DispatchMessage
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.tasks import messages
from pipeline.testing import Inline, scripted
from tests.cli import scenarios
from tests.cli.conftest import Answer, Pipeline
from tests.factories import a_run, a_workflow, applied, some_events, stopped


class Care:
    """A workflow with a consumer that needs approval, and one that does not."""

    def __init__(self, db: Database, concurrency: int = 1) -> None:
        self.mail = scripted("mail", mutations=("send", "cancel"))
        workflow = Workflow("care", concurrency=concurrency)
        self.asked, self.plain = workflow.topic("asked"), workflow.topic("plain")
        _consumer(workflow, self.asked, "careful", requires_approval=True)
        _consumer(workflow, self.plain, "simple")
        self.run = Inline(db, [workflow], [self.mail])

    def publish(self, topic: Topic, count: int = 1) -> None:
        self.run.publish(topic, *({"n": n} for n in range(count)))
        self.run.run()

    def waiting(self) -> list[Any]:
        return [row for row in self.run.runs() if row.finished_at is None]


def _consumer(workflow: Workflow, topic: Topic, name: str, **options: Any) -> None:
    def send(ctx: Any, event: Any) -> Any:
        return ctx.mail.send(n=event.payload["n"])

    send.__name__ = name
    workflow.effect(topic, **options)(send)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[DispatchMessage]:
    """The messages that commands dispatch."""
    sent: list[DispatchMessage] = []

    def send(message: DispatchMessage, hops: int = 0) -> bool:
        del hops
        sent.append(message)
        return True

    monkeypatch.setattr(messages, "dispatch", send)
    return sent


def opened(pipeline: Pipeline, operation: str = "mail.send") -> None:
    assert pipeline("breaker", "open", operation, "-m", "outage").code == 0


def closed(pipeline: Pipeline, operation: str = "mail.send") -> Answer:
    return pipeline("breaker", "close", operation, "-m", "it is back")


@pytest.fixture(autouse=True)
def code(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline) -> None:
    """Hide the workflows' code from the command."""
    del pipeline
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")


def test_a_run_behind_an_open_breaker_names_it_and_how_to_close_it(db: Database, pipeline: Pipeline) -> None:
    care = Care(db)
    opened(pipeline)
    care.publish(care.plain)
    (row,) = care.waiting()
    output = pipeline("runs", str(row.id), "--json").json["advice"]
    assert "mail.send" in output["text"]
    assert "outage" in output["text"]
    assert output["commands"][0] == 'pipeline breaker close mail.send -m "why"'
    closed(pipeline)
    assert "breaker" not in pipeline("runs", str(row.id), "--json").json["advice"]["text"]
    care.run.run_until_idle()
    assert len(care.mail.effects) == 1


def test_closing_a_breaker_dispatches_the_runs_that_waited_for_it_at_once(
    db: Database, pipeline: Pipeline, dispatched: list[DispatchMessage]
) -> None:
    care = Care(db, concurrency=8)
    opened(pipeline)
    care.publish(care.plain, 3)
    waiting = {str(row.id) for row in care.waiting()}
    assert len(waiting) == 3
    output = closed(pipeline)
    assert "3 runs that may have waited" in output.out
    assert "Workers were notified." in output.out
    assert {(message.task, id_) for message in dispatched for id_ in message.run_ids} == {
        ("pipeline.mutate", id_) for id_ in waiting
    }
    care.run.sweeps.tick()
    care.run.run()
    assert len(care.mail.effects) == 3, "if the message is lost, the next tick rings, and not only after a minute"
    again = pipeline("breaker", "close", "mail.send", "--json").json
    assert (again["is_changed"], again["is_notified"]) == (False, None)


def test_an_approved_request_names_the_open_breaker_it_waits_for(
    db: Database, pipeline: Pipeline, dispatched: list[DispatchMessage]
) -> None:
    care = Care(db)
    care.publish(care.asked)
    opened(pipeline)
    (mutation,) = care.run.ledger()
    output = pipeline("approve", str(mutation.id), "-m", "fine")
    assert "as soon as the breaker of mail.send is closed (outage)" in output.out
    care.run.run()
    for command in ("mutations", "runs"):
        about = str(mutation.id if command == "mutations" else mutation.run_id)
        advice = pipeline(command, about, "--json").json["advice"]
        assert "breaker" in advice["text"]
        assert advice["commands"] == ['pipeline breaker close mail.send -m "why"']
    dispatched.clear()
    closed(pipeline)
    assert [message.run_ids for message in dispatched] == [(str(mutation.run_id),)]
    advice = pipeline("mutations", str(mutation.id), "--json").json["advice"]
    assert advice["text"] == "It was approved; a worker sends it."
    care.run.run_until_idle()
    assert len(care.mail.effects) == 1


def test_a_pending_approval_blocks_a_workflow_with_concurrency_1(db: Database, pipeline: Pipeline) -> None:
    care = Care(db)
    care.publish(care.asked)
    care.publish(care.plain, 2)
    (mutation,) = care.run.ledger()
    (row,) = pipeline("workflows", "--json").json
    assert (row["status"], row["waiting"]) == ("active", 2)
    assert row["reason"] == f"run {mutation.run_id} waits for approval and uses the concurrency of 1"
    assert row["since"] is not None
    assert "uses the concurrency of 1" in pipeline("workflows", "care").out
    assert "uses the concurrency of 1" in pipeline("top", "--once").out
    advice = pipeline("runs", str(mutation.run_id), "--json").json["advice"]
    assert "'care' has concurrency 1" in advice["text"]
    care.run.approve(mutation)
    care.run.run_until_idle()
    assert pipeline("workflows", "--json").json[0]["reason"] == ""


def test_a_pending_approval_does_not_block_a_workflow_with_higher_concurrency(db: Database, pipeline: Pipeline) -> None:
    care = Care(db, concurrency=2)
    care.publish(care.asked)
    assert pipeline("workflows", "--json").json[0]["reason"] == ""
    care.run.approve(care.run.ledger()[0])
    care.run.run_until_idle()


def test_runs_that_wait_for_an_open_breaker_use_the_whole_concurrency(
    db: Database, pipeline: Pipeline, dispatched: list[DispatchMessage]
) -> None:
    care = Care(db, concurrency=2)
    opened(pipeline)
    care.publish(care.plain, 1)
    assert pipeline("workflows", "--json").json[0]["reason"] == "", "one place is free"
    care.publish(care.plain, 4)
    (row,) = pipeline("workflows", "--json").json
    assert row["reason"] == "2 runs use the whole concurrency and wait to send; open breakers: mail.send (outage)"
    closed(pipeline)
    assert pipeline("workflows", "--json").json[0]["reason"] == ""
    care.run.run_until_idle()
    assert dispatched


def test_a_run_of_a_held_workflow_names_the_reason_and_the_command(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    some_events(db, "order-1")
    run = stopped(db, applied(db, a_run(db, Phase.MUTATING)), FailureKind.TRANSIENT)
    assert run.retry_pending
    pipeline("pause", "billing", "-m", "stock-taking")
    output = pipeline("runs", str(run.id), "--json").json["advice"]
    assert "paused by ada: stock-taking" in output["text"]
    assert output["commands"] == ['pipeline resume billing -m "why"']
    pipeline("resume", "billing")
    pipeline("maintenance", "enter", "billing", "-m", "wrong tax rate")
    output = pipeline("runs", str(run.id), "--json").json["advice"]
    assert "maintenance: wrong tax rate" in output["text"]
    assert output["commands"] == ['pipeline maintenance exit billing -m "why"']
    pipeline("maintenance", "exit", "billing", "-m", "mended")


def test_an_approved_request_of_a_paused_workflow_names_the_pause(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    pipeline("approve", str(row.id))
    pipeline("pause", "billing", "-m", "stock-taking")
    output = pipeline("mutations", str(row.id), "--json").json["advice"]
    assert "paused by ada: stock-taking" in output["text"]
    assert output["commands"] == ['pipeline resume billing -m "why"']
    pipeline("resume", "billing")
