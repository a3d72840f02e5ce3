"""A parameter answers for a question only where nothing else in the ledger is known by the same."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pipeline.admin import provider_export
from pipeline.admin import resolutions as module
from pipeline.admin.resolutions import KEY, MutationFilter, Resolutions
from pipeline.domain.failures import FailureKind
from pipeline.domain.ids import MutationId
from pipeline.domain.states import Evidence, Phase
from pipeline.domain.values import FailedMutation
from pipeline.domain.workflows import OnUncertain
from pipeline.store.database import Database
from pipeline.transitions import late_effects, mutations, resolution
from tests.factories import SOMEBODY, a_run, a_workflow, applied, refused, some_events, stopped

Made = Callable[[Database, Any], object]


@pytest.fixture(autouse=True)
def _workflows(db: Database) -> None:
    for name in ("billing", "letters"):
        a_workflow(db, name, concurrency=20, on_uncertain=OnUncertain.CONTAIN)


def sent(db: Database, to: object = "ada", *, workflow: str = "billing", **request: Any) -> Any:
    """A run whose mail to somebody is on its way."""
    some_events(db, f"order {uuid4()}", workflow=workflow)
    return a_run(db, Phase.MUTATING, workflow=workflow, params={"to": to}, **request)


def a_question(db: Database, to: object = "ada", **request: Any) -> Any:
    """A mail to somebody that nobody can know about."""
    return stopped(db, sent(db, to, reconcilable=False, **request), FailureKind.TRANSIENT)


def doubted(db: Database, run: Any) -> None:
    stopped(db, run, FailureKind.TRANSIENT)


def skipped(db: Database, run: Any) -> None:
    doubted(db, run)
    with db.transaction() as tx:
        resolution.skip(tx, MutationId(run.mutation_id), SOMEBODY)


def absent(db: Database, run: Any) -> None:
    doubted(db, run)
    with Database(db.engine, clock_offset=timedelta(hours=1)).transaction() as tx:
        item = FailedMutation(mutation_id=MutationId(run.mutation_id), error="not found", evidence=Evidence.ABSENCE)
        mutations.fail(tx, [item]).only()


def surfaced(db: Database, run: Any) -> None:
    absent(db, run)
    with Database(db.engine, clock_offset=timedelta(hours=2)).transaction() as tx:
        assert late_effects.record_late_effect(tx, MutationId(run.mutation_id), {"id": "late"}, SOMEBODY)


def in_flight(db: Database, run: Any) -> None:
    del db, run


def answered(db: Database, only: MutationFilter | None = None, **bounds: int) -> list[str]:
    """Who is answered by an export that has one row for each of them."""
    asked = Resolutions(db).match_candidates("params.to", only, **bounds)
    rows = [{"to": value} for value in sorted({item.value for item in asked})]
    return [item.mutation.connector for item in provider_export.preview(asked, rows, "to").resolutions]


LATE = pytest.param(surfaced, marks=pytest.mark.broken_on_purpose)


@pytest.mark.parametrize("became", [applied, in_flight, doubted, skipped, LATE])
@pytest.mark.parametrize("workflow", ["billing", "letters"])
def test_what_may_have_happened_to_another_of_any_workflow_is_not_taken_for_this_one(
    db: Database, became: Made, workflow: str
) -> None:
    a_question(db)
    became(db, sent(db, workflow=workflow))
    for only in (None, MutationFilter(workflow="billing"), MutationFilter(connector="mail", operation="send")):
        assert answered(db, only) == []


def test_another_question_outside_of_what_was_asked_for_shares_it_as_well(db: Database) -> None:
    a_question(db)
    a_question(db, workflow="letters", operation="remind")
    assert answered(db, MutationFilter(workflow="billing")) == []
    assert answered(db, MutationFilter(connector="mail", operation="send")) == []
    assert answered(db, MutationFilter(workflow="billing"), limit=1) == []


def test_of_two_questions_the_first_is_known_as_shared_when_the_second_is_cut_off(db: Database) -> None:
    for n in range(2):
        a_question(db, operation=f"send{n}")
    (first, _) = Resolutions(db).match_candidates("params.to")
    assert first.is_shared


@pytest.mark.parametrize("became", [refused, absent])
def test_what_is_known_not_to_have_happened_shares_nothing(db: Database, became: Made) -> None:
    a_question(db)
    became(db, sent(db))
    assert answered(db) == ["mail"]


def test_other_connectors_share_a_value_unless_one_was_named(db: Database) -> None:
    a_question(db)
    applied(db, sent(db, connector="pay"))
    assert answered(db) == []
    assert answered(db, MutationFilter(connector="mail")) == ["mail"]


def test_values_are_compared_as_they_are_matched(db: Database) -> None:
    a_question(db, 1.5)
    applied(db, sent(db, "1.5\t"))
    a_question(db, "bob")
    applied(db, sent(db, None))
    assert answered(db) == ["mail"]


def test_the_ledger_is_looked_through_page_by_page(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE_SIZE", 2)
    applied(db, sent(db))
    for n in range(3):
        applied(db, sent(db, f"bob {n}"))
    a_question(db)
    a_question(db, "cy")
    assert len(answered(db)) == 1


def test_where_the_ledger_reaches_further_back_than_was_looked_nothing_is_answered(db: Database) -> None:
    applied(db, sent(db, "bob"))
    a_question(db)
    (near,) = Resolutions(db).match_candidates("params.to", recent=1)
    assert (near.is_shared, near.is_partial) == (True, True)
    assert answered(db, recent=1) == []
    (far,) = Resolutions(db).match_candidates("params.to", recent=2)
    assert (far.is_shared, far.is_partial) == (False, False)
    (keyed,) = Resolutions(db).match_candidates(KEY, recent=1)
    assert not keyed.is_shared
