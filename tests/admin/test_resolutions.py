"""The desk: questions as people see them, answers with who and why, one by one or many at once."""

import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline import ReconcilePolicy
from pipeline.admin import provider_export
from pipeline.admin.mutations import detail
from pipeline.admin.resolutions import MatchCandidate, MutationFilter, ResolutionKind, Resolutions, resolutions_for
from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, QuietPeriodError, StaleWriteError
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.store.statements import Statement
from pipeline.testing import Does, assert_consumed, assert_deliveries, scripted
from tests.support.scripted_consumers import Shop, each_once

ADA = Actor(name="ada", reason="the provider's dashboard shows it")
_AUDIT = Statement[Any]("SELECT actor, act, reason, mutation_id FROM pipeline.audit ORDER BY id")


class Asked:
    """A shop with so many questions, and the desk they lie on."""

    def __init__(self, db: Database, count: int = 1, *, does: Does = Does.TIMES_OUT_AFTER, **bounds: Any) -> None:
        self.shop = Shop(concurrency=8, on_uncertain="contain")
        given = {"can_reconcile": False, "timeout": timedelta(seconds=30), "redact": frozenset({"n"}), **bounds}
        self.shop.mail = scripted("mail", **given)
        self.shop.mail.will(*[does] * count)
        self.run = self.shop.started(db, count)
        self.run.run()
        self.rung: list[str] = []
        self.desk = Resolutions(db, self.run.registry, self.rung.append)
        self.run.advance(timedelta(minutes=1))


def test_a_question_shows_what_a_person_needs_and_nothing_that_is_redacted(db: Database) -> None:
    asked = Asked(db)
    (question,) = asked.desk.unresolved_mutations()
    (row,) = asked.run.ledger()
    assert (question.id, question.workflow, question.handler) == (row.id, "shop", "Send")
    assert question.message_ids == ("m1",)
    assert question.params == {"n": "•••"}
    assert "timed out after applying" in (question.error or "")
    assert (question.quiet_until, question.can_try_again) == (None, False)
    assert json.dumps(asdict(question), default=str)
    assert asked.desk.mutation(row.id).id == row.id


def test_without_the_code_of_an_operation_its_parameters_are_not_shown(db: Database) -> None:
    Asked(db)
    (question,) = Resolutions(db).unresolved_mutations()
    assert question.title == "mail.send"
    assert question.params == {"n": "(its operation is not known here)"}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (ResolutionKind.HAPPENED, "consumed"),
        (ResolutionKind.DID_NOT_HAPPEN, "consumed"),
        (ResolutionKind.SKIP, "skipped"),
    ],
)
def test_an_answer_settles_it_is_kept_with_who_and_why_and_the_workflow_is_rung_for(
    db: Database, answer: ResolutionKind, status: str
) -> None:
    asked = Asked(db, does=Does.TIMES_OUT_AFTER if answer is ResolutionKind.HAPPENED else Does.TIMES_OUT_BEFORE)
    (question,) = asked.desk.unresolved_mutations()
    asked.desk.resolve(question.id, answer, ADA)
    assert asked.rung == ["shop"]
    with db.transaction() as tx:
        (kept,) = tx.all(_AUDIT)
    assert (kept.actor, kept.act, kept.reason) == ("ada", f"mutation.{answer}", ADA.reason)
    asked.run.run_until_idle()
    assert_deliveries(asked.run, asked.shop.orders, status)
    assert asked.desk.unresolved_mutations() == []


def test_the_run_that_follows_did_not_happen_sends_under_a_new_key(db: Database) -> None:
    asked = Asked(db, does=Does.TIMES_OUT_BEFORE)
    (question,) = asked.desk.unresolved_mutations()
    asked.desk.resolve(question.id, ResolutionKind.DID_NOT_HAPPEN, ADA)
    asked.run.run_until_idle()
    (first, second) = (call.key for call in asked.shop.mail.calls)
    assert first == question.idempotency_key
    assert second != first, "so the other side cannot tell that it is the same"


