"""Show the acts of operators and sweeps, with their reasons."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.domain.redaction import BY_NAME
from pipeline.store.schema import AuditRow


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One act, what it was about, and its evidence."""

    id: int
    at: datetime
    actor: str
    act: str
    claimed: bool  #: the actor named itself, as with ``--by``; no login, token or proxy did
    workflow: str | None
    run_id: UUID | None
    mutation_id: UUID | None
    event_id: int | None
    reason: str
    evidence: Any

    @property
    def shown_actor(self) -> str:
        """The actor, with a mark if nothing authenticated its name."""
        return f"{self.actor} (claimed)" if self.claimed else self.actor


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Select acts. Empty fields do not restrict."""

    actor: str | None = None
    act: str | None = None
    workflow: str | None = None
    mutation_id: UUID | None = None
    run_id: UUID | None = None
    event_id: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    within: frozenset[str] | None = None  #: only of these workflows; None: of all, and of none

    @property
    def subject(self) -> tuple[str, object]:
        """The column whose index finds the acts, and its value."""
        given = {
            "mutation_id": self.mutation_id,
            "run_id": self.run_id,
            "event_id": self.event_id,
            "workflow": self.workflow,
        }
        return next(((name, value) for name, value in given.items() if value is not None), ("", None))


def audit_record(row: AuditRow) -> AuditRecord:
    """Convert a row of the audit."""
    return AuditRecord(
        id=row.id,
        at=row.at,
        actor=row.actor,
        act=row.act,
        claimed=row.claimed,
        workflow=row.workflow,
        run_id=row.run_id,
        mutation_id=row.mutation_id,
        event_id=row.event_id,
        reason=row.reason,
        evidence=BY_NAME.value(row.evidence),
    )
