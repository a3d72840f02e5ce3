"""Tell what changed since a mark, for pages that show it at once.

While nothing changes, a call is one cheap statement. ``Mark`` is kept by the caller and handed back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pipeline.admin.audit import AuditRecord, audit_record
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import attention

#: kind and id: mutation, approval, late_effect (ids of mutations), block (id of its run), quarantine (name of a
#: handler), breaker (connector.operation), workflow
_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How everything stood at one instant."""

    act_id: int  #: of the last act in the audit
    digest: str
    items: Mapping[_Key, int]  #: fingerprints by kind, id and workflow

    @property
    def token(self) -> str:
        """A short text that is the same as long as nothing changes, for an event stream."""
        return f"{self.act_id}-{self.digest.replace('/', '.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One item that changed."""

    #: mutation, approval, late_effect (ids of mutations), block (id of its run), quarantine (name of a handler),
    #: breaker (connector.operation), workflow
    kind: str
    id: str
    workflow: str  #: empty when it concerns no single workflow
    what: Literal["opened", "changed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What changed since a mark, and how much waits for operators now."""

    mark: Mark
    at: datetime
    waiting: int
    oldest_at: datetime | None  #: since when the oldest item waits
    items: tuple[Change, ...]
    acts: tuple[AuditRecord, ...]  #: of operators and sweeps, oldest first; at most 500

    @property
    def is_empty(self) -> bool:
        """Return whether nothing changed."""
        return not self.items and not self.acts


def changes_since(db: Database, mark: Mark | None = None) -> Changes:
    """Return what changed since a mark. Without a mark nothing has changed, and one is returned."""
    with db.autocommit() as tx:
        now = attention.high_water(tx)
        act_id = now.act_id or 0
        is_same = mark is not None and mark.digest == now.digest
        items = mark.items if mark is not None and is_same else _items(tx)
        acts = attention.acts_after(tx, mark.act_id) if mark is not None and mark.act_id != act_id else ()
    new_mark = Mark(act_id=act_id, digest=now.digest, items=items)
    return Changes(
        mark=new_mark,
        at=now.now,
        waiting=now.waiting,
        oldest_at=now.oldest_at,
        items=() if mark is None or is_same else _difference(mark.items, items),
        acts=tuple(audit_record(row) for row in acts),
    )


def _items(tx: Transaction) -> dict[_Key, int]:
    return {(row.kind, row.id, row.workflow): row.fingerprint for row in attention.watched_items(tx)}


def _difference(before: Mapping[_Key, int], now: Mapping[_Key, int]) -> tuple[Change, ...]:
    found: list[tuple[_Key, Literal["opened", "changed", "closed"]]] = [
        *((key, "opened") for key in now.keys() - before.keys()),
        *((key, "changed") for key in now.keys() & before.keys() if now[key] != before[key]),
        *((key, "closed") for key in before.keys() - now.keys()),
    ]
    return tuple(
        Change(kind=kind, id=id_, workflow=workflow, what=what) for (kind, id_, workflow), what in sorted(found)
    )
