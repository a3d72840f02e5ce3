"""Resolutions by an operator: one by one, many at once, and from a provider's export."""

import csv
import gzip
import json
import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline import ReconcilePolicy
from pipeline.admin import provider_export
from pipeline.admin.given_results import NO_RESULT, GivenResult
from pipeline.admin.mutations import detail
from pipeline.admin.provider_export import RowResults
from pipeline.admin.resolutions import MatchCandidate, MutationFilter, ResolutionKind, Resolutions, resolutions_for
from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, QuietPeriodError, StaleWriteError
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Actor
from pipeline.store.database import Command, Database, Statement
from pipeline.testing import Does, assert_consumed, assert_deliveries, scripted
from pipeline.workflows.registration import register_workflows
from tests.support.scripted_consumers import Shop, each_once

ADA = Actor(name="ada", reason="the provider's dashboard shows it")
_AUDIT = Statement[Any]("SELECT actor, act, reason, mutation_id FROM pipeline.audit ORDER BY id")


class UnresolvedShop:
    """A shop with ``count`` indeterminate mutations, and the client that resolves them."""

    def __init__(self, db: Database, count: int = 1, *, does: Does = Does.TIMES_OUT_AFTER, **bounds: Any) -> None:
        self.shop = Shop(concurrency=8, on_uncertain="contain")
        given = {"can_reconcile": False, "timeout": timedelta(seconds=30), "redact": frozenset({"n"}), **bounds}
        self.shop.mail = scripted("mail", **given)
        self.shop.mail.will(*[does] * count)
        self.run = self.shop.started(db, count)
        self.run.run()
        self.woken: list[str] = []
        self.resolutions = Resolutions(db, self.run.registry, self.woken.append)
        self.run.advance(timedelta(minutes=1))


def test_a_summary_has_what_an_operator_needs_and_nothing_redacted(db: Database) -> None:
    unresolved = UnresolvedShop(db)
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    (row,) = unresolved.run.ledger()
    assert (mutation.id, mutation.workflow, mutation.handler) == (row.id, "shop", "Send")
    assert mutation.message_ids == ("m1",)
    assert mutation.params == {"n": "•••"}
    assert "timed out after applying" in (mutation.error or "")
    assert (mutation.quiet_until, mutation.can_try_again) == (None, False)
    assert json.dumps(asdict(mutation), default=str)
    assert unresolved.resolutions.mutation(row.id).id == row.id


def test_without_the_code_of_an_operation_the_same_is_shown(db: Database) -> None:
    unresolved = UnresolvedShop(db)
    assert Resolutions(db).unresolved_mutations() == unresolved.resolutions.unresolved_mutations()


def test_the_parameters_of_an_operation_that_no_worker_registered_are_not_shown(db: Database) -> None:
    UnresolvedShop(db)
    with db.transaction() as tx:
        tx.execute(Command("DELETE FROM pipeline.operations"))
    (mutation,) = Resolutions(db).unresolved_mutations()
    assert (mutation.headline, mutation.declared_result) == ("m1", None)
    assert mutation.params == {"n": "(no worker has registered its operation)"}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (ResolutionKind.HAPPENED, "consumed"),
        (ResolutionKind.DID_NOT_HAPPEN, "consumed"),
        (ResolutionKind.SKIP, "skipped"),
    ],
)
def test_a_resolution_is_audited_and_wakes_the_workflow(db: Database, answer: ResolutionKind, status: str) -> None:
    unresolved = UnresolvedShop(
        db, does=Does.TIMES_OUT_AFTER if answer is ResolutionKind.HAPPENED else Does.TIMES_OUT_BEFORE
    )
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    result = NO_RESULT if answer is ResolutionKind.HAPPENED else None
    unresolved.resolutions.resolve(mutation.id, answer, ADA, result=result)
    assert unresolved.woken == ["shop"]
    with db.transaction() as tx:
        (kept,) = tx.all(_AUDIT)
    assert (kept.actor, kept.act, kept.reason) == ("ada", f"mutation.{answer}", ADA.reason)
    unresolved.run.run_until_idle()
    assert_deliveries(unresolved.run, unresolved.shop.orders, status)
    assert unresolved.resolutions.unresolved_mutations() == []


