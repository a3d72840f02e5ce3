"""Acts on many items: a frozen preview, its commit, and an import from a provider's export."""

from datetime import timedelta
from typing import Any

import pytest

from pipeline.admin.bulk import BulkActs, BulkPreview, ImportOptions, MutationSelection
from pipeline.admin.given_results import GivenResult
from pipeline.admin.mutations import PRESENCE_SECONDS, Presence, add_note, notes
from pipeline.admin.provider_export import RowResults
from pipeline.admin.quarantine import Quarantine, QuarantineFilter
from pipeline.admin.resolutions import MutationFilter, ResolutionKind, Resolutions
from pipeline.domain.acts import BulkAct
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.cli import scenarios
from tests.factories import a_workflow
from tests.support.table_reads import rows

ADA = Actor(name="ada", reason="the provider's list shows it")
EVERYTHING = MutationSelection(only=MutationFilter())


class Questions:
    """Mutations that wait for an operator, and the acts on many of them."""

    def __init__(self, db: Database, count: int = 3, **seen: Any) -> None:
        a_workflow(db, concurrency=8, on_uncertain="contain")
        self.db = db
        self.rows = [scenarios.an_indeterminate_mutation(db, f"order-{n}") for n in range(count)]
        db.advance_clock(timedelta(minutes=5))
        self.resolutions = Resolutions(db)
        self.acts = BulkActs(self.resolutions, Quarantine(db), **seen)

    def statuses(self) -> list[str]:
        return sorted(row.status for row in rows(self.db, "SELECT status FROM pipeline.mutations"))

    def preview(self, act: BulkAct = BulkAct.SKIP, **how: Any) -> BulkPreview:
        return self.acts.preview_mutations(act, how.pop("which", EVERYTHING), "ada", **how)


def test_a_preview_is_frozen_and_its_commit_resolves_exactly_its_items(db: Database) -> None:
    questions = Questions(db)
    preview = questions.preview()
    assert (preview.count, preview.status, preview.refused) == (3, "open", {})
    assert questions.statuses() == ["indeterminate"] * 3, "a preview changes nothing"
    later = scenarios.an_indeterminate_mutation(db, "order-9")
    done = questions.acts.commit(preview.id, ADA, count=3)
    assert (done.status, len(done.updated), done.refused) == ("finished", 3, {})
    assert questions.statuses() == ["failed", "failed", "failed", "indeterminate"]
    assert questions.acts.preview(preview.id).updated == done.updated, "the result can be read afterwards"
    assert str(later.id) not in done.updated


def test_a_stale_item_is_refused_and_the_others_are_resolved(db: Database) -> None:
    questions = Questions(db)
    preview = questions.preview(BulkAct.DID_NOT_HAPPEN)
    first = questions.rows[0].id
    questions.resolutions.resolve(first, ResolutionKind.SKIP, ADA)
    done = questions.acts.commit(preview.id, ADA, count=3)
    assert len(done.updated) == 2
    assert "has changed since it was shown" in done.refused[str(first)]


def test_a_preview_names_what_would_be_refused_and_why(db: Database) -> None:
    questions = Questions(db)
    quiet = scenarios.an_indeterminate_mutation(db, "order-9", settle=timedelta(hours=1))
    assert list(questions.preview(BulkAct.DID_NOT_HAPPEN).refused) == [str(quiet.id)]
    assert len(questions.preview(BulkAct.TRY_AGAIN).refused) == 4, "the operation cannot reconcile"
    checked = questions.preview(BulkAct.HAPPENED, result=GivenResult(value={"id": "x"}))
    assert all("no worker has registered" in text for text in checked.refused.values())
    unchecked = GivenResult(value={"id": "x"}, is_unchecked=True)
    assert questions.preview(BulkAct.HAPPENED, result=unchecked).refused == {}


def test_items_out_of_scope_are_neither_previewed_nor_shown(db: Database) -> None:
    questions = Questions(db, can_see=lambda workflow: workflow != "billing")
    with pytest.raises(InvalidInputError, match="Nothing was selected"):
        questions.preview()
    everything = BulkActs(questions.resolutions, Quarantine(db))
    made = everything.preview_mutations(BulkAct.SKIP, EVERYTHING, "ada")
    for act in (questions.acts.preview, questions.acts.discard):
        with pytest.raises(NotFoundError):
            act(made.id)
    everything.discard(made.id)


