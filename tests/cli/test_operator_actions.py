"""Acts of an operator: done, audited, reported, and workers notified."""

import os
import subprocess
from pathlib import Path

import pytest
import redis

from pipeline.admin.quarantine import Quarantine, QuarantineEntry, QuarantineFilter
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.transitions import events, workflows
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import SOMEBODY, a_run, a_workflow, event_status, some_events, stopped, the_mutation, the_run
from tests.support import forked_python
from tests.support.installation import own_broker
from tests.support.table_reads import rows, status_of, workflow_row


def audited(db: Database) -> list[tuple[str, str, str]]:
    return [(row.act, row.actor, row.reason) for row in rows(db, "SELECT * FROM pipeline.audit ORDER BY id")]


def test_a_workflow_is_paused_and_resumed_with_who_and_why(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    paused = pipeline("pause", "billing", "-m", "stock-taking", "--by", "bob")
    assert paused.out == "billing is paused.\nActive runs continue; no new one starts until `pipeline resume`.\n"
    assert status_of(db) == "paused"
    assert "billing was paused already." in pipeline("pause", "billing").out
    assert "billing continues." in pipeline("resume", "billing", "-m", "done").out
    assert status_of(db) == "active"
    assert audited(db) == [("workflow.pause", "bob", "stock-taking"), ("workflow.resume", "ada", "done")]
    output = pipeline("pause", "billing", "--json").json
    assert (output["workflow"], output["is_changed"], output["is_notified"]) == ("billing", True, None)
    pipeline("resume", "billing")


def test_resume_lifts_blocks_for_operators_and_is_refused_over_an_unknown_outcome(
    db: Database, pipeline: Pipeline
) -> None:
    a_workflow(db)
    scenarios.a_blocked_workflow(db)
    assert "1 block was lifted" in pipeline("resume", "billing", "-m", "new password").out
    row = scenarios.an_indeterminate_mutation(db, "order-2")
    refused = pipeline("resume", "billing", "-m", "go on")
    assert (refused.code, str(row.id) in refused.err) == (6, True)
    assert "Resolve it first" in refused.err


def test_maintenance_is_entered_with_a_reason_and_ended_by_an_operator(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    assert "gave no reason" in pipeline("maintenance", "enter", "billing").err
    assert workflow_row(db).maintenance is False
    assert "billing is in maintenance." in pipeline("maintenance", "enter", "billing", "-m", "wrong tax rate").out
    assert workflow_row(db).maintenance_reason == "wrong tax rate"
    assert "was in maintenance already: wrong tax rate." in pipeline("maintenance", "enter", "billing", "-m", "x").out
    assert "no run starts" in pipeline("resume", "billing").out
    assert "billing left maintenance." in pipeline("maintenance", "exit", "billing", "-m", "mended").out
    assert workflow_row(db).maintenance is False
    assert pipeline("maintenance", "exit", "billing").out.startswith("billing was not in maintenance.")
    acts = [act for act, _, _ in audited(db)]
    assert acts == ["workflow.enter_maintenance", "workflow.resume", "workflow.exit_maintenance"]


def test_a_request_is_shown_and_then_approved_exactly_as_shown(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    output = pipeline("mutations", str(row.id), "--json").json
    assert output["mutation"]["request_hash"] == row.request_hash
    state = output["mutation"]["state"]
    assert output["advice"]["commands"][0] == f'pipeline approve {row.id} --if-state {state} -m "why"'
    done = pipeline("approve", str(row.id)[:30], "-m", "within budget")
    assert (done.code, f"{row.id}: approved" in done.out) == (0, True), done.err
    assert the_mutation(db, row.id).approved_by == "ada"
    assert the_run(db, row.run_id).status == "active"
    again = pipeline("approve", str(row.id))
    assert (again.code, "needs it to be pending" in again.err or "Cannot approve" in again.err) == (6, True)
    assert audited(db) == [("mutation.approve", "ada", "within budget")]
    assert "approved" in pipeline("mutations", str(row.id)).out


def test_a_request_is_rejected_with_a_reason_and_its_events_are_skipped(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    assert "gave no reason" in pipeline("reject", str(row.id)).err
    done = pipeline("reject", str(row.id), "-m", "not this customer", "--json").json
    assert (done["mutation"], done["act"]) == (str(row.id), "rejected")
    assert the_mutation(db, row.id).status == "failed"
    (event,) = the_run(db, row.run_id).event_ids
    assert event_status(db, event) == "skipped"


def test_a_mutation_is_resolved_and_the_consequence_is_printed(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db, concurrency=9, on_uncertain="contain")
    row = scenarios.an_indeterminate_mutation(db)
    done = pipeline("resolve", "happened", str(row.id)[:30], "-m", "seen in the log", "--no-result")
    assert done.out.startswith(f"{row.id}: happened\n`next` runs with that result")
    assert the_mutation(db, row.id).result is None
    other = scenarios.an_indeterminate_mutation(db, "order-2")
    shown = pipeline("resolve", "skip", "--workflow", "billing", "-m", "old", "--json").json
    assert (shown["is_done"], shown["resolutions"]) == (False, [{"mutation": str(other.id), "kind": "skip"}])
    taken = pipeline("resolve", "skip", "--workflow", "billing", "-m", "old", "--yes", "--json").json
    assert (taken["updated"], taken["refused"]) == ([str(other.id)], {})


@pytest.mark.broken_on_purpose
def test_an_acknowledged_late_effect_is_no_longer_reported(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    row = scenarios.a_late_effect(db)
    (item,) = pipeline("attention", "--json").json
    acknowledge = f'pipeline acknowledge {row.id} --if-state {item["state"]} -m "why"'
    assert (item["kind"], item["commands"][1]) == ("late_effect", acknowledge)
    assert "gave no reason" in pipeline("acknowledge", str(row.id)).err
    assert pipeline("acknowledge", str(row.id), "-m", "refunded one of them").code == 0
    assert the_mutation(db, row.id).acknowledged_by == "ada"
    assert pipeline("attention", "--json").json == []
    assert "Cannot acknowledge" in pipeline("acknowledge", str(row.id), "-m", "again").err


def test_an_event_that_changed_meanwhile_is_refused_and_the_others_are_done(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_workflow(db)
    first, second = (scenarios.a_quarantined_event(db, f"order-{n}") for n in (1, 2))
    entries = Quarantine.entries

    def outdated_entries(client: Quarantine, which: QuarantineFilter, *, limit: int = 100) -> list[QuarantineEntry]:
        found = entries(client, which, limit=limit)
        with db.transaction() as tx:
            events.release(tx, "billing", "send", first, SOMEBODY)
        return found

    monkeypatch.setattr(Quarantine, "entries", outdated_entries)
    done = pipeline("quarantine", "release", "--workflow", "billing", "--handler", "send", "-m", "mended", "--yes")
    assert done.code == 1
    assert "1 released, 1 refused" in done.out
    assert f"{first}" in done.out.splitlines()[-1]
    assert event_status(db, second) == "pending"


def test_quarantined_events_are_shown_first_and_then_released_or_skipped(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    first, second, third = (scenarios.a_quarantined_event(db, f"order-{n}") for n in (1, 2, 3))
    listed = pipeline("quarantine", "list", columns=80)
    assert "no such customer" in listed.out
    assert [each["event_id"] for each in pipeline("quarantine", "list", "--json").json] == [first, second, third]
    preview = pipeline("quarantine", "release", "--workflow", "billing", "--handler", "send")
    assert "Nothing was changed. Repeat with --yes to do it." in preview.out
    assert event_status(db, first) == "quarantined"
    assert "1 released, 0 refused" in pipeline("quarantine", "release", str(first), "--yes", "-m", "mended").out
    assert event_status(db, first) == "pending"
    assert "gave no reason" in pipeline("quarantine", "skip", "--workflow", "billing", "--yes").err
    done = pipeline("quarantine", "skip", "--workflow", "billing", "--handler", "send", "--yes", "-m", "old", "--json")
    assert done.json["updated"] == [second, third]
    assert (event_status(db, second), event_status(db, third)) == ("skipped", "skipped")
    assert "No such event: nothing was changed." in pipeline("quarantine", "skip", str(second), "--yes", "-m", "x").out
    acts = [act for act, _, _ in audited(db)]
    assert acts == ["event.quarantine"] * 3 + ["event.release"] + ["event.skip"] * 2
    assert "event.release" in pipeline("events", str(first)).out


def test_a_waiting_event_is_quarantined_or_skipped_for_one_consumer(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db, consumers=("send", "count"))
    first, second = some_events(db, "order-1", "order-2")
    of = ("--workflow", "billing", "--handler", "count")
    assert "1 quarantined" in pipeline("quarantine", "add", str(first), *of, "-m", "look at it", "--yes").out
    assert (event_status(db, first, "count"), event_status(db, first, "send")) == ("quarantined", "pending")
    assert pipeline("quarantine", "skip", *of, "--waiting", "-m", "old", "--yes", "--json").json["updated"] == [second]
    assert event_status(db, second, "count") == "skipped"
    assert "one consumer at a time" in pipeline("quarantine", "list", "--waiting").err
    assert "expected both" in pipeline("quarantine", "list", "--handler", "count").err
    assert "There is no event '999999'" in pipeline("quarantine", "release", "999999", "--yes", "-m", "x").err


def test_workers_are_notified_at_once_and_an_unreachable_broker_is_reported(
    db: Database, database_url: str, tmp_path: Path
) -> None:
    a_workflow(db)
    row = scenarios.a_pending_approval(db)
    with own_broker(tmp_path / "broker") as broker_url, redis.Redis.from_url(broker_url) as client:
        output = typed(database_url, broker_url, "resume", "billing")
        approved = typed(database_url, broker_url, "approve", str(row.id), "-m", "fine")
        rung = [client.llen(queue) for queue in ("pipeline.schedule", "pipeline.mutate")]
    assert ("Workers were notified." in output.stdout, "Workers were notified." in approved.stdout) == (True, True), (
        output.stderr
    )
    assert rung == [1, 1]
    away = typed(database_url, "redis://127.0.0.1:1/0", "resume", "billing")
    assert away.returncode == 0
    assert "The broker is unreachable; the next tick continues." in away.stdout
    assert away.stderr == ""


def typed(database_url: str, broker_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    environ |= {"PIPELINE_DATABASE_URL": database_url, "PIPELINE_BROKER_URL": broker_url}
    return forked_python.run(*arguments, environ=environ)


def test_every_kind_of_waiting_item_is_listed_with_its_commands(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db, concurrency=9, on_uncertain="contain")
    indeterminate = scenarios.an_indeterminate_mutation(db)
    request = scenarios.a_pending_approval(db, "order-2")
    aside = scenarios.a_quarantined_event(db, "order-3")
    scenarios.a_blocked_workflow(db, "order-4")
    with db.transaction() as tx:
        workflows.enter_maintenance(tx, "billing", "wrong tax rate", Actor(name="ada"))
    assert pipeline("breaker", "open", "mail.send", "-m", "provider is down").code == 0
    items = pipeline("attention", "--json").json
    kinds = [item["kind"] for item in items]
    assert kinds == ["indeterminate", "approval", "quarantined", "blocked", "maintenance", "breaker"]
    commands = [item["commands"][-1] for item in items]
    assert commands == [
        f'pipeline resolve skip {indeterminate.id} --if-state {items[0]["state"]} -m "why"',
        f'pipeline reject {request.id} --if-state {items[1]["state"]} -m "why"',
        'pipeline quarantine skip --workflow billing --handler send -m "why"',
        'pipeline resume billing -m "why"',
        'pipeline maintenance exit billing -m "why"',
        'pipeline breaker close mail.send -m "why"',
    ]
    shown = pipeline("attention", columns=80)
    assert shown.out.startswith("6 items wait for an operator, oldest first.\n")
    assert all(f"\n    {command}\n" in shown.out for command in commands), "a command is never folded"
    assert f"the oldest is event {aside}" in shown.out
    checked = pipeline("attention", "--check")
    assert checked.code == 4
    assert pipeline("breaker", "close", "mail.send", "-m", "back", "--json").json["is_changed"] is True


@pytest.mark.broken_on_purpose
def test_events_of_a_retired_handler_and_broken_invariants_wait_for_an_operator(
    db: Database, pipeline: Pipeline
) -> None:
    a_workflow(db)
    some_events(db, "order-1", "order-2")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    scenarios.without_handlers(db)
    rows(db, "UPDATE pipeline.runs SET retry_pending = false WHERE id = :id RETURNING id", id=run.id)
    items = {item["kind"]: item for item in pipeline("attention", "--json").json}
    assert set(items) == {"broken_invariant", "retired"}
    assert items["retired"]["commands"][-1] == (
        'pipeline quarantine skip --workflow billing --handler send --waiting -m "why"'
    )
    assert str(run.id) in items["broken_invariant"]["reason"]
    text = pipeline("attention").out
    assert text.index("broken_invariant") < text.index("retired"), "a broken promise comes first"
