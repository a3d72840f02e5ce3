"""Show sessions to an operator: a list, or one by its id."""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from pipeline.domain.costs import session_cost
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.workflows import SessionResult
from pipeline.store.database import Database
from pipeline.store.reads import listings
from pipeline.store.rows import SessionCostRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """A session in one line."""

    id: UUID
    workflow: str
    started_at: datetime
    finished_at: datetime | None
    result: str | None  #: completed or failed; none while it is open
    error: str | None
    run_count: int | None  #: committed runs, once it is over
    cost: Decimal | None  #: of its runs, as far as it is known; of ten thousand runs at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Select sessions. Empty fields do not restrict."""

    workflow: str | None = None
    result: SessionResult | None = None
    is_open: bool | None = None
    since: datetime | None = None
    until: datetime | None = None
    within: frozenset[str] | None = None  #: only of these workflows


def detail(db: Database, text: str) -> SessionSummary:
    """Return a session by its id."""
    try:
        session_id = UUID(text)
    except ValueError as error:
        raise InvalidInputError(f"{text!r} is not the id of a session; expected a UUID.") from error
    with db.transaction() as tx:
        row = listings.session(tx, session_id)
    if row is None:
        raise NotFoundError("session", text)
    return session_summary(row)


def session_summary(row: SessionCostRow) -> SessionSummary:
    """Convert a row of a session."""
    return SessionSummary(
        id=row.id,
        workflow=row.workflow,
        started_at=row.started_at,
        finished_at=row.finished_at,
        result=row.result,
        error=row.error,
        run_count=row.run_count,
        cost=session_cost(row.cost, row.runs_cost, is_over=row.finished_at is not None),
    )
