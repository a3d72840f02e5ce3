"""Resolve mutations on the command line: list, preview, resolve with a reason."""

import json
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.database import Database
from pipeline.testing import Inline
from tests.cli.conftest import Pipeline
from tests.support import unanswered_mail_workflow


@pytest.fixture
def run(db: Database) -> Inline:
    """Create three indeterminate mutations and one pending event."""
    made = Inline(db, [unanswered_mail_workflow.counter], [unanswered_mail_workflow.mail])
    made.publish(unanswered_mail_workflow.letters, *({"to": f"{name}@example.org"} for name in ("ada", "bob", "cy")))
    made.run()
    return made


def listed(pipeline: Pipeline, *options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pipeline("mutations", "--json", *options).json
    return found


def test_unresolved_mutations_are_listed_redacted(run: Inline, pipeline: Pipeline) -> None:
    shown = pipeline("mutations")
    assert "Mail to ada@example.org" in shown.out
    assert "3 indeterminate" in shown.out
    assert "secret text" not in shown.out + json.dumps(listed(pipeline))
    assert listed(pipeline, "--status", "applied") == []
    _settle(run)


def test_a_mutation_is_resolved_with_a_reason_and_refused_without(run: Inline, pipeline: Pipeline) -> None:
    first = listed(pipeline)[0]["id"]
    refused = pipeline("resolve", "happened", first)
    assert (refused.code, "gave no reason" in refused.err) == (2, True)
    done = pipeline("resolve", "happened", first, "-m", "it is in the outbox", "--no-result")
    assert (done.code, len(listed(pipeline))) == (0, 2), done.err
    again = pipeline("resolve", "skip", first, "-m", "changed my mind")
    assert (again.code, "applied" in again.err) == (6, True)
    nonsense = pipeline("resolve", "skip", "seven", "-m", "x")
    assert "'seven' is not the id of a mutation" in nonsense.err
    _settle(run)


def test_many_mutations_are_shown_first_and_resolved_with_yes(run: Inline, pipeline: Pipeline) -> None:
    nothing = pipeline("resolve", "skip", "-m", "old")
    assert "No mutation was selected" in nothing.err
    preview = pipeline("resolve", "skip", "--operation", "mail.send", "-m", "too old")
    assert "Nothing was changed" in preview.out
    assert len(listed(pipeline)) == 3
    command = preview.out.splitlines()[-1].partition("Exactly these are resolved by: pipeline ")[2]
    other = pipeline("resolve", "happened", *shlex.split(command)[2:])
    assert (other.code, "expected one of happened" in other.err) == (2, True)
    pipeline("resolve", "happened", listed(pipeline)[0]["id"], "-m", "seen", "--no-result")  # after the preview
    done = pipeline(*shlex.split(command))
    assert (done.code, "2 resolved, 1 refused" in done.out) == (1, True), done.err
    nothing = pipeline("resolve", "skip", "--workflow", "counter", "-m", "old", "--yes")
    assert (nothing.code, "No mutation that waits matches" in nothing.err) == (2, True)
    run.run_until_idle()


#: Options that match rows of an export with mutations by the recipient.
BY_RECIPIENT = ("--column", "recipient", "--match-by", "params.to", "--no-result", "-m", "the provider's list")


def test_an_export_resolves_the_mutations_it_lists(run: Inline, pipeline: Pipeline, tmp_path: Path) -> None:
    export = tmp_path / "sent.csv"
    export.write_text("recipient,id\nada@example.org,1\nzoe@example.org,2\n")
    given = ("resolve-from", str(export), *BY_RECIPIENT)
    preview = pipeline(*given)
    assert "1 matched, 2 not in the file, 0 ambiguous, 1 rows without a mutation" in preview.out
    assert len(listed(pipeline)) == 3
    assert "1 resolved" in pipeline(*given, "--yes").out
    assert len(listed(pipeline)) == 2
    _settle(run)


def test_an_earlier_preview_of_an_export_is_committed_as_it_was_shown(
    run: Inline, pipeline: Pipeline, tmp_path: Path
) -> None:
    export = tmp_path / "sent.csv"
    export.write_text("recipient\nada@example.org\nbob@example.org\n")
    preview = pipeline("resolve-from", str(export), *BY_RECIPIENT)
    command = preview.out.splitlines()[-1].partition("Exactly these are resolved by: pipeline ")[2]
    assert "--preview" in command, preview.out
    export.write_text("recipient\ncy@example.org\n")  # what is in the file now does not matter
    pipeline("resolve", "skip", listed(pipeline)[0]["id"], "-m", "faster than the export")
    other = pipeline("resolve", "skip", *shlex.split(command)[1:])
    assert (other.code, "expected one of skip" in other.err) == (2, True)
    done = pipeline(*shlex.split(command))
    assert (done.code, "1 resolved, 1 refused" in done.out) == (1, True), done.err
    assert [each["headline"] for each in listed(pipeline)] == ["Mail to cy@example.org"]
    for given in ((), (str(export), "--preview", "x")):
        wrong = pipeline("resolve-from", *given, "-m", "why")
        assert (wrong.code, "Expected a provider's export, or --preview" in wrong.err) == (2, True)
    _settle(run)


def test_an_export_resolves_nothing_while_older_rows_of_the_ledger_were_not_searched(
    run: Inline, pipeline: Pipeline, tmp_path: Path
) -> None:
    export = tmp_path / "sent.csv"
    export.write_text("recipient\nada@example.org\n")
    given = ("resolve-from", str(export), *BY_RECIPIENT)
    done = pipeline(*given, "--recent", "2", "--yes")
    assert "0 matched, 0 not in the file, 3 ambiguous" in done.out
    assert "The ledger has more than its newest 2 rows" in done.err
    assert len(listed(pipeline)) == 3
    _settle(run)


def test_connectors_are_listed_with_their_grades(pipeline: Pipeline) -> None:
    done = pipeline("connectors", "--json")
    assert [(row["operation"], row["grade"]) for row in done.json] == [("folders", "read"), ("send", "C")]
    output = pipeline("connectors").out
    assert "2 operations" in output
    assert "C: an operator must resolve an unknown outcome; a request that arrives twice counts once." in output
    assert "A and C: a repeat of the same request for the same inputs has the same key" in output
    assert "\nD: " not in output


def test_did_not_happen_says_that_a_new_run_sends_under_the_same_key(db: Database, pipeline: Pipeline) -> None:
    run = Inline(
        Database(db.engine, clock_offset=timedelta(hours=-1)),
        [unanswered_mail_workflow.counter],
        [unanswered_mail_workflow.mail],
    )
    run.publish(unanswered_mail_workflow.letters, {"to": "ada@example.org"})
    run.run()
    first = listed(pipeline)[0]["id"]
    assert "After did_not_happen a new run sends it again under the same key" in pipeline("mutations", first).out
    done = pipeline("resolve", "did_not_happen", first, "-m", "not in their list", "--yes")
    assert "a new run sends it again." in done.out, done.err


def test_a_plan_prints_the_requests_that_would_be_sent(db: Database, pipeline: Pipeline) -> None:
    run = Inline(db, [unanswered_mail_workflow.counter], [unanswered_mail_workflow.mail])
    run.publish(unanswered_mail_workflow.letters, {"to": "ada@example.org"}, {"to": "bob@example.org"})
    done = pipeline("plan", "counter", "--json")
    found = done.json
    assert (found["counts"], found["renames"]) == ({"mail.send": 2}, [])
    assert [request["params"] for request in found["requests"]] == [
        {"to": "ada@example.org", "body": "•••"},
        {"to": "bob@example.org", "body": "•••"},
    ]
    assert "mail.send: 2" in pipeline("plan", "counter").out
    unknown = pipeline("plan", "nowhere")
    assert (unknown.code, "There is no workflow 'nowhere'. Known: counter" in unknown.err) == (5, True)
    assert run.runs() == []


def test_a_plan_says_which_runs_exist_and_have_not_sent_their_request_yet(db: Database, pipeline: Pipeline) -> None:
    assert pipeline("breaker", "open", "mail.send", "-m", "provider is down").code == 0
    run = Inline(db, [unanswered_mail_workflow.counter], [unanswered_mail_workflow.mail])
    run.publish(unanswered_mail_workflow.letters, {"to": "ada@example.org"})
    run.run()
    done = pipeline("plan", "counter")
    assert "its run exists and has not sent it yet" in done.out
    assert "mail.send: 1" in done.out


def test_a_breaker_is_opened_listed_and_closed(pipeline: Pipeline) -> None:
    assert pipeline("breaker", "open", "mail.send", "-m", "provider is down").code == 0
    (row,) = pipeline("breakers", "--json").json
    assert (row["connector"], row["operation"], row["reason"]) == ("mail", "send", "provider is down")
    assert "1 open" in pipeline("breakers").out
    assert "mail.send: close" in pipeline("breaker", "close", "mail.send", "-m", "it is back").out
    assert "was not open" in pipeline("breaker", "close", "mail.send", "-m", "it is back").out
    assert "names no operation" in pipeline("breaker", "open", "mail", "-m", "x").err


def _settle(run: Inline) -> None:
    """Resolve everything, so that no invariant is overdue."""
    run.advance(timedelta(seconds=1))
    run.run_until_idle()
