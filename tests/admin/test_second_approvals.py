"""Mutations of a high value: one person proposes an answer, and another gives the same one."""

from datetime import timedelta
from decimal import Decimal
from uuid import uuid4

import pytest

from pipeline.admin.bulk import BulkActs, MutationSelection
from pipeline.admin.given_results import GivenResult
from pipeline.admin.quarantine import Quarantine
from pipeline.admin.resolutions import (
    PROPOSED_TEXT,
    MutationSummary,
    ResolutionKind,
    Resolutions,
    open_proposal,
    resolutions_for,
)
from pipeline.domain.acts import BulkAct, ProposedAct
from pipeline.domain.errors import ClaimedNameError, NotFoundError, QuietPeriodError, StateChangedError
from pipeline.domain.states import MutationId, Phase
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.transitions import resolution
from tests.cli import scenarios
from tests.factories import a_run, a_workflow, some_events
from tests.support.table_reads import one, rows

ADA, BOB = Actor(name="ada", reason="the dashboard shows it"), Actor(name="bob", reason="I see it too")
CLAIMED = Actor(name="carol", reason="me too", is_claimed=True)
RESULT = GivenResult(value={"id": "ch_1"}, is_unchecked=True)


@pytest.fixture
def resolutions(db: Database) -> Resolutions:
    a_workflow(db, concurrency=8, on_uncertain="contain")
    return Resolutions(db)


def question(db: Database, value: int | None = 9_000) -> MutationSummary:
    """An unknown outcome of a high value, whose request can no longer arrive."""
    row = scenarios.an_indeterminate_mutation(db, four_eyes_value=None if value is None else Decimal(value))
    db.advance_clock(timedelta(minutes=5))
    return Resolutions(db).mutation(row.id)


def status(db: Database) -> str:
    return str(one(db, "SELECT status FROM pipeline.mutations").status)


@pytest.mark.parametrize(
    ("kind", "result", "after"),
    [(ResolutionKind.HAPPENED, RESULT, "applied"), (ResolutionKind.DID_NOT_HAPPEN, None, "failed")],
)
def test_an_answer_about_a_high_value_is_done_when_a_second_person_gives_it(
    db: Database, resolutions: Resolutions, kind: ResolutionKind, result: GivenResult | None, after: str
) -> None:
    asked = question(db)
    for _ in range(2):
        made = resolutions.resolve(asked.id, kind, ADA, result=result, state=asked.state)
        assert made is not None, "the same person cannot confirm"
        assert (made.act, made.proposed_by) == (kind, "ada")
    assert status(db) == "indeterminate"
    assert open_proposal(db, asked.id) == made
    assert resolutions.resolve(asked.id, kind, BOB, result=result, state=asked.state) is None
    assert status(db) == after
    assert open_proposal(db, asked.id) is None
    acts = [(row.actor, row.act) for row in rows(db, "SELECT actor, act FROM pipeline.audit ORDER BY id")]
    assert acts == [("ada", f"mutation.propose {kind}")] * 2 + [("bob", f"mutation.{kind}")]


@pytest.mark.parametrize(
    ("first", "second"),
    [(CLAIMED, BOB), (ADA, CLAIMED)],
    ids=["proposes", "confirms"],
)
def test_a_name_that_nobody_authenticated_neither_proposes_nor_confirms(
    db: Database, resolutions: Resolutions, first: Actor, second: Actor
) -> None:
    """One person at a shell could give two names."""
    asked = question(db)
    refused = []
    for who in (first, second):
        try:
            resolutions.resolve(asked.id, ResolutionKind.DID_NOT_HAPPEN, who, state=asked.state)
        except ClaimedNameError as error:
            refused.append((error.name, "in the console or over the HTTP API" in str(error)))
    assert refused == [("carol", True)]
    assert status(db) == "indeterminate"
    given = resolutions_for([asked], ResolutionKind.DID_NOT_HAPPEN)
    assert "carol" in resolutions.resolve_many(given, CLAIMED).refused[asked.id]
    with pytest.raises(ClaimedNameError), db.transaction() as tx:
        resolution.propose(tx, MutationId(asked.id), ProposedAct.HAPPENED, {}, CLAIMED, state=asked.state)


