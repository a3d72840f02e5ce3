"""Lists and details, as text and as JSON."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.transitions import workflows
from tests.cli import scenarios
from tests.cli.conftest import Pipeline
from tests.factories import SOMEBODY, a_run, a_workflow, some_events, stopped

PIPELINE = Path(sys.executable).parent / "pipeline"

WORKFLOWS_AT_80 = """\
3 workflows
name     status               since  runs  waiting  oldest  quarantined  version
billing  error                AA     0/1   1        AA                   1
    approval: the mail server said 401
mails    paused               AA     0/1   0                             1
    paused by ada: checked the provider's log
shop     active, maintenance  AA     1/4   0        AA                   1
    maintenance: the schema changed"""

WORKFLOWS_AT_130 = """\
3 workflows
name     status               since  runs  waiting  oldest  quarantined  version  reason
billing  error                AA     0/1   1        AA                   1        approval: the mail server said 401
mails    paused               AA     0/1   0                             1        paused by ada: checked the provider's log
shop     active, maintenance  AA     1/4   0        AA                   1        maintenance: the schema changed"""  # noqa: E501 - as it is printed


def three_workflows(db: Database) -> None:
    """Create a blocked, a paused, and a workflow in maintenance with an active run."""
    a_workflow(db)
    scenarios.a_blocked_workflow(db)
    a_workflow(db, "mails")
    a_workflow(db, "shop", concurrency=4)
    some_events(db, "s1", workflow="shop")
    a_run(db, Phase.PREPARED, workflow="shop")
    with db.transaction() as tx:
        workflows.pause(tx, "mails", SOMEBODY)
        workflows.enter_maintenance(tx, "shop", "the schema changed")


@pytest.mark.parametrize(("columns", "expected"), [(80, WORKFLOWS_AT_80), (130, WORKFLOWS_AT_130)])
def test_workflows_are_listed_with_status_and_reason(
    db: Database, pipeline: Pipeline, columns: int, expected: str
) -> None:
    three_workflows(db)
    assert pipeline("workflows", columns=columns).plain() == expected


def test_the_json_of_workflows_has_the_same_texts(db: Database, pipeline: Pipeline) -> None:
    three_workflows(db)
    found = {each["name"]: each for each in pipeline("workflows", "--json").json}
    assert (found["billing"]["status"], found["billing"]["waiting"]) == ("error", 1)
    assert (found["mails"]["status"], found["mails"]["is_in_maintenance"]) == ("paused", False)
    assert (found["shop"]["status"], found["shop"]["active_runs"], found["shop"]["concurrency"]) == ("active", 1, 4)
    detail = pipeline("workflows", "billing", "--json").json
    assert detail["workflow"] == found["billing"]
    assert [handler["name"] for handler in detail["handlers"]] == ["poll", "send"]
    assert [block["kind"] for block in detail["blocks"]] == ["approval"]
    assert detail["topics"][0] == {"name": "orders.paid", "has_schema": False, "consumers": ["send"]}


def test_one_workflow_is_shown_with_handlers_topics_blocks_and_acts(db: Database, pipeline: Pipeline) -> None:
    three_workflows(db)
    assert pipeline("pause", "billing", "-m", "wait").code == 0
    shown = pipeline("workflows", "show", "billing", columns=80)
    for text in ("orders.paid    send", "send  consumer  0     1", "approval", "workflow.pause  ada", "wait"):
        assert text in shown.out
    assert shown.plain() == pipeline("workflows", "billing", columns=80).plain()


def test_an_unknown_name_is_refused_with_the_nearest_known_name(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    for command in (
        ("workflows", "biling"),
        ("runs", "--workflow", "biling"),
        ("events", "--workflow", "biling"),
        ("mutations", "--workflow", "biling"),
        ("resolve", "skip", "--workflow", "biling", "-m", "x", "--yes"),
        ("attention", "--workflow", "biling"),
        ("pause", "biling"),
        ("quarantine", "list", "--workflow", "biling"),
    ):
        refused = pipeline(*command)
        assert refused.code == 5, command
        assert "There is no workflow 'biling'. Known: billing. Did you mean 'billing'?" in refused.err, command
    assert "Did you mean 'send'?" in pipeline("runs", "--workflow", "billing", "--handler", "sent").err
    assert "Did you mean 'orders.paid'?" in pipeline("events", "--workflow", "billing", "--topic", "order.paid").err


def test_code_that_cannot_be_imported_hides_nothing(
    db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_workflow(db)
    row = scenarios.an_indeterminate_mutation(db)
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "not.there")
    found = pipeline("mutations", str(row.id))
    assert (found.code, found.err) == (0, "")
    assert "someone@example.org" in found.out
    assert str(row.id) in pipeline("attention").out


def test_a_shell_completes_commands_and_the_names_of_workflows(
    db: Database, pipeline: Pipeline, database_url: str
) -> None:
    del pipeline
    a_workflow(db)
    asked = {"_PIPELINE_COMPLETE": "complete_bash", "PIPELINE_DATABASE_URL": database_url}

    def offered(text: str, number: int) -> list[str]:
        given = {**os.environ, **asked, "COMP_WORDS": text, "COMP_CWORD": str(number)}
        done = subprocess.run([PIPELINE], env=given, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.split()

    assert offered("pipeline atten", 1) == ["attention"]
    assert offered("pipeline pause bil", 2) == ["billing"]


def test_an_empty_list_is_a_sentence(db: Database, pipeline: Pipeline) -> None:
    del db
    assert pipeline("workflows").out.startswith("No workflow is registered yet.")
    assert pipeline("runs").out == "No such run.\n"
    assert pipeline("events").out == "No such event.\n"
    assert pipeline("mutations").out == "0 indeterminate\n"
    assert pipeline("attention").out == "Nothing waits for an operator.\n"
    assert pipeline("quarantine", "list").out == "No event is quarantined.\n"
    for command in ("workflows", "runs", "events", "mutations", "attention"):
        assert pipeline(command, "--json").json == []


RUNS_AT_80 = """\
3 runs
id                                    status                 age  handler
UUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUU  failed:logic           AA   billing/send
    inputs released, prepared: division by zero
UUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUU  paused:reconciliation  AA   billing/send
    waits for an operator, mutating: division by zero
UUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUU  committed              AA   billing/send"""


def test_runs_are_listed_newest_first_and_filtered(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db, concurrency=9, on_uncertain="contain")
    done = scenarios.a_done_order(db)
    scenarios.an_indeterminate_mutation(db, "order-2")
    some_events(db, "order-3")
    failed = stopped(db, a_run(db, Phase.PREPARED))
    assert pipeline("runs", columns=80).plain() == RUNS_AT_80
    only = pipeline("runs", "--status", "failed:logic", "--phase", "prepared", "--handler", "send", "--json").json
    assert [run["id"] for run in only] == [str(failed.id)]
    assert [run["id"] for run in pipeline("runs", "--status", "committed", "--json").json] == [str(done.id)]
    assert pipeline("runs", "--status", "active", "--json").json == []
    assert len(pipeline("runs", "--limit", "1", "--json").json) == 1
    found = pipeline("runs", "--status", "committed", "--recent", "1")
    assert "Only the newest 1 runs were searched; --recent searches more." in found.out


RUN_AT_80 = """\
run          UUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUU
of           billing/send
phase        committed
status       committed
attempt      1
worker       w
mutation     UUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUU
  operation  mail.send
  status     applied
  key        UUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUU:0

inputs
event  message id  topic        deliveries
N      order-1     orders.paid  send: consumed

outputs
event  message id          topic          deliveries
N      receipt of order-1  receipts.sent  no consumer

timeline
at                       description          by
TTTTTTTTTTTTTTTTTTT.MMM  started
TTTTTTTTTTTTTTTTTTT.MMM  claimed by a worker
TTTTTTTTTTTTTTTTTTT.MMM  requested
    mail.send, key UUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUUU:0
TTTTTTTTTTTTTTTTTTT.MMM  sent
TTTTTTTTTTTTTTTTTTT.MMM  applied
    resolved by call
TTTTTTTTTTTTTTTTTTT.MMM  committed