def test_what_happened_reaches_next_with_the_result_that_was_given(db: Database) -> None:
    seen: list[Any] = []
    asked = Asked(db)
    asked.run.registry.workflows["shop"].consumers["Send"].instance.__class__.next = (  # what the result is good for
        lambda self, ctx, prepared, result: seen.append(result.value)
    )
    asked.desk.resolve(asked.desk.unresolved_mutations()[0].id, ResolutionKind.HAPPENED, ADA, result={"id": "ch_1"})
    asked.run.run_until_idle()
    assert seen == [{"id": "ch_1"}]


def test_asking_again_gives_the_background_a_fresh_budget(db: Database) -> None:
    asked = Asked(db, can_reconcile=True, policy=ReconcilePolicy(max_attempts=1))
    assert asked.desk.unresolved_mutations() == [], "the first look found it"
    asked.shop.mail.will(Does.TIMES_OUT_AFTER)
    asked.shop.mail.cannot_tell(2)
    asked.run.publish(asked.shop.orders, {"n": 1})
    asked.run.run()
    asked.run.sweeps.reconcile()
    (question,) = asked.desk.unresolved_mutations()
    assert question.can_try_again
    asked.desk.resolve(question.id, ResolutionKind.TRY_AGAIN, ADA)
    asked.run.run_until_idle()
    assert_consumed(asked.run, asked.shop.orders)
    assert each_once(asked.shop, [0, 1])


def test_what_was_sent_before_its_operation_could_reconcile_can_be_looked_for_once_it_can(db: Database) -> None:
    asked = Asked(db)
    (question,) = asked.desk.unresolved_mutations()
    assert not question.can_try_again
    with pytest.raises(IllegalTransitionError, match="of an operation that can reconcile"):
        asked.desk.resolve(question.id, ResolutionKind.TRY_AGAIN, ADA)
    send = type(asked.shop.mail).operations()["send"]
    send.reconcile(lambda connector, call, **_: connector._reconcile("send", call))
    (question,) = asked.desk.unresolved_mutations()
    assert question.can_try_again
    assert detail(asked.desk, str(question.id)).advice.commands[-1].startswith("pipeline resolve try_again")
    with pytest.raises(IllegalTransitionError, match="as far as is known here"):
        Resolutions(db).resolve(question.id, ResolutionKind.TRY_AGAIN, ADA)
    assert asked.desk.resolve_many(resolutions_for([question], ResolutionKind.TRY_AGAIN), ADA).updated == [question.id]
    asked.run.run_until_idle()
    assert_consumed(asked.run, asked.shop.orders)
    assert each_once(asked.shop, [0])


def test_an_answer_without_a_reason_is_refused(db: Database) -> None:
    asked = Asked(db)
    with pytest.raises(InvalidInputError, match="ada gave no reason"):
        asked.desk.resolve(asked.desk.unresolved_mutations()[0].id, ResolutionKind.SKIP, Actor(name="ada"))
    assert len(asked.desk.unresolved_mutations()) == 1


def test_a_result_belongs_to_what_happened_and_to_nothing_else(db: Database) -> None:
    asked = Asked(db)
    with pytest.raises(InvalidInputError, match="expected it with happened only"):
        asked.desk.resolve(asked.desk.unresolved_mutations()[0].id, ResolutionKind.SKIP, ADA, result={})


def test_while_the_request_may_travel_nobody_can_say_that_it_did_not_happen(db: Database) -> None:
    asked = Asked(db, settle=timedelta(hours=1))
    (question,) = asked.desk.unresolved_mutations()
    assert question.quiet_until is not None
    with pytest.raises(QuietPeriodError):
        asked.desk.resolve(question.id, ResolutionKind.DID_NOT_HAPPEN, ADA)
    asked.desk.resolve(question.id, ResolutionKind.HAPPENED, ADA)
    asked.run.run_until_idle()


