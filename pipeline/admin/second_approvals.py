"""Answers about mutations of a high value that wait for a second person."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.domain.mutation_state import state_token
from pipeline.store.database import Database
from pipeline.store.reads import requests, work
from pipeline.store.schema import ProposalRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An answer that another person confirms by giving the same answer."""

    id: UUID
    mutation_id: UUID
    act: str  #: happened, did_not_happen or approve
    state: str  #: of the mutation; the proposal ends when the mutation changes
    proposed_by: str
    proposed_at: datetime
    reason: str


def open_proposal(db: Database, mutation_id: UUID) -> Proposal | None:
    """Return the proposal that waits for a second person in the present state of a mutation."""
    with db.transaction() as tx:
        row, rows = requests.open_proposal(tx, mutation_id), work.mutations(tx, [mutation_id])
    if row is None or not rows or state_token(rows[0]) != row.state:
        return None
    return proposal(row)


def proposal(row: ProposalRow) -> Proposal:
    """Convert a row of a proposal."""
    return Proposal(
        id=row.id,
        mutation_id=row.mutation_id,
        act=row.act,
        state=row.state,
        proposed_by=row.proposed_by,
        proposed_at=row.proposed_at,
        reason=row.reason,
    )
