"""List everything that waits for an operator, oldest first, each with the commands to type.

Command line, live view and notices use the same list. Problems that the system solves by itself are not in it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from pipeline.admin import advice
from pipeline.admin.incidents import Incident, open_incidents
from pipeline.admin.resolutions import MutationFilter, MutationSummary, Resolutions, resolve_commands
from pipeline.domain.errors import quantity
from pipeline.domain.mutation_state import state_token
from pipeline.domain.workflows import CLEARED_BY_RESUME, HandlerKind
from pipeline.store.database import Transaction
from pipeline.store.reads import durability, installation, invariants, ledger, listings
from pipeline.store.reads.invariants import Severity
from pipeline.store.rows import ListedHandlerRow


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionItem:
    """Something that does not continue until an operator acts."""

    #: indeterminate, approval, late_effect, blocked, maintenance, quarantined, breaker, retired,
    #: unclaimed, dead_letter, broken_invariant
    kind: str
    headline: str  #: what is asked about, for a person
    workflow: str  #: empty when it concerns no single workflow
    subject: str  #: the mutation, run, handler or operation
    reason: str
    since: datetime | None  #: of quarantined events: when the oldest was published
    commands: tuple[str, ...]
    state: str | None = None  #: of the mutation that it is about, for --if-state
    mutation_id: UUID | None = None
    incident: str | None = None  #: the id of the incident that it belongs to
    id: str = field(init=False)  #: stays the same as long as the item waits

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", ":".join(part for part in (self.kind, self.workflow, self.subject) if part))


def items(
    resolutions: Resolutions, *, workflow: str | None = None, limit: int = 100, recent: int | None = 10_000
) -> list[AttentionItem]:
    """List the items, oldest first, at most ``limit`` of each kind. Broken invariants, without instant, come first.

    Invariants are checked for the newest ``recent`` runs. None: the last run of the doctor is read instead, which
    takes no time.
    """
    of_mutations = incident_ids(open_incidents(resolutions, workflow=workflow))
    indeterminate = [
        _indeterminate(each, of_mutations.get(each.id))
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
            *(_broken_invariants(tx, recent) if recent is not None else _reported_invariants(tx)),
        ]
    kept = [item for item in others if workflow is None or item.workflow in (workflow, "")]
    return sorted(
        [*indeterminate, *approvals, *kept],
        key=lambda item: (item.since is not None, item.since.timestamp() if item.since else 0.0),
    )


def incident_ids(incidents: Iterable[Incident]) -> dict[UUID, str]:
    """Return the incident of each mutation that belongs to one."""
    return {mutation_id: incident.id for incident in incidents for mutation_id in incident.mutation_ids}


def dead_letters(count: int) -> AttentionItem:
    """Describe the messages in the dead-letter queue; the broker knows how many, and not since when."""
    return AttentionItem(
        kind="dead_letter",
        headline=f"{quantity(count, 'message')} refused",
        workflow="",
        subject="queue pipeline.dead_letters",
        reason=f"{quantity(count, 'message')} that no worker could publish or read; send them back or drop them",
        since=None,
        commands=("pipeline dead-letters list", "pipeline dead-letters send-back --all --yes"),
    )


def _indeterminate(mutation: MutationSummary, incident: str | None) -> AttentionItem:
    return AttentionItem(
        kind="indeterminate",
        headline=mutation.headline,
        mutation_id=mutation.id,
        incident=incident,
        workflow=mutation.workflow,
        subject=f"mutation {mutation.id}",
        reason=_mutation_reason(mutation, "its outcome is unknown"),
        since=mutation.since,
        commands=(advice.show_mutation_command(mutation.id), *resolve_commands(mutation)),
        state=mutation.state,
    )


def _approval(mutation: MutationSummary) -> AttentionItem:
    return AttentionItem(
        kind="approval",
        headline=mutation.headline,
        mutation_id=mutation.id,
        workflow=mutation.workflow,
        subject=f"mutation {mutation.id}",
        reason=_mutation_reason(mutation, "waits for approval"),
        since=mutation.since,
        commands=(advice.show_mutation_command(mutation.id), *advice.approval_commands(mutation.id, mutation.state)),
        state=mutation.state,
    )


def _mutation_reason(mutation: MutationSummary, default: str) -> str:
    return f"{mutation.connector}.{mutation.operation}: {mutation.error or default}"


def _late_effects(tx: Transaction, limit: int) -> Iterator[AttentionItem]:
    for row in listings.late_effects(tx, limit=limit):
        state = state_token(row)
        yield AttentionItem(
            kind="late_effect",
            headline=row.headline or f"{row.connector}.{row.operation}",
            mutation_id=row.id,
            workflow=row.workflow,
            subject=f"mutation {row.id}",
            reason=f"{row.connector}.{row.operation} seems to have happened after all; it was resolved as failed by "
            f"{row.resolved_by}" + (f": {row.advice}" if row.advice else ""),
            since=row.found_late_at,
            commands=(advice.show_mutation_command(row.id), advice.acknowledge_command(row.id, state)),
            state=state,
        )


def _blocks(tx: Transaction, limit: int) -> Iterator[AttentionItem]:
    """Yield blocks that an operator lifts. Blocks by unknown outcomes are listed as mutations and end with those."""
    for row in listings.blocks(tx, limit=limit):
        if row.kind in CLEARED_BY_RESUME:
            yield AttentionItem(
                kind="blocked",
                headline=f"{row.workflow} starts no runs",
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
                headline=f"{row.name} is in maintenance",
                workflow=row.name,
                subject=f"workflow {row.name}",
                reason=f"{row.maintenance_reason}; deploy fixed code, or fix the cause and end maintenance by hand",
                since=row.maintenance_since,
                commands=(advice.exit_maintenance_command(row.name),),
            )


def _handlers(tx: Transaction) -> Iterator[AttentionItem]:
    for row in listings.handlers(tx):
        subject = f"handler {row.name}"
        if row.quarantined_id is not None:
            yield AttentionItem(
                kind="quarantined",
                headline=f"{quantity(row.quarantined, 'event')} of {row.name} quarantined",
                workflow=row.workflow,
                subject=subject,
                reason=f"{quantity(row.quarantined, 'event')} quarantined, the oldest is event {row.quarantined_id}",
                since=_published_at(tx, row.quarantined_id),
                commands=tuple(
                    advice.quarantine_command(verb, row.workflow, row.name) for verb in ("list", "release", "skip")
                ),
            )
        yield from _unserved_handler(row)


def _unserved_handler(row: ListedHandlerRow) -> Iterator[AttentionItem]:
    """Yield a handler with work left that is retired, or that no running worker knows."""
    left = row.waiting + row.reserved
    events = quantity(left, "event") if left else quantity(row.stopped, "run")
    events_commands = tuple(
        advice.quarantine_command(verb, row.workflow, row.name, waiting=True) for verb in ("list", "skip")
    )
    subject = f"handler {row.name}"
    if row.retired and (left or row.stopped):
        yield AttentionItem(
            kind="retired",
            headline=f"{row.name} is no longer in the code, with {events} left",
            reason=f"it is no longer in the code, with {events} left; restore it under its old name until they are "
            "done, or skip them",
            since=row.oldest_at or row.stopped_at,
            commands=events_commands,
            workflow=row.workflow,
            subject=subject,
        )
    is_producer = row.kind == HandlerKind.PRODUCER
    if row.is_unclaimed and (left or is_producer):
        why = "no running worker knows it; " + ("it is due" if is_producer else f"{events} left")
        yield AttentionItem(
            kind="unclaimed",
            headline=f"No running worker knows {row.name}",
            reason=(
                f"{why}; start a worker whose code has it, deploy code without it under a higher version, or pause it"
            ),
            since=row.next_run_at if is_producer else row.oldest_at,
            commands=(*(() if is_producer else events_commands), advice.pause_command(row.workflow)),
            workflow=row.workflow,
            subject=subject,
        )


def _breakers(tx: Transaction) -> Iterator[AttentionItem]:
    for row in ledger.open_breakers(tx):
        probes = "probes are let through" if row.probe_at is not None else "opened by hand, no probes"
        yield AttentionItem(
            kind="breaker",
            headline=f"{row.connector}.{row.operation} starts no new mutation",
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
                headline=finding.sentence,
                workflow="",
                subject=finding.subject,
                reason=f"{finding.detail}; {finding.sentence} {finding.advice}",
                since=None,
                commands=("pipeline doctor --json",),
            )


def _reported_invariants(tx: Transaction) -> Iterator[AttentionItem]:
    """Yield the invariants that were broken when the doctor ran last."""
    run = installation.sweep_runs(tx).get("doctor")
    broken = invariants.broken_counts((run.report if run is not None else None) or {})
    texts = {each.name: (each.sentence, each.advice) for each in invariants.INVARIANTS}
    texts[durability.NAME] = (durability.SENTENCE, durability.ADVICE)
    for name, count in broken.items():
        sentence, advice = texts.get(name, (name, ""))
        yield AttentionItem(
            kind="broken_invariant",
            headline=sentence,
            workflow="",
            subject=f"invariant {name}",
            reason=f"{quantity(count, 'finding')} of the doctor; {sentence} {advice}".strip(),
            since=None,
            commands=("pipeline doctor --json",),
        )


def _published_at(tx: Transaction, event_id: int) -> datetime | None:
    return next((row.created_at for row in listings.events_by_id(tx, [event_id])), None)