def test_one_name_written_in_two_ways_is_one_person(db: Database, resolutions: Resolutions) -> None:
    asked = question(db)
    for name in ("ada", "Ada"):
        assert resolutions.resolve(asked.id, ResolutionKind.DID_NOT_HAPPEN, Actor(name=name, reason="why")) is not None
    assert status(db) == "indeterminate"


def test_another_answer_of_the_second_person_is_a_proposal_of_its_own(db: Database, resolutions: Resolutions) -> None:
    asked = question(db)
    resolutions.resolve(asked.id, ResolutionKind.HAPPENED, ADA, result=RESULT)
    other = GivenResult(value={"id": "ch_2"}, is_unchecked=True)
    made = resolutions.resolve(asked.id, ResolutionKind.HAPPENED, BOB, result=other)
    assert made is not None
    assert made.proposed_by == "bob"
    assert status(db) == "indeterminate"


def test_a_proposal_ends_when_the_mutation_changes(db: Database, resolutions: Resolutions) -> None:
    asked = question(db)
    resolutions.resolve(asked.id, ResolutionKind.HAPPENED, ADA, result=RESULT)
    assert resolutions.resolve(asked.id, ResolutionKind.SKIP, BOB) is None, "nothing is sent and no result is stated"
    assert open_proposal(db, asked.id) is None
    with pytest.raises(StateChangedError):
        resolutions.resolve(asked.id, ResolutionKind.HAPPENED, BOB, result=RESULT, state=asked.state)


def test_an_answer_that_would_be_refused_is_not_proposed(db: Database, resolutions: Resolutions) -> None:
    row = scenarios.an_indeterminate_mutation(db, four_eyes_value=Decimal(9_000))
    with pytest.raises(QuietPeriodError):
        resolutions.resolve(row.id, ResolutionKind.DID_NOT_HAPPEN, ADA)
    assert rows(db, "SELECT * FROM pipeline.proposals") == []
    db.advance_clock(timedelta(minutes=5))


def test_a_mutation_below_the_value_needs_one_person(db: Database, resolutions: Resolutions) -> None:
    asked = question(db, None)
    assert resolutions.resolve(asked.id, ResolutionKind.HAPPENED, ADA, result=RESULT) is None
    assert status(db) == "applied"


def test_a_request_of_a_high_value_is_approved_by_two_people(db: Database, resolutions: Resolutions) -> None:
    some_events(db, "order-1")
    run = a_run(db, Phase.MUTATING, needs_approval=True, four_eyes_value=Decimal(9_000))
    asked = resolutions.mutation(run.mutation_id)
    acts = BulkActs(resolutions, Quarantine(db))
    preview = acts.preview_mutations(BulkAct.APPROVE, MutationSelection(ids=(asked.id,)), "ada")
    assert acts.commit(preview.id, ADA, count=1).refused == {str(asked.id): PROPOSED_TEXT}
    assert one(db, "SELECT approved_by FROM pipeline.mutations").approved_by is None
    assert resolutions.approve(asked, BOB) is None
    assert one(db, "SELECT approved_by FROM pipeline.mutations").approved_by == "bob"


def test_many_answers_propose_those_of_a_high_value(db: Database, resolutions: Resolutions) -> None:
    asked = question(db)
    given = resolutions_for([asked], ResolutionKind.DID_NOT_HAPPEN)
    assert resolutions.resolve_many(given, ADA).refused == {asked.id: PROPOSED_TEXT}
    assert resolutions.resolve_many(given, BOB).updated == [asked.id]


def test_a_proposal_names_a_mutation_in_the_state_that_was_shown(db: Database, resolutions: Resolutions) -> None:
    asked = question(db)
    with pytest.raises(StateChangedError, match="propose happened"), db.transaction() as tx:
        resolution.propose(tx, MutationId(asked.id), ProposedAct.HAPPENED, {}, ADA, state="pending.0.0")
    with pytest.raises(NotFoundError), db.transaction() as tx:
        resolution.propose(tx, MutationId(uuid4()), ProposedAct.HAPPENED, {}, ADA, state="pending.0.0")