def test_the_run_that_follows_did_not_happen_sends_under_a_new_key(db: Database) -> None:
    unresolved = UnresolvedShop(db, does=Does.TIMES_OUT_BEFORE)
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    unresolved.resolutions.resolve(mutation.id, ResolutionKind.DID_NOT_HAPPEN, ADA)
    unresolved.run.run_until_idle()
    (first, second) = (call.key for call in unresolved.shop.mail.calls)
    assert first == mutation.idempotency_key
    assert second != first, "so the other side cannot tell that it is the same"


def test_next_gets_the_result_that_the_operator_gave(db: Database) -> None:
    seen: list[Any] = []
    unresolved = UnresolvedShop(db)
    unresolved.run.registry.workflows["shop"].consumers[
        "Send"
    ].instance.__class__.next = (  # what the result is good for
        lambda self, ctx, prepared, result: seen.append(result.value)
    )
    unresolved.resolutions.resolve(
        unresolved.resolutions.unresolved_mutations()[0].id,
        ResolutionKind.HAPPENED,
        ADA,
        result=GivenResult(value={"id": "ch_1"}),
    )
    unresolved.run.run_until_idle()
    assert seen == [{"id": "ch_1"}]


def test_try_again_gives_the_reconciler_a_new_budget(db: Database) -> None:
    unresolved = UnresolvedShop(db, can_reconcile=True, policy=ReconcilePolicy(max_attempts=1))
    assert unresolved.resolutions.unresolved_mutations() == [], "the first reconcile attempt found it"
    unresolved.shop.mail.will(Does.TIMES_OUT_AFTER)
    unresolved.shop.mail.cannot_tell(2)
    unresolved.run.publish(unresolved.shop.orders, {"n": 1})
    unresolved.run.run()
    unresolved.run.sweeps.reconcile()
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    assert mutation.can_try_again
    unresolved.resolutions.resolve(mutation.id, ResolutionKind.TRY_AGAIN, ADA)
    unresolved.run.run_until_idle()
    assert_consumed(unresolved.run, unresolved.shop.orders)
    assert each_once(unresolved.shop, [0, 1])


def test_a_mutation_can_be_reconciled_after_its_operation_got_a_reconcile(db: Database) -> None:
    unresolved = UnresolvedShop(db)
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    assert not mutation.can_try_again
    with pytest.raises(IllegalTransitionError, match="of an operation that can reconcile"):
        unresolved.resolutions.resolve(mutation.id, ResolutionKind.TRY_AGAIN, ADA)
    send = type(unresolved.shop.mail).operations()["send"]
    send.reconcile(lambda connector, call, **_: connector._reconcile("send", call))
    register_workflows(db, unresolved.run.registry)
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    assert mutation.can_try_again
    assert detail(unresolved.resolutions, str(mutation.id)).advice.commands[-1].startswith("pipeline resolve try_again")
    assert unresolved.resolutions.resolve_many(resolutions_for([mutation], ResolutionKind.TRY_AGAIN), ADA).updated == [
        mutation.id
    ]
    unresolved.run.run_until_idle()
    assert_consumed(unresolved.run, unresolved.shop.orders)
    assert each_once(unresolved.shop, [0])


def test_a_resolution_without_a_reason_is_refused(db: Database) -> None:
    unresolved = UnresolvedShop(db)
    with pytest.raises(InvalidInputError, match="ada gave no reason"):
        unresolved.resolutions.resolve(
            unresolved.resolutions.unresolved_mutations()[0].id, ResolutionKind.SKIP, Actor(name="ada")
        )
    assert len(unresolved.resolutions.unresolved_mutations()) == 1


def test_a_result_is_accepted_with_happened_only(db: Database) -> None:
    unresolved = UnresolvedShop(db)
    with pytest.raises(InvalidInputError, match="expected it with happened only"):
        unresolved.resolutions.resolve(
            unresolved.resolutions.unresolved_mutations()[0].id, ResolutionKind.SKIP, ADA, result=GivenResult(value={})
        )


