"""Answers of an operator: with the result that `next` needs, after what follows was shown, on the shown state."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.database import Database
from pipeline.testing import Inline
from tests.cli.conftest import Pipeline
from tests.support import unanswered_charges_workflow as shop
from tests.support.table_reads import rows
from tests.support.wait import wait_for

Books = Callable[..., Inline]
PIPELINE = Path(sys.executable).parent / "pipeline"


@pytest.fixture
def books(db: Database, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Books:
    """Create indeterminate mutations of these operations, whose quiet period is over."""
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "tests.support.unanswered_charges_workflow")

    def reach(*operations: str) -> Inline:
        past = Database(db.engine, clock_offset=timedelta(minutes=-5))
        run = Inline(past, [shop.books], [shop.bank])
        run.publish(shop.due, *({"operation": name, "cents": 100 + n} for n, name in enumerate(operations)))
        run.run()
        return run

    return reach


def continued(db: Database, pipeline: Pipeline) -> list[Any]:
    """Let the workflow continue; return what it published."""
    run = Inline(db, [shop.books], [shop.bank])
    run.run_until_idle()
    assert pipeline("workflows", "books", "--json").json["workflow"]["status"] == "active"
    found = rows(db, "SELECT payload FROM pipeline.events WHERE topic = 'done' ORDER BY id")
    return [row.payload["id"] for row in found]


def happened_command(pipeline: Pipeline) -> list[str]:
    """Return the printed command for a mutation that happened, without `pipeline`, as a shell would split it."""
    (item,) = [each for each in pipeline("attention", "--json").json if each["kind"] == "indeterminate"]
    (command,) = [each for each in item["commands"] if each.startswith("pipeline resolve happened")]
    assert f"    {command}\n" in pipeline("attention").out
    detail = pipeline("mutations", item["subject"].removeprefix("mutation "), "--json").json
    assert command in detail["advice"]["commands"], "the same command everywhere"
    return shlex.split(command)[1:]


def test_the_printed_command_for_an_operation_without_a_result_continues_its_workflow(
    db: Database, pipeline: Pipeline, books: Books
) -> None:
    books("void")
    command = happened_command(pipeline)
    assert "--no-result" in command
    assert pipeline(*command).code == 0
    assert continued(db, pipeline) == ["none"]


def test_the_printed_command_for_an_undeclared_result_writes_nothing_until_it_is_filled_in(
    db: Database, pipeline: Pipeline, books: Books
) -> None:
    books("note")
    command = happened_command(pipeline)
    blank = pipeline(*command)
    assert (blank.code, "--result is no JSON" in blank.err) == (2, True), "`next` may need a result"
    assert pipeline(*(part.replace("<JSON>", '{"id": "n_1"}') for part in command)).code == 0
    assert continued(db, pipeline) == ["none"]


def test_the_printed_command_for_a_declared_result_continues_its_workflow_once_it_is_filled_in(
    db: Database, pipeline: Pipeline, books: Books
) -> None:
    books("refund")
    command = happened_command(pipeline)
    template = command[command.index("--result") + 1]
    assert template == '{"id": <string>, "cents": <integer>}'
    blank = pipeline(*command)
    assert (blank.code, "--result is no JSON" in blank.err) == (2, True)
    filled = [part.replace("<string>", '"re_1"').replace("<integer>", "100") for part in command]
    assert pipeline(*filled).code == 0
    assert continued(db, pipeline) == ["re_1"]


def test_the_printed_command_for_a_fetchable_result_fetches_it_by_the_external_id(
    db: Database, pipeline: Pipeline, books: Books
) -> None:
    books("charge")
    command = happened_command(pipeline)
    blank = pipeline(*command)
    assert (blank.code, "has no result for the external id '<id>' (no such charge)" in blank.err) == (2, True)
    done = pipeline(*(part.replace("<id>", "ch_100") for part in command))
    assert done.code == 0, done.err
    assert continued(db, pipeline) == ["ch_100"]
    (act,) = rows(db, "SELECT evidence FROM pipeline.audit WHERE act = 'mutation.happened'")
    assert act.evidence == {"external_id": "ch_100", "result": {"id": "ch_100", "cents": 100}}


@pytest.mark.parametrize(
    ("operation", "options", "reason"),
    [
        ("refund", (), "its result was not given"),
        ("refund", ("--no-result",), "$ does not fit"),
        ("refund", ("--result", '{"id": 7, "cents": 1}'), "$.id does not fit"),
        ("refund", ("--result", "{"), "--result is no JSON"),
        ("refund", ("--external-id", "re_1"), "declares no fetch method"),
        ("refund", ("--result", "{}", "--no-result"), "given in several ways"),
        ("void", ("--result", '{"id": "x"}'), "$ does not fit"),
        ("charge", ("--external-id", "ch_9"), "no such charge"),
        ("charge", ("--external-id", "down"), "ConnectionRefusedError"),
    ],
)
def test_a_result_that_does_not_fit_is_refused_and_nothing_is_written(
    pipeline: Pipeline, books: Books, operation: str, options: tuple[str, ...], reason: str
) -> None:
    books(operation)
    (before,) = pipeline("mutations", "--json").json
    done = pipeline("resolve", "happened", before["id"], *options, "-m", "seen")
    assert (done.code, done.out) == (2, "")
    assert reason in done.err
    assert "4242" not in done.err, "a redacted parameter is not shown"
    assert pipeline("mutations", "--json").json == [before]


def test_without_its_code_a_result_is_checked_and_cannot_be_fetched(
    db: Database, pipeline: Pipeline, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    books("refund")
    (found,) = pipeline("mutations", "--json").json
    monkeypatch.setenv("PIPELINE_WORKFLOWS", "")
    command = happened_command(pipeline)
    assert command[3:5] == ["--result", '{"id": <string>, "cents": <integer>}']
    given = ("resolve", "happened", found["id"], "-m", "seen", "--result", '{"id": 7, "cents": 1}')
    refused = pipeline(*given)
    assert (refused.code, "$.id does not fit" in refused.err) == (2, True)
    unseen = pipeline("resolve", "happened", found["id"], "-m", "seen", "--external-id", "re_2")
    assert (unseen.code, "cannot be fetched, because its code is not here" in unseen.err) == (2, True)
    assert pipeline(*given, "--unchecked").code == 0
    (act,) = rows(db, "SELECT evidence FROM pipeline.audit WHERE act = 'mutation.happened'")
    assert act.evidence["unchecked"] is True


def test_advice_about_an_undeclared_result_says_that_next_may_need_one(pipeline: Pipeline, books: Books) -> None:
    books("note", "void")
    texts = {
        each["title"]: pipeline("mutations", each["id"]).out
        for each in pipeline("mutations", "--json").json
        for each["title"] in [each["operation"]]
    }
    assert "Its operation does not declare whether it has a result" in texts["note"]
    assert "does not declare" not in texts["void"]


def test_a_run_names_its_mutation_where_the_commands_are(pipeline: Pipeline, books: Books) -> None:
    books("refund")
    (found,) = pipeline("mutations", "--json").json
    advice = pipeline("runs", found["run_id"], "--json").json["advice"]
    assert advice["commands"] == [f"pipeline mutations {found['id']}"]


def test_an_export_needs_the_place_of_the_results_and_checks_each(
    db: Database, pipeline: Pipeline, books: Books, tmp_path: Path
) -> None:
    books("charge", "refund", "void")
    found = {each["operation"]: each for each in pipeline("mutations", "--json").json}
    export = tmp_path / "bank.jsonl"
    lines = [
        {"key": found["charge"]["idempotency_key"], "ours": "ch_100", "full": {"id": "ch_100", "cents": 100}},
        {"key": found["refund"]["idempotency_key"], "ours": "re_1", "full": {"id": "re_1"}},
    ]
    export.write_text("\n".join(json.dumps(line) for line in lines))
    given = ("resolve-from", str(export), "--column", "key", "-m", "their export")
    unsaid = pipeline(*given)
    assert unsaid.out.count("would be refused: It happened, and its result was not given") == 2
    both = pipeline(*given, "--no-result", "--result-column", "full")
    assert (both.code, "given in several ways" in both.err) == (2, True)
    missing = pipeline(*given, "--result-column", "nowhere")
    assert "A row has no column 'nowhere' for its result" in missing.err
    preview = pipeline(*given, "--result-column", "full")
    assert preview.out.count("would be refused") == 1
    assert "is missing; expected it, as" in preview.out
    done = pipeline(*given, "--result-column", "full", "--yes")
    assert (done.code, "1 resolved, 1 refused" in done.out) == (1, True)
    assert {each["operation"] for each in pipeline("mutations", "--json").json} == {"refund", "void"}
    fetched = pipeline(*given, "--external-id", "ours", "--yes")
    assert "declares no fetch method" in fetched.out
    assert continued(db, pipeline) == ["ch_100"]


def test_an_export_fetches_each_result_by_the_external_id_of_its_row(
    db: Database, pipeline: Pipeline, books: Books, tmp_path: Path
) -> None:
    books("charge", "charge")
    export = tmp_path / "bank.csv"
    keys = [each["idempotency_key"] for each in pipeline("mutations", "--json").json]
    export.write_text(f"key,id\n{keys[0]},ch_100\n{keys[1]},ch_101\n")
    done = pipeline("resolve-from", str(export), "--column", "key", "--external-id", "id", "-m", "export", "--yes")
    assert "2 resolved, 0 refused" in done.out, done.err
    assert sorted(continued(db, pipeline)) == ["ch_100", "ch_101"]


def test_did_not_happen_without_a_terminal_needs_yes(pipeline: Pipeline, books: Books) -> None:
    books("charge")
    (before,) = pipeline("mutations", "--json").json
    refused = pipeline("resolve", "did_not_happen", before["id"], "-m", "not in their list")
    assert (refused.code, refused.out) == (2, "")
    assert "this is no terminal" in refused.err
    assert "--yes" in refused.err
    assert pipeline("mutations", "--json").json == [before]


def test_did_not_happen_shows_the_request_the_grade_and_what_follows(pipeline: Pipeline, books: Books) -> None:
    books("charge", "refund")
    found = {each["operation"]: each for each in pipeline("mutations", "--json").json}
    charged = pipeline("resolve", "did_not_happen", found["charge"]["id"], "-m", "not there", "--yes")
    assert charged.code == 0, charged.err
    assert "Charge 100" in charged.out
    assert "bank.charge, grade D" in charged.out
    assert "•••" in charged.out
    assert "4242" not in charged.out
    assert "Its events are released, and a new run prepares them again." in charged.out
    assert "a new run sends it again under a new key" in charged.out
    assert "it happens twice" in charged.out
    refunded = pipeline("resolve", "did_not_happen", found["refund"]["id"], "-m", "not there", "--yes", "--json")
    assert refunded.json["act"] == "did_not_happen", "JSON alone on standard output"
    assert "bank.refund, grade C" in refunded.err
    assert "a new run sends it again under the same key" in refunded.err


def test_did_not_happen_of_a_refused_request_gives_its_repeat_a_new_key(
    db: Database, pipeline: Pipeline, books: Books
) -> None:
    books("refund", "refund")
    kept, refused = pipeline("mutations", "--json").json
    assert pipeline("resolve", "did_not_happen", kept["id"], "-m", "not there", "--yes").code == 0
    done = pipeline("resolve", "did_not_happen", refused["id"], "--refused", "-m", "they keep their 500", "--yes")
    assert done.code == 0, done.err
    assert "A new run sends it again under a new key" in done.out
    assert "under the same key" not in done.out
    (act,) = rows(db, "SELECT evidence FROM pipeline.audit WHERE mutation_id = :of", of=refused["id"])
    assert act.evidence == {"refused": True}
    Inline(db, [shop.books], [shop.bank]).run()
    keys = {each["idempotency_key"] for each in pipeline("mutations", "--json").json}
    assert keys == {kept["idempotency_key"], f"{refused['idempotency_key'].removesuffix(':0')}:1"}


def test_a_refusal_is_about_one_mutation_that_did_not_happen(pipeline: Pipeline, books: Books) -> None:
    books("refund")
    (before,) = pipeline("mutations", "--json").json
    other = pipeline("resolve", "skip", before["id"], "--refused", "-m", "seen")
    assert (other.code, "expected it with did_not_happen only" in other.err) == (2, True)
    many = pipeline("resolve", "did_not_happen", "--workflow", "books", "--refused", "-m", "seen", "--yes")
    assert (many.code, "are about one mutation" in many.err) == (2, True)
    assert pipeline("mutations", "--json").json == [before]


def typed(arguments: list[str], keys: bytes, prompt: str, before_keys: Callable[[], object] = lambda: None) -> Any:
    """Run a command on a terminal of its own; press the keys once it has asked."""
    terminal, inside = pty.openpty()
    with subprocess.Popen([PIPELINE, *arguments], stdin=inside, stdout=inside, stderr=inside) as process:
        os.close(inside)
        os.set_blocking(terminal, False)
        shown = b""

        def read() -> bool:
            nonlocal shown
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # nothing yet, or the other side has closed
                return process.poll() is not None
            return prompt.encode() in shown

        wait_for(read, within=60, why=prompt)
        before_keys()
        os.write(terminal, keys)
        wait_for(lambda: read() and process.poll() is not None, within=60, why="the end of the command")
        os.close(terminal)
    return process.returncode, re.sub(r"\s+", " ", shown.decode())


def test_did_not_happen_asks_on_a_terminal_and_a_no_changes_nothing(pipeline: Pipeline, books: Books) -> None:
    books("charge")
    (before,) = pipeline("mutations", "--json").json
    command = ["resolve", "did_not_happen", before["id"], "-m", "not in their list"]
    code, shown = typed(command, b"n\n", "Resolve it as not happened?")
    assert (code, "did not confirm. Nothing was changed." in shown) == (2, True), shown
    assert pipeline("mutations", "--json").json == [before]
    code, shown = typed(command, b"y\n", "Resolve it as not happened?")
    assert (code, "bank.charge, grade D" in shown) == (0, True), shown
    assert pipeline("mutations", "--json").json == []


def test_the_prompt_keeps_the_state_that_it_showed(pipeline: Pipeline, books: Books) -> None:
    books("charge")
    (before,) = pipeline("mutations", "--json").json
    meanwhile = ("resolve", "happened", before["id"], "-m", "it is there", "--external-id", "ch_100")
    code, shown = typed(
        ["resolve", "did_not_happen", before["id"], "-m", "not in their list"],
        b"y\n",
        "Resolve it as not happened?",
        lambda: pipeline(*meanwhile),
    )
    assert (code, "it has changed since it was shown (status was indeterminate, is applied" in shown) == (6, True)


def test_an_answer_is_refused_when_the_state_is_not_the_one_that_was_shown(pipeline: Pipeline, books: Books) -> None:
    books("charge")
    (found,) = pipeline("mutations", "--json").json
    (item,) = pipeline("attention", "--json").json
    assert item["state"] == found["state"]
    assert pipeline("mutations", found["id"], "--json").json["mutation"]["state"] == found["state"]
    other = found["state"].replace(".1.0.", ".1.2.")
    for kind in ("happened", "did_not_happen", "skip"):
        result = ("--external-id", "ch_100") if kind == "happened" else ()
        done = pipeline("resolve", kind, found["id"], *result, "--if-state", other, "-m", "seen", "--yes")
        assert (done.code, "reconcile attempts was 2, is 0" in done.err) == (6, True), done.err
    assert pipeline("mutations", "--json").json == [found]
    for text in ("yesterday", ""):  # the latter of a variable that is not set
        for kind in ("did_not_happen", "skip"):
            nonsense = pipeline("resolve", kind, found["id"], "--if-state", text, "-m", "seen", "--yes")
            assert f"{text!r} is no state of a mutation" in nonsense.err
    assert pipeline("mutations", "--json").json == [found]
    many = pipeline("resolve", "skip", "--workflow", "books", "--if-state", found["state"], "-m", "seen")
    assert "are about one mutation" in many.err
    assert pipeline("resolve", "skip", found["id"], "--if-state", found["state"], "-m", "seen").code == 0
