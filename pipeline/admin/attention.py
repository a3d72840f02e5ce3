"""Everything that waits for a person, oldest first, each with the exact commands to type.

Console, command line and alerts read the same list. What the system mends by itself is not in it.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from pipeline.admin import commands, lookup
from pipeline.admin.resolutions import Desk, Filter, Question
from pipeline.domain.workflows import CLEARED_BY_RESUME, HandlerKind
from pipeline.store.database import Transaction
from pipeline.store.reads import invariants, ledger, listings
from pipeline.store.reads.invariants import Severity

#: Reported as what they are, so the doctor need not say them again.
_SAID_ALREADY = frozenset({"settled-as-failed-did-not-happen"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that stands still until a person acts."""

    #: indeterminate, approval, surfaced, blocked, maintenance, quarantined, breaker, retired, unheard, refused, broken
    kind: str
    workflow: str  #: empty when it is about no single one
    subject: str  #: the mutation, run, handler or operation
    why: str
    since: datetime | None  #: of events that were set aside: when the oldest was published
    commands: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def items(desk: Desk, *, workflow: str | None = None, limit: int = 100, recent: int = 10_000) -> list[Item]:
    """What waits, oldest first, at most ``limit`` of each kind. Findings have no instant and come first."""
    questions = [_indeterminate(each) for each in desk.questions(Filter(workflow=workflow), limit=limit)]
    approvals = [_approval(each) for each in desk.approvals(workflow, limit=limit)]
    with desk.db.transaction() as tx:
        others = [
            *_surfaced(tx, limit),
            *_blocked(tx, limit),
            *_maintenance(tx),
            *_handlers(tx),
            *_breakers(tx),
            *_broken(tx, recent),
        ]
    kept = [item for item in others if workflow is None or item.workflow in (workflow, "")]
    # stable: what has no instant is a broken promise, and nothing is more urgent
    return sorted(
        [*questions, *approvals, *kept],
        key=lambda item: (item.since is not None, item.since.timestamp() if item.since else 0.0),
    )


def refused(count: int) -> Item:
    """Messages in the queue that a worker moves them to; only the broker knows how many, and not since when."""
    return Item(
        kind="refused",
        workflow="",
        subject="queue pipeline.refused",
        why=f"{lookup.many(count, 'message')} that no worker could publish or read; send them back or drop them",
        since=None,
        commands=("pipeline refused list", "pipeline refused send-back --all --yes"),
    )


def _indeterminate(question: Question) -> Item:
    return Item(
        kind="indeterminate",
        workflow=question.workflow,
        subject=f"mutation {question.id}",
        why=_words(question, "nobody knows whether it happened"),
        since=question.since,
        commands=(
            commands.show_mutation(question.id),
            *commands.resolve(question.id, can_try_again=question.can_try_again),
        ),
    )


def _approval(question: Question) -> Item:
    return Item(
        kind="approval",
        workflow=question.workflow,
        subject=f"mutation {question.id}",
        why=_words(question, "waits to be allowed"),
        since=question.since,
        commands=(commands.show_mutation(question.id), *commands.approve(question.id)),
    )


def _words(question: Question, otherwise: str) -> str:
    operation = f"{question.connector}.{question.operation}"
    named = operation if question.title == operation else f"{operation}: {question.title}"
    return f"{named}: {question.error or otherwise}"


def _surfaced(tx: Transaction, limit: int) -> Iterator[Item]:
    for row in listings.surfaced(tx, limit=limit):
        yield Item(
            kind="surfaced",
            workflow=row.workflow,
            subject=f"mutation {row.id}",
            why=f"{row.connector}.{row.operation} seems to have happened after all; it was settled as failed by "
            f"{row.resolved_by}" + (f": {row.means}" if row.means else ""),
            since=row.surfaced_at,
            commands=(commands.show_mutation(row.id), commands.acknowledge(row.id)),
        )