def test_did_not_happen_is_refused_while_the_request_may_still_arrive(db: Database) -> None:
    unresolved = UnresolvedShop(db, settle=timedelta(hours=1))
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    assert mutation.quiet_until is not None
    with pytest.raises(QuietPeriodError):
        unresolved.resolutions.resolve(mutation.id, ResolutionKind.DID_NOT_HAPPEN, ADA)
    unresolved.resolutions.resolve(mutation.id, ResolutionKind.HAPPENED, ADA, result=NO_RESULT)
    unresolved.run.run_until_idle()


def test_the_second_of_two_operators_is_refused(db: Database) -> None:
    unresolved = UnresolvedShop(db)
    (mutation,) = unresolved.resolutions.unresolved_mutations()
    unresolved.resolutions.resolve(mutation.id, ResolutionKind.HAPPENED, ADA, result=NO_RESULT)
    with pytest.raises(IllegalTransitionError, match="applied"):
        unresolved.resolutions.resolve(mutation.id, ResolutionKind.DID_NOT_HAPPEN, ADA)
    unresolved.run.run_until_idle()
    assert each_once(unresolved.shop, [0])


def test_an_approval_is_for_the_request_that_was_shown(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db, 1)
    run.run()
    resolutions = Resolutions(db, run.registry)
    (mutation,) = resolutions.pending_approvals()
    assert mutation.status == MutationStatus.PENDING
    changed = type(mutation)(**{**asdict(mutation), "request_hash": "another"})
    with pytest.raises(StaleWriteError):
        resolutions.approve(changed, ADA)
    resolutions.approve(mutation, ADA)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_rejected_request_is_never_sent(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db, 1)
    run.run()
    resolutions = Resolutions(db, run.registry)
    resolutions.reject(resolutions.pending_approvals("shop")[0].id, ADA)
    run.run_until_idle()
    assert_deliveries(run, shop.orders, "skipped")
    assert shop.mail.calls == []


def test_unresolved_mutations_are_filtered(db: Database) -> None:
    unresolved = UnresolvedShop(db, 3)
    assert (
        len(
            unresolved.resolutions.unresolved_mutations(
                MutationFilter(workflow="shop", connector="mail", operation="send")
            )
        )
        == 3
    )
    assert unresolved.resolutions.unresolved_mutations(MutationFilter(workflow="other")) == []
    assert unresolved.resolutions.unresolved_mutations(MutationFilter(operation="cancel")) == []
    assert unresolved.resolutions.unresolved_mutations(MutationFilter(older_than=timedelta(hours=1))) == []
    assert (
        len(unresolved.resolutions.unresolved_mutations(MutationFilter(older_than=timedelta(seconds=1)), limit=2)) == 2
    )
    with pytest.raises(InvalidInputError, match="There is no mutation"):
        unresolved.resolutions.mutation(unresolved.run.runs()[0].id)


def test_many_resolutions_are_independent_of_a_refused_one(db: Database) -> None:
    unresolved = UnresolvedShop(db, 3)
    questions = unresolved.resolutions.unresolved_mutations()
    unresolved.resolutions.resolve(questions[1].id, ResolutionKind.HAPPENED, ADA, result=NO_RESULT)
    unresolved.woken.clear()
    settled = unresolved.resolutions.resolve_many(resolutions_for(questions, ResolutionKind.HAPPENED, NO_RESULT), ADA)
    assert settled.updated == [questions[0].id, questions[2].id]
    assert list(settled.refused) == [questions[1].id]
    assert unresolved.woken == ["shop"]
    unresolved.run.run_until_idle()
    assert_consumed(unresolved.run, unresolved.shop.orders)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_providers_export_resolves_what_it_lists_after_a_preview(db: Database, tmp_path: Path, suffix: str) -> None:
    unresolved = UnresolvedShop(db, 4)
    keys = [mutation.idempotency_key for mutation in unresolved.resolutions.unresolved_mutations()]
    rows = [{"reference": key, "result": f'{{"id": "ch_{key}"}}'} for key in (keys[0], keys[2], "x")]
    file = _written(tmp_path / f"export{suffix}", rows)
    found = provider_export.preview(
        unresolved.resolutions.match_candidates("idempotency_key"),
        provider_export.read_rows(file),
        "reference",
        results=RowResults(column="result"),
    )
    assert [item.mutation.idempotency_key for item in found.resolutions] == [keys[0], keys[2]]
    assert (len(found.not_in_export), len(found.ambiguous), found.unmatched_rows) == (2, 0, 1)
    assert len(unresolved.resolutions.unresolved_mutations()) == 4, "a preview changes nothing"
    unresolved.resolutions.resolve_many(found.resolutions, ADA)
    applied = [row for row in unresolved.run.ledger() if row.status == "applied"]
    assert [row.result for row in applied] == [{"id": f"ch_{keys[0]}"}, {"id": f"ch_{keys[2]}"}]
    with db.transaction() as tx:
        evidence = [row.evidence for row in tx.all(Statement[Any]("SELECT evidence FROM pipeline.audit ORDER BY id"))]
    assert [each["row"] for each in evidence] == rows[:2], "the row is kept with the act"
    _resolved_by_hand(unresolved)


