"""A parameter matches a mutation only if no other mutation of the ledger shares it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pipeline.admin import provider_export
from pipeline.admin import resolutions as module
from pipeline.admin.resolutions import KEY, MutationFilter, Resolutions
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Evidence, MutationId, Phase
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
    """Create a run whose mail is in flight."""
    some_events(db, f"order {uuid4()}", workflow=workflow)
    return a_run(db, Phase.MUTATING, workflow=workflow, params={"to": to}, **request)


def an_indeterminate_mutation(db: Database, to: object = "ada", **request: Any) -> Any:
    """Create an indeterminate mail."""
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
    """Return the mutations that an export with one row for each of them resolves."""
    asked = Resolutions(db).match_candidates("params.to", only, **bounds)
    rows = [{"to": value} for value in sorted({item.value for item in asked})]
    return [item.mutation.connector for item in provider_export.preview(asked, rows, "to").resolutions]


LATE = pytest.param(surfaced, marks=pytest.mark.broken_on_purpose)


@pytest.mark.parametrize("became", [applied, in_flight, doubted, skipped, LATE])
@pytest.mark.parametrize("workflow", ["billing", "letters"])
def test_a_value_is_shared_with_mutations_of_any_workflow_that_may_have_happened(
    db: Database, became: Made, workflow: str
) -> None:
    an_indeterminate_mutation(db)
    became(db, sent(db, workflow=workflow))
    for only in (None, MutationFilter(workflow="billing"), MutationFilter(connector="mail", operation="send")):
        assert answered(db, only) == []


def test_a_value_is_shared_with_mutations_outside_the_filter(db: Database) -> None:
    an_indeterminate_mutation(db)
    an_indeterminate_mutation(db, workflow="letters", operation="remind")
    assert answered(db, MutationFilter(workflow="billing")) == []
    assert answered(db, MutationFilter(connector="mail", operation="send")) == []
    assert answered(db, MutationFilter(workflow="billing"), limit=1) == []


def test_a_value_is_shared_with_a_mutation_beyond_the_limit(db: Database) -> None:
    for n in range(2):
        an_indeterminate_mutation(db, operation=f"send{n}")
    (first, _) = Resolutions(db).match_candidates("params.to")
    assert first.is_shared


@pytest.mark.parametrize("became", [refused, absent])
def test_a_mutation_that_did_not_happen_shares_no_value(db: Database, became: Made) -> None:
    an_indeterminate_mutation(db)
    became(db, sent(db))
    assert answered(db) == ["mail"]


def test_other_connectors_share_a_value_unless_one_is_selected(db: Database) -> None:
    an_indeterminate_mutation(db)
    applied(db, sent(db, connector="pay"))
    assert answered(db) == []
    assert answered(db, MutationFilter(connector="mail")) == ["mail"]


def test_values_are_compared_as_they_are_matched(db: Database) -> None:
    an_indeterminate_mutation(db, 1.5)
    applied(db, sent(db, "1.5\t"))
    an_indeterminate_mutation(db, "bob")
    applied(db, sent(db, None))
    assert answered(db) == ["mail"]


def test_the_ledger_is_searched_page_by_page(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE_SIZE", 2)
    applied(db, sent(db))
    for n in range(3):
        applied(db, sent(db, f"bob {n}"))
    an_indeterminate_mutation(db)
    an_indeterminate_mutation(db, "cy")
    assert len(answered(db)) == 1


def test_no_mutation_is_matched_while_older_rows_of_the_ledger_were_not_searched(db: Database) -> None:
    applied(db, sent(db, "bob"))
    an_indeterminate_mutation(db)
    (near,) = Resolutions(db).match_candidates("params.to", recent=1)
    assert (near.is_shared, near.is_partial) == (True, True)
    assert answered(db, recent=1) == []
    (far,) = Resolutions(db).match_candidates("params.to", recent=2)
    assert (far.is_shared, far.is_partial) == (False, False)
    (keyed,) = Resolutions(db).match_candidates(KEY, recent=1)
    assert not keyed.is_shared
