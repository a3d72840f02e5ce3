"""Trace causes and effects as a tree.

Start from an event, a message id, a run, a mutation, an idempotency key, or the outside system's id of a result. Go up
to the events that caused it, and from those down: their consumers, runs, mutations, published events, and so on.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pipeline.admin import lookup
from pipeline.admin.events import runs_of
from pipeline.admin.runs import sequel_text
from pipeline.domain.errors import InvalidInputError, NotFoundError, quantity
from pipeline.domain.states import RunId
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings, traces
from pipeline.store.rows import EventHeadRow, ListedEventRow, ListedRunRow
from pipeline.store.schema import MutationRow
from pipeline.text import parse_id

RECENT = 10_000
MAX_NODES = 300
MAX_DEPTH = 30
_MAX_INPUTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A thing that the typed text identifies."""

    kind: str  #: event, message, run, mutation, key or external
    noun: str  #: event, run or mutation
    id: str
    description: str


@dataclass(slots=True, kw_only=True)
class TraceNode:
    """One thing in the tree, and what it caused."""

    kind: str  #: event, run or mutation
    id: str
    description: str
    status: str
    at: datetime
    is_match: bool = False  #: the typed text identifies it
    children: list["TraceNode"] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trees that contain the match, one for each root."""

    match: Match
    roots: tuple[TraceNode, ...]
    is_partial: bool  #: there are more nodes


def trace(db: Database, text: str, *, recent: int = RECENT, max_nodes: int = MAX_NODES) -> Trace:
    """Return the trees of the thing that the text identifies; raise if unknown or ambiguous."""
    with db.transaction() as tx:
        return _TraceBuilder(tx, single_match(tx, text, recent=recent, command="trace"), max_nodes).trace()


def single_match(tx: Transaction, text: str, *, command: str, recent: int = RECENT) -> Match:
    """Find the one thing that the text identifies; raise if unknown or ambiguous."""
    found = matches(tx, text, recent=recent)
    if not found:
        raise NotFoundError(
            "event, message, run, mutation, idempotency key or result with",
            text,
            hint=f"Results were searched in the newest {recent} mutations; `pipeline trace --recent` searches more.",
        )
    if len({(match.noun, match.id) for match in found}) > 1:
        listed = "; ".join(
            f"`pipeline {command} {match.kind}:{_match_key(match, text)}` ({match.description})" for match in found[:6]
        )
        raise InvalidInputError(f"{text!r} is ambiguous; expected one of: {listed}.")
    return found[0]


def matches(tx: Transaction, text: str, *, recent: int = RECENT) -> list[Match]:
    """Find everything that the text identifies; ``kind:`` before it selects one kind."""
    kind, colon, rest = text.partition(":")
    finders = {kind: _FINDERS[kind]} if colon and kind in _FINDERS else _FINDERS
    wanted = rest if colon and kind in _FINDERS else text
    found = [match for finder in finders.values() for match in finder(tx, wanted, recent)]
    if not found and finders is not _FINDERS:  # an idempotency key may begin with "run:" itself
        found = [match for finder in _FINDERS.values() for match in finder(tx, text, recent)]
    return found


def _match_key(match: Match, text: str) -> str:
    return match.id if match.kind in ("event", "run", "mutation") else text


def _events(tx: Transaction, text: str, _: int) -> Iterable[Match]:
    number = parse_id(text)
    if number is not None:
        for row in listings.events_by_id(tx, [number]):
            yield _event_match("event", row)


def _messages(tx: Transaction, text: str, _: int) -> Iterable[Match]:
    for row in listings.events_by_message(tx, text):
        yield _event_match("message", row)


def _event_match(kind: str, row: EventHeadRow) -> Match:
    return Match(
        kind=kind, noun="event", id=str(row.id), description=f"event {row.id} of {row.workflow} on {row.topic}"
    )


def _by_id(noun: str) -> Callable[[Transaction, str, int], Iterable[Match]]:
    def find(tx: Transaction, text: str, _: int) -> Iterable[Match]:
        span = lookup.id_range(text)
        if span is not None:
            for id_ in traces.ids_between(tx, f"{noun}s", *span):
                yield Match(kind=noun, noun=noun, id=str(id_), description=f"{noun} {id_}")

    return find


def _keys(tx: Transaction, text: str, _: int) -> Iterable[Match]:
    for row in traces.mutations_by_key(tx, text):
        yield Match(kind="key", noun="mutation", id=str(row.id), description=f"mutation {row.id}")


def _results(tx: Transaction, text: str, recent: int) -> Iterable[Match]:
    number = int(text) if text.isdecimal() and len(text) < 100 else None
    for row in traces.mutations_by_result_value(tx, json.dumps({"text": text, "number": number}), recent=recent):
        yield Match(kind="external", noun="mutation", id=str(row.id), description=f"mutation {row.id}")


_FINDERS: dict[str, Callable[[Transaction, str, int], Iterable[Match]]] = {
    "event": _events,
    "message": _messages,
    "run": _by_id("run"),
    "mutation": _by_id("mutation"),
    "key": _keys,
    "external": _results,
}


def _run_status(run: ListedRunRow) -> str:
    """The phase and the status of a run, and what became of it if it stopped."""
    if run.phase == run.status:
        return run.status
    return ", ".join(part for part in (run.phase, run.status, sequel_text(run)) if part)


class _TraceBuilder:
    """Go up from one thing to its roots, and down from there."""

    def __init__(self, tx: Transaction, asked: Match, most: int) -> None:
        self.tx, self.match, self.remaining, self.is_partial = tx, asked, most, False
        self.seen: set[tuple[str, str]] = set()

    def trace(self) -> Trace:
        events, runs = self._roots()
        roots = self._event_nodes(events)
        for run in runs:
            if self._add_once("run", str(run.id)):
                roots.append(self._run(run))
        return Trace(match=self.match, roots=tuple(roots), is_partial=self.is_partial)

    def _roots(self) -> tuple[list[ListedEventRow], list[ListedRunRow]]:
        """Return the root events and runs."""
        if self.match.noun == "event":
            return self._ancestors(listings.events_by_id(self.tx, [int(self.match.id)]), [])
        run_id: Any = self.match.id
        if self.match.noun == "mutation":
            (mutation,) = listings.mutations(self.tx, [run_id])
            run_id = mutation.run_id
        return self._ancestors([], listings.runs_by_id(self.tx, [run_id]))

    def _ancestors(
        self, events: Sequence[ListedEventRow], runs: Sequence[ListedRunRow]
    ) -> tuple[list[ListedEventRow], list[ListedRunRow]]:
        """Go up to events from outside, and to runs without inputs or whose inputs were deleted."""
        first_events: dict[int, ListedEventRow] = {}
        first_runs: dict[RunId, ListedRunRow] = {}
        for _ in range(MAX_DEPTH):
            wanted = sorted({event for run in runs for event in run.event_ids[:_MAX_INPUTS]})
            inputs = {row.id: row for row in listings.events_by_id(self.tx, wanted)} if wanted else {}
            first_runs |= {run.id: run for run in runs if not inputs.keys() & set(run.event_ids)}
            level = [*events, *inputs.values()]
            made_by = {event.created_by_run_id for event in level if event.created_by_run_id is not None}
            runs = listings.runs_by_id(self.tx, list(made_by)) if made_by else []
            known = {run.id for run in runs}
            first_events |= {event.id: event for event in level if event.created_by_run_id not in known}
            events = []
            if not runs:
                break
        return [first_events[id_] for id_ in sorted(first_events)], [first_runs[id_] for id_ in sorted(first_runs)]

    def _event_nodes(self, events: Sequence[ListedEventRow]) -> list[TraceNode]:
        return [node for event in events if (node := self._event(event)) is not None]

    def _event(self, row: ListedEventRow) -> TraceNode | None:
        if not self._add_once("event", str(row.id)):
            return None
        node = TraceNode(
            kind="event",
            id=str(row.id),
            description=f"{row.topic} {row.message_id}" + (f" ({row.title})" if row.title else ""),
            status=", ".join(row.deliveries or ()) or "no consumer",
            at=row.created_at,
            is_match=(self.match.noun, self.match.id) == ("event", str(row.id)),
        )
        for run in runs_of(self.tx, [row]) if row.deliveries else ():
            if self._add_once("run", str(run.id)):
                node.children.append(self._run(run))
        return node

    def _run(self, run: ListedRunRow) -> TraceNode:
        node = TraceNode(
            kind="run",
            id=str(run.id),
            description=run.handler + (f" ({run.title})" if run.title else "") + self._missing_inputs_note(run),
            status=_run_status(run),
            at=run.created_at,
            is_match=(self.match.noun, self.match.id) == ("run", str(run.id)),
        )
        if run.mutation_id is not None:
            node.children += [self._mutation(row) for row in listings.mutations(self.tx, [run.mutation_id])]
        node.children += self._event_nodes(listings.outputs(self.tx, [run.id]))
        return node

    def _missing_inputs_note(self, run: ListedRunRow) -> str:
        """Note that a root run had inputs."""
        if not run.event_ids or any(("event", str(event)) in self.seen for event in run.event_ids):
            return ""
        return f", {quantity(len(run.event_ids), 'input')} no longer kept"

    def _mutation(self, row: MutationRow) -> TraceNode:
        headline = f"{row.headline}; " if row.headline else ""
        return TraceNode(
            kind="mutation",
            id=str(row.id),
            description=f"{headline}{row.connector}.{row.operation}, key {row.idempotency_key}",
            status=row.status + (", found late" if row.found_late_at else ""),
            at=row.created_at,
            is_match=(self.match.noun, self.match.id) == ("mutation", str(row.id)),
        )

    def _add_once(self, kind: str, id_: str) -> bool:
        """Add a thing; return False if it is in the tree already or the tree is full."""
        if (kind, id_) in self.seen:
            return False
        if not self.remaining:
            self.is_partial = True
            return False
        self.seen.add((kind, id_))
        self.remaining -= 1
        return True