def test_a_complete_export_also_resolves_what_it_does_not_list(db: Database, tmp_path: Path) -> None:
    unresolved = UnresolvedShop(db, 2, does=Does.TIMES_OUT_BEFORE)
    by_param = unresolved.resolutions.match_candidates("params.n")
    assert sorted(item.value for item in by_param) == ["0", "1"]
    other = _written(tmp_path / "other.jsonl", [{"reference": "an unknown key", "id": "x"}])
    with pytest.raises(InvalidInputError, match="No row of the export matches an unresolved mutation"):
        provider_export.preview(by_param, provider_export.read_rows(other), "reference", is_complete=True)
    file = _written(tmp_path / "export.jsonl", [{"reference": "1", "id": "x"}])
    found = provider_export.preview(
        by_param, provider_export.read_rows(file), "reference", results=RowResults(is_none=True), is_complete=True
    )
    assert {item.mutation.message_ids: item.kind for item in found.resolutions} == {
        ("m1",): ResolutionKind.DID_NOT_HAPPEN,
        ("m2",): ResolutionKind.HAPPENED,
    }
    unresolved.resolutions.resolve_many(found.resolutions, ADA)
    unresolved.run.run_until_idle()
    assert_consumed(unresolved.run, unresolved.shop.orders)
    assert each_once(unresolved.shop, [0])


def test_an_ambiguous_match_is_left_to_an_operator(db: Database) -> None:
    unresolved = UnresolvedShop(db, 2)
    questions = unresolved.resolutions.unresolved_mutations()
    twice = [MatchCandidate(value="a", mutation=mutation) for mutation in questions]
    assert provider_export.preview(twice, [{"k": "a"}], "k").ambiguous == tuple(questions)
    for pair in ([{"k": "a"}, {"k": " a "}], [{"k": "a"}]):
        known = MatchCandidate(value="a", mutation=questions[0], is_shared=len(pair) == 1)
        doubled = provider_export.preview([known], pair, "k")
        assert doubled.ambiguous == (questions[0],)
        assert doubled.resolutions == ()
    _resolved_by_hand(unresolved)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("export.csv", "id\nch_1\n", "Row 1 has no column 'reference'; its columns are: id"),
        ("export.jsonl", "{\n", "Line 1 of export.jsonl is no JSON"),
        ("export.jsonl", "[1]\n", "Line 1 of export.jsonl is a list; expected an object"),
        ("export.xls", "", "neither .csv nor .jsonl"),
        ("export.csv", "reference,reference\n1,2\n", "has the column 'reference' twice"),
        ("export.csv", "reference,id\n1,2,3\n", "Row 1 of export.csv does not have 2 cells"),
        ("export.csv", "reference,id\n1\n", "Row 1 of export.csv does not have 2 cells"),
        ("export.csv", "reference,id\n" + "x" * 200_000 + ",1\n", "cannot be read as CSV"),
    ],
)
def test_an_export_that_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InvalidInputError, match=text):
        provider_export.preview([], provider_export.read_rows(file), "reference")