def test_of_two_people_the_second_is_told_that_it_moved_on(db: Database) -> None:
    asked = Asked(db)
    (question,) = asked.desk.unresolved_mutations()
    asked.desk.resolve(question.id, ResolutionKind.HAPPENED, ADA)
    with pytest.raises(IllegalTransitionError, match="applied"):
        asked.desk.resolve(question.id, ResolutionKind.DID_NOT_HAPPEN, ADA)
    asked.run.run_until_idle()
    assert each_once(asked.shop, [0])


def test_an_approval_is_for_the_request_that_was_shown(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db, 1)
    run.run()
    desk = Resolutions(db, run.registry)
    (question,) = desk.pending_approvals()
    assert question.status == MutationStatus.PENDING
    changed = type(question)(**{**asdict(question), "request_hash": "another"})
    with pytest.raises(StaleWriteError):
        desk.approve(changed, ADA)
    desk.approve(question, ADA)
    run.run_until_idle()
    assert_consumed(run, shop.orders)


def test_a_rejected_request_is_never_sent(db: Database) -> None:
    shop = Shop(requires_approval=True)
    run = shop.started(db, 1)
    run.run()
    desk = Resolutions(db, run.registry)
    desk.reject(desk.pending_approvals("shop")[0].id, ADA)
    run.run_until_idle()
    assert_deliveries(run, shop.orders, "skipped")
    assert shop.mail.calls == []


def test_questions_are_found_by_what_they_are_about(db: Database) -> None:
    asked = Asked(db, 3)
    assert (
        len(asked.desk.unresolved_mutations(MutationFilter(workflow="shop", connector="mail", operation="send"))) == 3
    )
    assert asked.desk.unresolved_mutations(MutationFilter(workflow="other")) == []
    assert asked.desk.unresolved_mutations(MutationFilter(operation="cancel")) == []
    assert asked.desk.unresolved_mutations(MutationFilter(older_than=timedelta(hours=1))) == []
    assert len(asked.desk.unresolved_mutations(MutationFilter(older_than=timedelta(seconds=1)), limit=2)) == 2
    with pytest.raises(InvalidInputError, match="There is no mutation"):
        asked.desk.mutation(asked.run.runs()[0].id)


def test_many_answers_are_taken_one_by_one_and_a_refused_one_keeps_nobody_back(db: Database) -> None:
    asked = Asked(db, 3)
    questions = asked.desk.unresolved_mutations()
    asked.desk.resolve(questions[1].id, ResolutionKind.HAPPENED, ADA)
    asked.rung.clear()
    settled = asked.desk.resolve_many(resolutions_for(questions, ResolutionKind.HAPPENED), ADA)
    assert settled.updated == [questions[0].id, questions[2].id]
    assert list(settled.refused) == [questions[1].id]
    assert asked.rung == ["shop"]
    asked.run.run_until_idle()
    assert_consumed(asked.run, asked.shop.orders)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_providers_export_settles_what_it_lists_after_a_preview(db: Database, tmp_path: Path, suffix: str) -> None:
    asked = Asked(db, 4)
    keys = [question.idempotency_key for question in asked.desk.unresolved_mutations()]
    rows = [{"reference": keys[0], "id": "ch_1"}, {"reference": keys[2], "id": "ch_2"}, {"reference": "x", "id": "y"}]
    file = _written(tmp_path / f"export{suffix}", rows)
    found = provider_export.preview(
        asked.desk.match_candidates("idempotency_key"), provider_export.read_rows(file), "reference"
    )
    assert [item.mutation.idempotency_key for item in found.resolutions] == [keys[0], keys[2]]
    assert (len(found.not_in_export), len(found.ambiguous), found.unmatched_rows) == (2, 0, 1)
    assert len(asked.desk.unresolved_mutations()) == 4, "a preview changes nothing"
    asked.desk.resolve_many(found.resolutions, ADA)
    applied = [row for row in asked.run.ledger() if row.status == "applied"]
    assert [row.result for row in applied] == [{"export": rows[0]}, {"export": rows[1]}]
    _settled_by_hand(asked)


