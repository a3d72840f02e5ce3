"""List events, runs, mutations, sessions, acts and quarantined events page by page, newest first.

A cursor is the position at which the next page begins. Rows that are added meanwhile move no later page. A cursor
belongs to one list with one filter; every other text is refused.

A page may have fewer items than asked for and be followed by another: what is long done is searched in windows of
``WINDOW`` rows. So every page costs about the same, however rare the items are.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from pipeline.admin import lookup
from pipeline.admin.audit import AuditFilter, AuditRecord, audit_record
from pipeline.admin.events import EventFilter, EventSummary, event_summary
from pipeline.admin.mutations import LedgerEntry, LedgerFilter, ledger_entry
from pipeline.admin.quarantine import QuarantineEntry, QuarantineFilter, quarantine_entry
from pipeline.admin.runs import RunFilter, RunSummary, SessionFilter, SessionSummary, run_summary, session_summary
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.store.database import Database, Transaction, interval
from pipeline.store.reads import listings, pages, traces
from pipeline.store.reads.pages import (
    FIRST_NUMBER,
    FIRST_UUID,
    LAST_NUMBER,
    LAST_UUID,
    LONGEST_TRANSACTION,
    PageRange,
    RowPage,
)
from pipeline.store.rows import LedgerPageRow, ListedEventRow, ListedRunRow, QuarantinedEventRow, SessionCostRow
from pipeline.store.schema import AuditRow

ItemT = TypeVar("ItemT")
RowT = TypeVar("RowT")
PositionT = TypeVar("PositionT")

#: Rows that one page searches, at most.
WINDOW = 10_000
MAX_LIMIT = 10_000
_VERSION = 1  #: of the cursor's format


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[ItemT]):
    """Some items of a list, newest first."""

    items: tuple[ItemT, ...]
    next: str | None  #: cursor of the next page; None: this is the last one

    def is_partial(self, limit: int) -> bool:
        """Return whether the search ended before the page was full."""
        return self.next is not None and len(self.items) < limit


def event_page(
    db: Database, only: EventFilter, *, after: str | None = None, limit: int = 50, window: int = WINDOW
) -> Page[EventSummary]:
    """List events that match the filter."""

    def read(tx: Transaction, before: int) -> RowPage[ListedEventRow, int]:
        return pages.events(tx, _numbers(tx, "events", only, before, limit, window), **_asked(only))

    return _page(db, only, _Cursor("events", only, limit, _number, LAST_NUMBER), after, read, event_summary)


def run_page(
    db: Database, only: RunFilter, *, after: str | None = None, limit: int = 50, window: int = WINDOW
) -> Page[RunSummary]:
    """List runs that match the filter."""

    def read(tx: Transaction, before: UUID) -> RowPage[ListedRunRow, UUID]:
        return pages.runs(tx, _session_part(tx, only.session_id, _uuids(only, before, limit, window)), **_asked(only))

    return _page(db, only, _Cursor("runs", only, limit, UUID, LAST_UUID), after, read, run_summary)


def mutation_page(
    db: Database, only: LedgerFilter, *, after: str | None = None, limit: int = 50, window: int = WINDOW
) -> Page[LedgerEntry]:
    """List mutations of any status that match the filter."""

    def read(tx: Transaction, before: UUID) -> RowPage[LedgerPageRow, UUID]:
        return pages.mutations(tx, _uuids(only, before, limit, window), **_asked(only))

    return _page(db, only, _Cursor("mutations", only, limit, UUID, LAST_UUID), after, read, ledger_entry)


def session_page(
    db: Database, only: SessionFilter, *, after: str | None = None, limit: int = 50, window: int = WINDOW
) -> Page[SessionSummary]:
    """List sessions that match the filter."""

    def read(tx: Transaction, before: UUID) -> RowPage[SessionCostRow, UUID]:
        return pages.sessions(tx, _uuids(only, before, limit, window), **_asked(only))

    return _page(db, only, _Cursor("sessions", only, limit, UUID, LAST_UUID), after, read, session_summary)


def audit_page(
    db: Database, only: AuditFilter, *, after: str | None = None, limit: int = 50, window: int = WINDOW
) -> Page[AuditRecord]:
    """List acts of operators and sweeps that match the filter."""

    def read(tx: Transaction, before: int) -> RowPage[AuditRow, int]:
        part = _numbers(tx, "audit", only, before, limit, window)
        return pages.audit(tx, part, subject=only.subject, **_asked(only))

    return _page(db, only, _Cursor("audit", only, limit, _number, LAST_NUMBER), after, read, audit_record)


def quarantine_page(
    db: Database, only: QuarantineFilter, *, after: str | None = None, limit: int = 50
) -> Page[QuarantineEntry]:
    """List quarantined events, once for each consumer that could not use them."""

    def read(tx: Transaction, before: tuple[int, int]) -> RowPage[QuarantinedEventRow, str]:
        rows = pages.quarantine(tx, before, limit=limit + 1, workflows=_workflows(only), handler=only.handler)
        last = rows[limit - 1] if len(rows) > limit else None
        return RowPage(rows=rows[:limit], position=None if last is None else f"{last.id}:{last.handler_id}")

    return _page(db, only, _Cursor("quarantine", only, limit, _pair, (LAST_NUMBER, 0)), after, read, quarantine_entry)


class _Cursor(Generic[PositionT]):
    """Write and read the cursors of one list with one filter."""

    def __init__(self, name: str, only: Any, limit: int, parse: Callable[[str], PositionT], first: PositionT) -> None:
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidInputError(f"A page of {limit} items was asked for; expected 1 to {MAX_LIMIT}.")
        self.name, self._parse, self._first = name, parse, first
        self.digest = hashlib.sha256(json.dumps(asdict(only), default=_plain).encode()).hexdigest()[:16]

    def text(self, position: object) -> str:
        """Return the cursor of a position."""
        content = json.dumps([_VERSION, self.name, self.digest, str(position)], separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")

    def position(self, text: str | None) -> PositionT:
        """Return the position at which a page begins; without a cursor it is the first page."""
        if text is None:
            return self._first
        try:
            content = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
            version, name, digest, position = json.loads(content)
            if (version, name, digest) != (_VERSION, self.name, self.digest):
                raise InvalidInputError(
                    f"The cursor {text!r} belongs to another list, another filter or another version; expected one "
                    f"that a page of {self.name} with this filter returned. Begin with the first page."
                )
            return self._parse(position)
        except (binascii.Error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidInputError(
                f"{text!r} is no cursor; expected the value that the page before returned. Begin with the first page."
            ) from error


def _page(
    db: Database,
    only: Any,
    cursor: _Cursor[PositionT],
    after: str | None,
    read: Callable[[Transaction, PositionT], RowPage[RowT, Any]],
    convert: Callable[[RowT], ItemT],
) -> Page[ItemT]:
    """Read the page after a cursor. Refuse a filter that names what does not exist."""
    before = cursor.position(after)
    with db.transaction() as tx:
        _check_names(tx, only)
        found = read(tx, before)
    return Page(
        items=tuple(convert(row) for row in found.rows),
        next=None if found.position is None else cursor.text(found.position),
    )


def _number(text: str) -> int:
    found = int(text)
    if not 0 <= found <= LAST_NUMBER:
        raise ValueError(text)
    return found


def _pair(text: str) -> tuple[int, int]:
    event, handler = text.split(":")
    return _number(event), _number(handler)


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _check_names(tx: Transaction, only: Any) -> None:
    """Refuse a filter whose workflow is out of scope, or which names what does not exist."""
    if only.workflow is None:
        return
    if only.within is not None and only.workflow not in only.within:
        raise NotFoundError("workflow", only.workflow, only.within)
    lookup.require_workflow(tx, only.workflow)
    for name, require in (("topic", lookup.require_topic), ("handler", lookup.require_handler)):
        if getattr(only, name, None) is not None:
            require(tx, only.workflow, getattr(only, name))


def _asked(only: Any) -> dict[str, Any]:
    """Return what a filter asks for, with the workflows to which it restricts."""
    found = {each.name: getattr(only, each.name) for each in fields(only) if each.name not in ("workflow", "within")}
    if found.get("older_than") is not None:
        found["older_than"] = interval(found["older_than"])
    return {**found, "workflows": _workflows(only)}


def _workflows(only: Any) -> list[str] | None:
    """Return the workflows to which a filter restricts; None: all."""
    if only.workflow is not None:
        return [only.workflow]  # within the scope, or it was refused
    return None if only.within is None else sorted(only.within)


def _numbers(tx: Transaction, table: str, only: Any, before: int, limit: int, window: int) -> PageRange[int]:
    low = FIRST_NUMBER if only.since is None else pages.first_at(tx, table, only.since)
    top = LAST_NUMBER if only.until is None else pages.first_after(tx, table, only.until)
    return PageRange(before=min(before, top), low=low, limit=limit, window=window)


def _uuids(only: Any, before: UUID, limit: int, window: int) -> PageRange[UUID]:
    low = FIRST_UUID if only.since is None else traces.first_id_at(only.since)
    return PageRange(before=min(before, _end_id(only.until)), low=low, limit=limit, window=window)


def _end_id(until: datetime | None) -> UUID:
    """Return an id that no row of an earlier instant can have, unless its transaction took longer than a minute."""
    return LAST_UUID if until is None else traces.first_id_at(until + LONGEST_TRANSACTION, margin=0)


def _session_part(tx: Transaction, session_id: UUID | None, part: PageRange[UUID]) -> PageRange[UUID]:
    """Restrict the search to the time in which a session was open."""
    session = None if session_id is None else listings.session(tx, session_id)
    if session is None:
        return part
    return PageRange(
        before=min(part.before, _end_id(session.finished_at)),
        low=max(part.low, traces.first_id_at(session.started_at)),
        limit=part.limit,
        window=part.window,
    )