def test_an_export_in_another_encoding_is_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "export.csv"
    file.write_bytes("reference\nM\xfcller\n".encode("latin-1"))
    with pytest.raises(InvalidInputError, match="is not in UTF-8"):
        provider_export.preview([], provider_export.read_rows(file), "reference")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("export.csv", "reference\n".encode("utf-16"), "not in UTF-8"),
        ("export.csv", gzip.compress(b"reference\nch_1\n", mtime=0), "not in UTF-8"),
        ("export.csv", b",".join(b"c%d" % n for n in range(100_000)) + b"\n", "has 100000 columns"),
        ("export.csv", b"reference\n" + b"x" * (2**20 + 1), "Line 2 of export.csv is longer"),
        ("export.csv", b'reference\n"' + b"x\n" * 100_000, "field larger than field limit"),
        ("export.csv", b"reference,reference\na,b\n", "has the column 'reference' twice"),
        ("export.csv", "a\u202eb,\x1b[31m\n1,2\n".encode(), r"its columns are: \x1b[31m, a\u202eb"),
        ("export.jsonl", b'{"reference": "' + b"x" * 2**20 + b'"}', "Line 1 of export.jsonl is longer"),
        ("export.jsonl", b"[" * 100_000, "nested too deeply"),
        ("export.jsonl", b'{"reference": ' + b"9" * 5000 + b"}", "is no JSON"),
    ],
)
def test_a_hostile_export_is_refused_with_the_reason(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InvalidInputError) as caught:
        provider_export.preview([], provider_export.read_rows(file), "reference")
    assert text in str(caught.value)


def test_an_export_that_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "folder.csv").mkdir()
    for name in ("pipe.csv", "zero.csv", "folder.csv"):
        with pytest.raises(InvalidInputError, match="no regular file"):
            list(provider_export.read_rows(tmp_path / name))
    with pytest.raises(InvalidInputError, match="cannot be opened"):
        list(provider_export.read_rows(tmp_path / "missing.csv"))


def test_an_export_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "export.csv"
    file.write_text("reference\n" + "ch_1\n" * 10_000)
    rows = provider_export.read_rows(file)
    next(rows)
    with file.open("a") as more:
        more.write("ch_2\n")
    with pytest.raises(InvalidInputError, match="was changed while it was read"):
        list(rows)


def test_text_of_an_export_is_data_and_never_a_formula_or_a_file(db: Database, tmp_path: Path) -> None:
    unresolved = UnresolvedShop(db, 1)
    (found,) = unresolved.resolutions.unresolved_mutations()
    file = tmp_path / "export.csv"
    file.write_text(f"\ufeffreference,note\n{found.idempotency_key},=cmd|' /C calc'!A0\n\0,@/etc/passwd\n")
    seen = provider_export.preview(
        unresolved.resolutions.match_candidates("idempotency_key"),
        provider_export.read_rows(file),
        "reference",
        results=RowResults(is_none=True),
    )
    assert seen.unmatched_rows == 1
    assert unresolved.resolutions.resolve_many(seen.resolutions, ADA).refused == {}
    with db.transaction() as tx:
        (kept,) = tx.all(Statement[Any]("SELECT evidence FROM pipeline.audit"))
    assert kept.evidence["row"]["note"] == "=cmd|' /C calc'!A0"
    _resolved_by_hand(unresolved)


def test_a_complete_export_without_rows_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="The export has no rows"):
        provider_export.preview([], [], "reference", is_complete=True)


def test_an_applied_mutation_with_the_same_parameter_makes_a_match_ambiguous(db: Database) -> None:
    unresolved = UnresolvedShop(db, 1)
    unresolved.run.publish(unresolved.shop.orders, {"n": 0})
    unresolved.run.run()
    (matched,) = unresolved.resolutions.match_candidates("params.n")
    assert matched.is_shared
    _resolved_by_hand(unresolved)


def test_mutations_are_matched_by_the_key_or_a_parameter_only(db: Database) -> None:
    with pytest.raises(InvalidInputError, match=r"expected 'idempotency_key' or 'params\.<name>'"):
        Resolutions(db).match_candidates("result.id")


def _written(file: Path, rows: list[dict[str, str]]) -> Path:
    if file.suffix == ".csv":
        with file.open("w", newline="") as written:
            table = csv.DictWriter(written, rows[0])
            table.writeheader()
            table.writerows(rows)
    else:
        file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def _resolved_by_hand(unresolved: UnresolvedShop) -> None:
    unresolved.resolutions.resolve_many(
        resolutions_for(unresolved.resolutions.unresolved_mutations(), ResolutionKind.HAPPENED, NO_RESULT), ADA
    )
    unresolved.run.run_until_idle()
    assert_consumed(unresolved.run, unresolved.shop.orders)
