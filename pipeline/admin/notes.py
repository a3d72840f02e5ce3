"""Notes of operators on a mutation, and which operators have it open now.

Notes are in the audit. Presence is in the memory of one process and ends by itself. It warns two operators who are
about to resolve the same mutation; nothing else depends on it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.domain.states import MutationId
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.store.reads import listings
from pipeline.transitions import resolution

PRESENCE_SECONDS = 30.0  #: after the last sign of an operator's page
_NOTE = "mutation.note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A note on a mutation."""

    at: datetime
    author: str
    text: str


def add_note(db: Database, mutation_id: UUID, by: Actor) -> None:
    """Add a note to a mutation: the reason of the actor is its text."""
    with db.transaction() as tx:
        resolution.note(tx, MutationId(mutation_id), by)


def notes(db: Database, mutation_id: UUID) -> list[Note]:
    """List the notes on a mutation, oldest first."""
    with db.transaction() as tx:
        rows = listings.audit(tx, mutation_id=mutation_id)
    return [Note(at=row.at, author=row.actor, text=row.reason) for row in rows if row.act == _NOTE]


class Presence:
    """Know which operators have a mutation open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._seen: dict[UUID, dict[str, float]] = {}

    def enter(self, mutation_id: UUID, name: str) -> list[str]:
        """Record that an operator has a mutation open, and return the others who have."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            seen = self._seen.setdefault(mutation_id, {})
            seen[name] = now
            return sorted(each for each in seen if each != name)

    def leave(self, mutation_id: UUID, name: str) -> None:
        """Record that an operator left a mutation."""
        with self._lock:
            self._seen.get(mutation_id, {}).pop(name, None)

    def _forget(self, now: float) -> None:
        for mutation_id, seen in list(self._seen.items()):
            kept = {name: at for name, at in seen.items() if now - at < PRESENCE_SECONDS}
            if kept:
                self._seen[mutation_id] = kept
            else:
                del self._seen[mutation_id]
