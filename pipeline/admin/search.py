"""Find anything by what an operator types into one box."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import UUID

from pipeline.admin import trace
from pipeline.admin.trace import Match
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings, work

_MAX_HITS = 50
_MIN_PART = 2  #: letters of a name that are searched inside names


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A thing that the text identifies."""

    kind: str  #: how it was found: event, message, run, mutation, key, external or workflow
    noun: str  #: event, run, mutation or workflow
    id: str
    workflow: str
    description: str
    status: str  #: of a run or a mutation; else empty


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Everything that a text identifies, each thing once. Exact ids come before names."""

    text: str
    hits: tuple[SearchHit, ...]
    recent: int  #: results were searched for the text in so many of the newest mutations


def search(
    db: Database, text: str, *, within: frozenset[str] | None = None, recent: int = trace.RECENT
) -> SearchResult:
    """Find events, runs, mutations and workflows by an id, its first digits, a key, an outside id or a name.

    ``within`` restricts the hits to these workflows.
    """
    wanted = text.strip()
    if not wanted:
        return SearchResult(text=wanted, hits=(), recent=recent)
    with db.transaction() as tx:
        found: dict[tuple[str, str], Match] = {}
        for match in trace.matches(tx, wanted, recent=recent):
            found.setdefault((match.noun, match.id), match)
        hits = [*_hits(tx, list(found.values())[:_MAX_HITS]), *_workflows(tx, wanted)]
    allowed = tuple(hit for hit in hits if within is None or hit.workflow in within)
    return SearchResult(text=wanted, hits=allowed, recent=recent)


def _hits(tx: Transaction, found: Iterable[Match]) -> Iterable[SearchHit]:
    for match in found:
        yield _FILLED[match.noun](tx, match)


def _event(tx: Transaction, match: Match) -> SearchHit:
    (row,) = listings.events_by_id(tx, [int(match.id)])
    return _hit(match, row.workflow, f"{row.topic} {row.message_id}" + (f" ({row.title})" if row.title else ""))


def _run(tx: Transaction, match: Match) -> SearchHit:
    (row,) = listings.runs_by_id(tx, [UUID(match.id)])
    return _hit(match, row.workflow, row.handler + (f" ({row.title})" if row.title else ""), row.status)


def _mutation(tx: Transaction, match: Match) -> SearchHit:
    (row,) = listings.mutations(tx, [UUID(match.id)])
    return _hit(match, row.workflow, row.headline or f"{row.connector}.{row.operation}", row.status)


_FILLED: dict[str, Callable[[Transaction, Match], SearchHit]] = {
    "event": _event,
    "run": _run,
    "mutation": _mutation,
}


def _hit(match: Match, workflow: str, description: str, status: str = "") -> SearchHit:
    return SearchHit(
        kind=match.kind, noun=match.noun, id=match.id, workflow=workflow, description=description, status=status
    )


def _workflows(tx: Transaction, text: str) -> Iterable[SearchHit]:
    """Yield workflows whose name is the text, then those that contain it."""
    part = text.casefold()
    names = [name for name in work.workflow_names(tx) if part in name.casefold() and len(part) >= _MIN_PART]
    for name in sorted(names, key=lambda each: (each.casefold() != part, each)):
        yield SearchHit(kind="workflow", noun="workflow", id=name, workflow=name, description="", status="")