def test_requests_are_approved_and_rejected_by_a_preview(db: Database) -> None:
    a_workflow(db, concurrency=8)
    first, second = (scenarios.a_pending_approval(db, f"order-{n}") for n in range(2))
    acts = BulkActs(Resolutions(db), Quarantine(db))
    approve = acts.preview_mutations(BulkAct.APPROVE, MutationSelection(ids=(first.id,)), "ada")
    assert acts.commit(approve.id, ADA, count=1).updated == (str(first.id),)
    again = acts.preview_mutations(BulkAct.REJECT, EVERYTHING, "ada")
    assert again.count == 1, "an approved request no longer waits"
    assert acts.commit(again.id, ADA, count=1).updated == (str(second.id),)


def test_quarantined_events_are_released_by_a_preview_and_a_stale_one_is_refused(db: Database) -> None:
    a_workflow(db)
    events = [scenarios.a_quarantined_event(db, f"order-{n}") for n in range(2)]
    quarantine = Quarantine(db)
    acts = BulkActs(Resolutions(db), quarantine)
    preview = acts.preview_events(BulkAct.RELEASE_EVENT, QuarantineFilter(workflow="billing"), "ada")
    acts.commit(
        acts.preview_events(BulkAct.SKIP_EVENT, QuarantineFilter(event_ids=(events[0],)), "ada").id, ADA, count=1
    )
    done = acts.commit(preview.id, ADA, count=2)
    assert done.updated == (f"{events[1]}/send",)
    assert "no longer quarantined" in done.refused[f"{events[0]}/send"]


def test_an_import_resolves_what_the_export_lists_and_counts_the_rest(db: Database) -> None:
    questions = Questions(db)
    keys = [row.idempotency_key for row in questions.rows]
    options = ImportOptions(
        column="reference", match_by="idempotency_key", results=RowResults(is_none=True, is_unchecked=True)
    )
    listed = [{"reference": keys[0]}, {"reference": "unknown"}, {"reference": keys[1]}, {"reference": keys[1]}]
    preview = questions.acts.preview_import(listed, options, "ada", name="export.csv")
    assert (preview.count, preview.left_out) == (1, {"ambiguous": 1, "not_in_export": 1, "unmatched_rows": 1})
    questions.acts.commit(preview.id, ADA, count=1)
    assert questions.statuses() == ["applied", "indeterminate", "indeterminate"]
    (act,) = rows(db, "SELECT evidence FROM pipeline.audit WHERE act = 'mutation.happened'")
    assert (act.evidence["row"], act.evidence["export"]) == ({"reference": keys[0]}, "export.csv")


@pytest.mark.parametrize(
    ("act", "which", "result", "text"),
    [
        (BulkAct.RELEASE_EVENT, EVERYTHING, None, "no act on a selection of mutations"),
        (BulkAct.SKIP, MutationSelection(), None, "exactly one of"),
        (BulkAct.HAPPENED, EVERYTHING, None, "no common result"),
        (BulkAct.HAPPENED, EVERYTHING, GivenResult(external_id="ch_1"), "no common result"),
    ],
)
def test_a_selection_that_says_too_little_or_too_much_is_refused(
    db: Database, act: BulkAct, which: MutationSelection, result: GivenResult | None, text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        Questions(db, 1).preview(act, which=which, result=result)


def test_a_commit_needs_a_reason_and_the_operator_who_took_it(db: Database) -> None:
    questions = Questions(db, 1)
    preview = questions.preview()
    with pytest.raises(InvalidInputError, match="gave no reason"):
        questions.acts.take(preview.id, Actor(name="ada"), count=1)
    questions.acts.take(preview.id, ADA, count=1)
    with pytest.raises(NotFoundError, match="taken by this operator"):
        questions.acts.run(preview.id, Actor(name="bob", reason="x"))
    with pytest.raises(InvalidInputError, match="no act on quarantined events"):
        questions.acts.preview_events(BulkAct.SKIP, QuarantineFilter(), "ada")


def test_notes_are_listed_and_presence_ends_by_itself(db: Database) -> None:
    questions = Questions(db, 1)
    mutation_id = questions.rows[0].id
    add_note(db, mutation_id, Actor(name="bob", reason="asked the provider"))
    assert [(note.author, note.text) for note in notes(db, mutation_id)] == [("bob", "asked the provider")]
    now = [0.0]
    presence = Presence(lambda: now[0])
    assert presence.enter(mutation_id, "ada") == []
    assert presence.enter(mutation_id, "bob") == ["ada"]
    presence.leave(mutation_id, "ada")
    assert presence.enter(mutation_id, "bob") == []
    now[0] = PRESENCE_SECONDS
    assert presence.enter(mutation_id, "ada") == []