def test_a_complete_export_also_says_what_did_not_happen(db: Database, tmp_path: Path) -> None:
    asked = Asked(db, 2, does=Does.TIMES_OUT_BEFORE)
    by_param = asked.desk.match_candidates("params.n")
    assert sorted(item.value for item in by_param) == ["0", "1"]
    stranger = _written(tmp_path / "other.jsonl", [{"reference": "somebody else's", "id": "x"}])
    with pytest.raises(InvalidInputError, match="No row of the export matches an unresolved mutation"):
        provider_export.preview(by_param, provider_export.read_rows(stranger), "reference", is_complete=True)
    file = _written(tmp_path / "export.jsonl", [{"reference": "1", "id": "x"}])
    found = provider_export.preview(by_param, provider_export.read_rows(file), "reference", is_complete=True)
    assert {item.mutation.message_ids: item.kind for item in found.resolutions} == {
        ("m1",): ResolutionKind.DID_NOT_HAPPEN,
        ("m2",): ResolutionKind.HAPPENED,
    }
    asked.desk.resolve_many(found.resolutions, ADA)
    asked.run.run_until_idle()
    assert_consumed(asked.run, asked.shop.orders)
    assert each_once(asked.shop, [0])


def test_what_is_not_one_to_one_is_left_to_a_person(db: Database) -> None:
    asked = Asked(db, 2)
    questions = asked.desk.unresolved_mutations()
    twice = [MatchCandidate(value="a", mutation=question) for question in questions]
    assert provider_export.preview(twice, [{"k": "a"}], "k").ambiguous == tuple(questions)
    for pair in ([{"k": "a"}, {"k": " a "}], [{"k": "a"}]):
        known = MatchCandidate(value="a", mutation=questions[0], is_shared=len(pair) == 1)
        doubled = provider_export.preview([known], pair, "k")
        assert doubled.ambiguous == (questions[0],)
        assert doubled.resolutions == ()
    _settled_by_hand(asked)


@pytest.mark.parametrize(
    ("name", "content", "words"),
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
def test_an_export_that_cannot_be_read_is_refused_in_words(tmp_path: Path, name: str, content: str, words: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InvalidInputError, match=words):
        provider_export.preview([], provider_export.read_rows(file), "reference")


def test_an_export_in_another_encoding_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "export.csv"
    file.write_bytes("reference\nM\xfcller\n".encode("latin-1"))
    with pytest.raises(InvalidInputError, match="is not in UTF-8"):
        provider_export.preview([], provider_export.read_rows(file), "reference")


def test_an_export_without_rows_says_nothing_about_what_did_not_happen() -> None:
    with pytest.raises(InvalidInputError, match="The export has no rows"):
        provider_export.preview([], [], "reference", is_complete=True)


def test_what_happened_already_to_another_with_the_same_parameter_is_not_taken_for_this_one(db: Database) -> None:
    asked = Asked(db, 1)
    asked.run.publish(asked.shop.orders, {"n": 0})
    asked.run.run()
    (matched,) = asked.desk.match_candidates("params.n")
    assert matched.is_shared
    _settled_by_hand(asked)


def test_questions_can_be_matched_by_the_key_or_by_a_parameter_only(db: Database) -> None:
    with pytest.raises(InvalidInputError, match=r"expected 'idempotency_key' or 'params\.<name>'"):
        Resolutions(db).match_candidates("result.id")


def _written(file: Path, rows: list[dict[str, str]]) -> Path:
    if file.suffix == ".csv":
        file.write_text("\n".join(["reference,id", *(f"{row['reference']},{row['id']}" for row in rows)]))
    else:
        file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def _settled_by_hand(asked: Asked) -> None:
    asked.desk.resolve_many(resolutions_for(asked.desk.unresolved_mutations(), ResolutionKind.HAPPENED), ADA)
    asked.run.run_until_idle()
    assert_consumed(asked.run, asked.shop.orders)