def _blocked(tx: Transaction, limit: int) -> Iterator[Item]:
    """An unknown outcome that holds a workflow back is there as a question, and lifts with its answer."""
    for row in listings.blocks(tx, limit=limit):
        if row.kind in CLEARED_BY_RESUME:
            yield Item(
                kind="blocked",
                workflow=row.workflow,
                subject=f"run {row.run_id}",
                why=f"{row.kind}: {row.reason}",
                since=row.since,
                commands=(commands.show_run(row.run_id), commands.resume(row.workflow)),
            )


def _maintenance(tx: Transaction) -> Iterator[Item]:
    for row in listings.workflows(tx):
        if row.maintenance:
            yield Item(
                kind="maintenance",
                workflow=row.name,
                subject=f"workflow {row.name}",
                why=f"{row.maintenance_reason}; deploy mended code, or set right what is wrong and end it by hand",
                since=row.maintenance_since,
                commands=(commands.exit_maintenance(row.name),),
            )


def _handlers(tx: Transaction) -> Iterator[Item]:
    for row in listings.handlers(tx):
        subject = f"handler {row.name}"
        if row.quarantined:
            yield Item(
                kind="quarantined",
                workflow=row.workflow,
                subject=subject,
                why=f"{lookup.many(row.quarantined, 'event')} set aside, the oldest is event {row.quarantined_id}",
                since=_since(tx, row.quarantined_id),
                commands=tuple(
                    commands.quarantine(verb, row.workflow, row.name) for verb in ("list", "release", "skip")
                ),
            )
        yield from _unserved(row)


def _unserved(row: Row[Any]) -> Iterator[Item]:
    """A handler with work left that is gone from the code, or that no running worker has the code of."""
    left = row.waiting + row.reserved
    events = lookup.many(left, "event") if left else lookup.many(row.stopped, "run")
    look = tuple(commands.quarantine(verb, row.workflow, row.name, waiting=True) for verb in ("list", "skip"))
    of = {"workflow": row.workflow, "subject": f"handler {row.name}"}
    if row.retired and (left or row.stopped):
        why = f"it is gone from the code with {events} left; bring it back under its old name until they are done, or "
        yield Item(kind="retired", why=f"{why}skip them", since=row.oldest_at or row.stopped_at, commands=look, **of)
    is_producer = row.kind == HandlerKind.PRODUCER
    if row.is_unheard and (left or is_producer):
        why = "no running worker knows it; " + ("it is due" if is_producer else f"{events} left")
        yield Item(
            kind="unheard",
            why=f"{why}; start a worker whose code has it, deploy code without it under a higher version, or pause it",
            since=row.next_run_at if is_producer else row.oldest_at,
            commands=(*(() if is_producer else look), commands.pause(row.workflow)),
            **of,
        )


def _breakers(tx: Transaction) -> Iterator[Item]:
    for row in ledger.breakers(tx):
        probes = "one is let through now and then" if row.probe_at is not None else "opened by hand, no probes"
        yield Item(
            kind="breaker",
            workflow="",
            subject=f"operation {row.connector}.{row.operation}",
            why=f"no new mutation is started: {row.reason} ({probes})",
            since=row.opened_at,
            commands=("pipeline breakers", commands.close_breaker(row.connector, row.operation)),
        )


def _broken(tx: Transaction, recent: int) -> Iterator[Item]:
    for finding in invariants.findings(tx, recent=recent):
        if finding.severity is Severity.BROKEN and finding.invariant not in _SAID_ALREADY:
            yield Item(
                kind="broken",
                workflow="",
                subject=finding.subject,
                why=f"{finding.detail}; {finding.sentence} {finding.advice}",
                since=None,
                commands=("pipeline doctor --json",),
            )


def _since(tx: Transaction, event_id: int) -> datetime | None:
    return next((row.created_at for row in listings.events_by_id(tx, [event_id])), None)
