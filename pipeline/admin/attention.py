"""Everything that waits for a person, oldest first, each with the exact commands to type.

Console, command line and alerts read the same list. What the system mends by itself is not in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from pipeline.admin import advice
from pipeline.admin.resolutions import MutationFilter, MutationSummary, Resolutions
from pipeline.domain.errors import quantity
from pipeline.domain.workflows import CLEARED_BY_RESUME, HandlerKind
from pipeline.store.database import Transaction
from pipeline.store.reads import invariants, ledger, listings
from pipeline.store.reads.invariants import Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionItem:
    """Something that stands still until a person acts."""

    #: indeterminate, approval, late_effect, blocked, maintenance, quarantined, breaker, retired,
    #: unclaimed, dead_letter, broken_invariant
    kind: str
    workflow: str  #: empty when it is about no single one
    subject: str  #: the mutation, run, handler or operation
    reason: str
    since: datetime | None  #: of events that were set aside: when the oldest was published
    commands: tuple[str, ...]


def items(
    resolutions: Resolutions, *, workflow: str | None = None, limit: int = 100, recent: int = 10_000
) -> list[AttentionItem]:
    """What waits, oldest first, at most ``limit`` of each kind. Findings have no instant and come first."""
    questions = [
        _indeterminate(each)
        for each in resolutions.unresolved_mutations(MutationFilter(workflow=workflow), limit=limit)
    ]
    approvals = [_approval(each) for each in resolutions.pending_approvals(workflow, limit=limit)]
    with resolutions.db.transaction() as tx:
        others = [
            *_late_effects(tx, limit),
            *_blocks(tx, limit),
            *_maintenance(tx),
            *_handlers(tx),
            *_breakers(tx),
            *_broken_invariants(tx, recent),
        ]
    kept = [item for item in others if workflow is None or item.workflow in (workflow, "")]
    # stable: what has no instant is a broken promise, and nothing is more urgent
    return sorted(
        [*questions, *approvals, *kept],
        key=lambda item: (item.since is not None, item.since.timestamp() if item.since else 0.0),
    )


def dead_letters(count: int) -> AttentionItem:
    """Messages in the queue that a worker moves them to; only the broker knows how many, and not since when."""
    return AttentionItem(
        kind="dead_letter",
        workflow="",
        subject="queue pipeline.refused",
        reason=f"{quantity(count, 'message')} that no worker could publish or read; send them back or drop them",
        since=None,
        commands=("pipeline dead-letters list", "pipeline dead-letters send-back --all --yes"),
    )


def _indeterminate(question: MutationSummary) -> AttentionItem:
    return AttentionItem(
        kind="indeterminate",
        workflow=question.workflow,
        subject=f"mutation {question.id}",
        reason=_mutation_reason(question, "nobody knows whether it happened"),
        since=question.since,
        commands=(
            advice.show_mutation_command(question.id),
            *advice.resolve_commands(question.id, can_try_again=question.can_try_again),
        ),
    )


def _approval(question: MutationSummary) -> AttentionItem:
    return AttentionItem(
        kind="approval",
        workflow=question.workflow,
        subject=f"mutation {question.id}",
        reason=_mutation_reason(question, "waits to be allowed"),
        since=question.since,
        commands=(advice.show_mutation_command(question.id), *advice.approval_commands(question.id)),
    )


def _mutation_reason(question: MutationSummary, otherwise: str) -> str:
    operation = f"{question.connector}.{question.operation}"
    named = operation if question.title == operation else f"{operation}: {question.title}"
    return f"{named}: {question.error or otherwise}"


def _late_effects(tx: Transaction, limit: int) -> Iterator[AttentionItem]:
    for row in listings.late_effects(tx, limit=limit):
        yield AttentionItem(
            kind="late_effect",
            workflow=row.workflow,
            subject=f"mutation {row.id}",
            reason=f"{row.connector}.{row.operation} seems to have happened after all; it was settled as failed by "
            f"{row.resolved_by}" + (f": {row.advice}" if row.advice else ""),
            since=row.found_late_at,
            commands=(advice.show_mutation_command(row.id), advice.acknowledge_command(row.id)),
        )


def _blocks(tx: Transaction, limit: int) -> Iterator[AttentionItem]:
    """An unknown outcome that holds a workflow back is there as a question, and lifts with its answer."""
    for row in listings.blocks(tx, limit=limit):
        if row.kind in CLEARED_BY_RESUME:
            yield AttentionItem(
                kind="blocked",
                workflow=row.workflow,
                subject=f"run {row.run_id}",
                reason=f"{row.kind}: {row.reason}",
                since=row.since,
                commands=(advice.show_run_command(row.run_id), advice.resume_command(row.workflow)),
            )


def _maintenance(tx: Transaction) -> Iterator[AttentionItem]:
    for row in listings.workflows(tx):
        if row.maintenance:
            yield AttentionItem(
                kind="maintenance",
                workflow=row.name,
                subject=f"workflow {row.name}",
                reason=f"{row.maintenance_reason}; deploy mended code, or set right what is wrong and end it by hand",
                since=row.maintenance_since,
                commands=(advice.exit_maintenance_command(row.name),),
            )


def _handlers(tx: Transaction) -> Iterator[AttentionItem]:
    for row in listings.handlers(tx):
        subject = f"handler {row.name}"
        if row.quarantined:
            yield AttentionItem(
                kind="quarantined",
                workflow=row.workflow,
                subject=subject,
                reason=f"{quantity(row.quarantined, 'event')} set aside, the oldest is event {row.quarantined_id}",
                since=_published_at(tx, row.quarantined_id),
                commands=tuple(
                    advice.quarantine_command(verb, row.workflow, row.name) for verb in ("list", "release", "skip")
                ),
            )
        yield from _unserved_handler(row)


def _unserved_handler(row: Row[Any]) -> Iterator[AttentionItem]:
    """A handler with work left that is gone from the code, or that no running worker has the code of."""
    left = row.waiting + row.reserved
    events = quantity(left, "event") if left else quantity(row.stopped, "run")
    look = tuple(advice.quarantine_command(verb, row.workflow, row.name, waiting=True) for verb in ("list", "skip"))
    of = {"workflow": row.workflow, "subject": f"handler {row.name}"}
    if row.retired and (left or row.stopped):
        why = f"it is gone from the code with {events} left; bring it back under its old name until they are done, or "
        yield AttentionItem(
            kind="retired", reason=f"{why}skip them", since=row.oldest_at or row.stopped_at, commands=look, **of
        )
    is_producer = row.kind == HandlerKind.PRODUCER
    if row.is_unclaimed and (left or is_producer):
        why = "no running worker knows it; " + ("it is due" if is_producer else f"{events} left")
        yield AttentionItem(
            kind="unclaimed",
            reason=(
                f"{why}; start a worker whose code has it, deploy code without it under a higher version, or pause it"
            ),
            since=row.next_run_at if is_producer else row.oldest_at,
            commands=(*(() if is_producer else look), advice.pause_command(row.workflow)),
            **of,
        )


def _breakers(tx: Transaction) -> Iterator[AttentionItem]:
    for row in ledger.open_breakers(tx):
        probes = "one is let through now and then" if row.probe_at is not None else "opened by hand, no probes"
        yield AttentionItem(
            kind="breaker",
            workflow="",
            subject=f"operation {row.connector}.{row.operation}",
            reason=f"no new mutation is started: {row.reason} ({probes})",
            since=row.opened_at,
            commands=("pipeline breakers", advice.close_breaker_command(row.connector, row.operation)),
        )


def _broken_invariants(tx: Transaction, recent: int) -> Iterator[AttentionItem]:
    for finding in invariants.findings(tx, recent=recent):
        if finding.severity is Severity.BROKEN and finding.invariant != invariants.LATE_EFFECTS:
            yield AttentionItem(
                kind="broken_invariant",
                workflow="",
                subject=finding.subject,
                reason=f"{finding.detail}; {finding.sentence} {finding.advice}",
                since=None,
                commands=("pipeline doctor --json",),
            )


def _published_at(tx: Transaction, event_id: int) -> datetime | None:
    return next((row.created_at for row in listings.events_by_id(tx, [event_id])), None)
