"""Bulk previews: frozen, committed once, taken over after a pause, thrown away; and kept answers and saved views."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pipeline.domain.acts import MAX_ITEMS, BulkAct, NewPreview
from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, NotFoundError, StaleWriteError
from pipeline.domain.states import MutationId
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import access as reads_access
from pipeline.store.schema import BulkPreviewRow
from pipeline.transitions import access, bulk, resolution, workflows
from tests.cli import scenarios
from tests.factories import SOMEBODY, a_workflow
from tests.support.table_reads import one, rows

BOB = Actor(name="bob", reason="the provider's outage is over")


def new_preview(count: int = 3) -> NewPreview:
    items = tuple(
        {"subject": str(number), "state": "indeterminate.1", "workflow": "billing"} for number in range(count)
    )
    return NewPreview(
        act=BulkAct.SKIP,
        created_by="ada",
        workflows=("billing",),
        request={"filter": {}},
        items=items,
        refused={"0": "too late"},
        left_out={"ambiguous": 2},
    )


def frozen(db: Database, count: int = 3) -> BulkPreviewRow:
    with db.transaction() as tx:
        return bulk.freeze(tx, new_preview(count))


def progressed(tx: Transaction, row: BulkPreviewRow, before: int, done: int) -> BulkPreviewRow:
    return bulk.record_progress(tx, row.id, done_before=before, done=done, updated=["1"], refused={"2": "stale"})


def test_a_preview_is_committed_once(db: Database) -> None:
    preview = frozen(db)
    with db.transaction() as tx:
        taken = bulk.take(tx, preview.id, BOB, item_count=3)
    assert (taken.committed_by, taken.reason, taken.refused) == ("bob", BOB.reason, {})
    with pytest.raises(IllegalTransitionError, match="being committed by bob"), db.transaction() as tx:
        bulk.take(tx, preview.id, SOMEBODY, item_count=3)
    with db.transaction() as tx:
        assert progressed(tx, preview, 0, 2).finished_at is None
        ended = progressed(tx, preview, 2, 1)
    assert (ended.done_count, ended.updated, ended.refused) == (3, ["1", "1"], {"2": "stale"})
    assert ended.finished_at is not None
    with pytest.raises(IllegalTransitionError, match="committed by bob and finished"), db.transaction() as tx:
        bulk.take(tx, preview.id, BOB, item_count=3)
    with pytest.raises(IllegalTransitionError, match="committed by bob and finished"), db.transaction() as tx:
        bulk.discard(tx, preview.id)


def test_a_commit_names_the_number_of_items_that_was_shown(db: Database) -> None:
    preview = frozen(db)
    with pytest.raises(StaleWriteError, match="a preview of 3 items"), db.transaction() as tx:
        bulk.take(tx, preview.id, BOB, item_count=2)


def test_an_expired_preview_is_not_committed(db: Database) -> None:
    preview = frozen(db)
    db.advance_clock(timedelta(hours=2))
    with pytest.raises(IllegalTransitionError, match="it is expired"), db.transaction() as tx:
        bulk.take(tx, preview.id, BOB, item_count=3)


def test_a_discarded_preview_is_not_committed(db: Database) -> None:
    preview = frozen(db)
    with db.transaction() as tx:
        bulk.discard(tx, preview.id)
    with pytest.raises(IllegalTransitionError, match="it is discarded"), db.transaction() as tx:
        bulk.take(tx, preview.id, BOB, item_count=3)


def test_a_commit_whose_process_died_is_taken_over_where_it_stopped(db: Database) -> None:
    preview = frozen(db)
    with db.transaction() as tx:
        bulk.take(tx, preview.id, BOB, item_count=3)
        progressed(tx, preview, 0, 2)
    db.advance_clock(timedelta(minutes=2))
    with db.transaction() as tx:
        taken = bulk.take(tx, preview.id, SOMEBODY, item_count=3)
        assert (taken.committed_by, taken.done_count, taken.refused) == ("ada", 2, {"2": "stale"})
        progressed(tx, preview, 2, 1)
    with pytest.raises(StaleWriteError, match="record progress"), db.transaction() as tx:
        progressed(tx, preview, 2, 1)


def test_a_preview_has_a_limit_and_an_unknown_one_is_not_found(db: Database) -> None:
    with pytest.raises(InvalidInputError, match=f"{MAX_ITEMS} at most"), db.transaction() as tx:
        bulk.freeze(tx, new_preview(MAX_ITEMS + 1))
    with pytest.raises(NotFoundError, match="bulk preview"), db.transaction() as tx:
        bulk.discard(tx, uuid4())


def test_an_open_preview_is_open_when_its_discard_is_asked_for_twice(db: Database) -> None:
    preview = frozen(db)
    with db.transaction() as tx:
        assert "it is open" in str(bulk._refused(tx, preview, "discard"))


def test_previews_of_a_month_ago_are_deleted(db: Database) -> None:
    old = frozen(db)
    db.advance_clock(timedelta(days=31))
    frozen(db)
    with db.transaction() as tx:
        assert reads_access.bulk_preview(tx, old.id) is None


def test_a_request_is_executed_once_per_key_for_a_day(db: Database) -> None:
    def begun(hash_: str = "h") -> Any:
        with db.transaction() as tx:
            return access.begin_request(tx, "ada", "k1", hash_)

    assert begun() is None
    assert begun().status is None, "the first one is still running"
    with db.transaction() as tx:
        access.save_answer(tx, "ada", "k1", status=201, answer={"body": "x"})
    assert (begun().status, begun("other").request_hash) == (201, "h")
    db.advance_clock(timedelta(hours=25))
    assert begun() is None
    with db.transaction() as tx:
        access.forget_request(tx, "ada", "k1")
    assert begun("other") is None


def test_a_key_whose_process_died_is_free_for_the_same_request_after_a_minute(db: Database) -> None:
    with db.transaction() as tx:
        assert access.begin_request(tx, "ada", "k1", "h") is None
    db.advance_clock(timedelta(minutes=2))
    with db.transaction() as tx:
        assert access.begin_request(tx, "ada", "k1", "another") is not None
        assert access.begin_request(tx, "ada", "k1", "h") is None


def test_a_saved_view_is_replaced_by_its_name_and_deleted_by_its_owner(db: Database) -> None:
    with db.transaction() as tx:
        access.save_view(tx, "ada", "mine", page="inbox", query="kind=approval")
        access.save_view(tx, "ada", "mine", page="inbox", query="kind=blocked")
        assert [view.query for view in reads_access.saved_views(tx, "ada")] == ["kind=blocked"]
        with pytest.raises(NotFoundError):
            access.delete_view(tx, "bob", "mine")
        access.delete_view(tx, "ada", "mine")
        assert reads_access.saved_views(tx, "ada") == []


def test_a_note_is_kept_in_the_audit_and_changes_no_state(db: Database) -> None:
    a_workflow(db)
    row = scenarios.an_indeterminate_mutation(db)
    with db.transaction() as tx:
        resolution.note(tx, MutationId(row.id), Actor(name="bob", reason="asked the provider"))
        with pytest.raises(InvalidInputError, match="empty note"):
            resolution.note(tx, MutationId(row.id), Actor(name="bob"))
    (kept,) = rows(db, "SELECT * FROM pipeline.audit WHERE act = 'mutation.note'")
    assert (kept.actor, kept.reason, kept.mutation_id) == ("bob", "asked the provider", row.id)


def test_a_producer_runs_at_once_for_an_operator(db: Database) -> None:
    a_workflow(db)
    with db.transaction() as tx:
        workflows.run_producer(tx, "billing", "poll", SOMEBODY)
        with pytest.raises(NotFoundError, match="producer of workflow 'billing' named 'send'"):
            workflows.run_producer(tx, "billing", "send", SOMEBODY)
    assert one(db, "SELECT next_run_at <= pipeline.clock() AS due FROM pipeline.handlers WHERE name = 'poll'").due