next
  Nothing. It is done."""


def test_one_run_is_shown_with_its_inputs_outputs_mutation_timeline_and_what_is_next(
    db: Database, pipeline: Pipeline
) -> None:
    a_workflow(db)
    run = scenarios.a_done_order(db)
    assert pipeline("runs", str(run.id), columns=80).plain() == RUN_AT_80
    shown_json = pipeline("runs", "show", str(run.id)[:23], "--json").json
    assert (shown_json["run"]["id"], shown_json["mutation"]["status"]) == (str(run.id), "applied")
    assert [moment["description"] for moment in shown_json["timeline"]][-1] == "committed"
    assert shown_json["advice"] == {"text": "Nothing. It is done.", "commands": []}


def test_a_stopped_run_names_the_command_to_type(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    blocked = scenarios.a_blocked_workflow(db)
    shown_json = pipeline("runs", str(blocked.id), "--json").json
    assert shown_json["advice"]["commands"] == ['pipeline resume billing -m "why"']
    assert [moment["description"] for moment in shown_json["timeline"]][-2:] == ["stopped", "workflow blocked"]
    assert pipeline("resume", "billing", "-m", "new key").code == 0
    assert pipeline("runs", str(blocked.id), "--json").json["advice"]["commands"] == []
    failed = stopped(db, a_run(db, Phase.PREPARED), FailureKind.LOGIC)
    advice = pipeline("runs", str(failed.id), "--json").json["advice"]
    assert advice["commands"] == ['pipeline maintenance exit billing -m "why"']


def test_a_malformed_unknown_or_ambiguous_id_is_refused_with_what_was_expected(
    db: Database, pipeline: Pipeline
) -> None:
    a_workflow(db, concurrency=9)
    runs = [scenarios.a_done_order(db, f"order-{n}") for n in range(2)]
    assert "'x' is not the id of a run; expected a UUID" in pipeline("runs", "x").err
    assert "There is no run 'ffff'" in pipeline("runs", "ffff").err
    assert "There is no mutation 'ffff'" in pipeline("mutations", "ffff").err
    several = pipeline("runs", str(runs[0].id)[:5])
    assert several.code == 2
    assert "begins the ids of several runs" in several.err
    assert all(str(run.id) in several.err for run in runs)
    assert "'x' is not the id of an event; expected a number" in pipeline("events", "x").err
    assert "There is no event '999999999'" in pipeline("events", "999999999").err
    assert "names several things; expected one" in pipeline("runs", "ab", "cd").err


def test_events_are_found_by_workflow_topic_status_key_and_message_id(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    scenarios.a_done_order(db)
    (waits,) = some_events(db, "order-2", key="ada")
    listed = pipeline("events", columns=80)
    assert "order-2             billing/orders.paid" in listed.out
    assert "send: pending" in listed.out

    def ids(*options: str) -> list[str]:
        return [event["message_id"] for event in pipeline("events", *options, "--json").json]

    assert ids() == ["order-2", "receipt of order-1", "order-1"]
    assert ids("--workflow", "billing", "--topic", "receipts.sent") == ["receipt of order-1"]
    assert ids("--status", "pending") == ["order-2"]
    assert ids("--status", "consumed") == ["order-1"]
    assert ids("--key", "ada") == ["order-2"]
    assert ids("--message-id", "order-1") == ["order-1"]
    assert ids("--message-id", "order-1", "--status", "pending") == []
    shown_json = pipeline("events", str(waits), "--json").json
    assert (shown_json["event"]["key"], shown_json["payload"], shown_json["deliveries"][0]["status"]) == (
        "ada",
        None,
        "pending",
    )
    assert pipeline("events", str(waits), "--payload", "--json").json["payload"] == {"n": 0}


def test_one_event_is_shown_with_its_deliveries_and_what_each_caused(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db, consumers=("send", "count"))
    run = scenarios.a_done_order(db)
    event = run.event_ids[0]
    shown = pipeline("events", "show", str(event), columns=80).out
    for text in ("send: consumed", str(run.id), "receipt of order-1", "count: pending"):
        assert text in shown
    deliveries = pipeline("events", str(event), "--json").json["deliveries"]
    assert {each["handler"]: len(each["runs"]) for each in deliveries} == {"count": 0, "send": 1}


def test_an_event_names_also_a_run_that_released_it(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    (event,) = some_events(db, "order-1")
    stopped(db, a_run(db, Phase.PREPARED), FailureKind.LOGIC)
    (delivery,) = pipeline("events", str(event), "--json").json["deliveries"]
    assert (delivery["status"], [run["status"] for run in delivery["runs"]]) == ("pending", ["failed:logic"])
