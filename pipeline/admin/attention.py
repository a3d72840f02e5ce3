"""List everything that waits for an operator, oldest first, each with the commands to type.

Command line, live view and notices use the same list. Problems that the system solves by itself are not in it.
Unknown outcomes that are alike are one incident. Operators keep filters of the list as views.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from pipeline.admin import advice
from pipeline.admin.operations import RegisteredOperation, operations_by_name
from pipeline.admin.resolutions import MutationFilter, MutationSummary, Resolutions, resolve_commands
from pipeline.domain.acts import state_token
from pipeline.domain.errors import NotFoundError, quantity
from pipeline.domain.incidents import incident_id, is_same_incident
from pipeline.domain.states import MutationStatus
from pipeline.domain.workflows import CLEARED_BY_RESUME, HandlerKind
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import access, attention, gauges, invariants, ledger, listings
from pipeline.store.reads.invariants import Severity
from pipeline.store.rows import IncidentRow, ListedHandlerRow
from pipeline.store.schema import SavedViewRow
from pipeline.transitions import access as transitions

MAX_QUESTIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Unknown outcomes of one operation with one class of error, close to each other in time."""

    id: str
    operation: str  #: as connector.operation
    error_class: str
    count: int
    first_at: datetime
    last_at: datetime
    workflows: tuple[str, ...]
    headlines: tuple[str, ...]  #: of its oldest mutations
    commands: tuple[str, ...]  #: that list it and resolve it


def open_incidents(
    resolutions: Resolutions, *, workflow: str | None = None, limit: int = MAX_QUESTIONS
) -> list[Incident]:
    """List incidents among the oldest ``limit`` unknown outcomes that wait for an operator, oldest first."""
    with resolutions.db.transaction() as tx:
        rows = ledger.incidents(tx, workflow=workflow, limit=limit)
        operations = operations_by_name(tx, sorted({(row.connector, row.operation) for row in rows}))
    by_name = {operation.name: operation for operation in operations.values()}
    return [_incident(row, by_name.get(_operation(row))) for row in rows]


def incident_mutations(resolutions: Resolutions, incident: str) -> list[MutationSummary]:
    """Return the unresolved mutations of an incident."""
    with resolutions.db.transaction() as tx:
        rows = ledger.incidents(tx, limit=MAX_QUESTIONS, with_ids=True)
    for row in rows:
        if is_same_incident(_id(row), incident):
            return resolutions.mutations_by_id(row.mutation_ids)
    raise NotFoundError(
        "open incident",
        incident,
        hint="It may have been resolved meanwhile. `pipeline attention` lists the open ones. Nothing was changed.",
    )


def _id(row: IncidentRow) -> str:
    return incident_id(_operation(row), row.error_class, row.first_at)


def _operation(row: IncidentRow | MutationSummary) -> str:
    return f"{row.connector}.{row.operation}"


def _incident(row: IncidentRow, operation: RegisteredOperation | None) -> Incident:
    return Incident(
        id=_id(row),
        operation=_operation(row),
        error_class=row.error_class,
        count=row.number,
        first_at=row.first_at,
        last_at=row.last_at,
        workflows=tuple(sorted(row.workflows)),
        headlines=tuple(filter(None, row.headlines)),
        commands=advice.incident_commands(
            _id(row),
            operation.declared_result if operation else None,
            can_try_again=operation is not None and operation.can_reconcile,
        ),
    )


#: What the statement about changes calls the items that it counts.
_KINDS = {
    "mutation": "indeterminate",
    "approval": "approval",
    "late_effect": "late_effect",
    "block": "blocked",
    "quarantine": "quarantined",
    "breaker": "breaker",
    "workflow": "maintenance",
}


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
    resolutions: Resolutions,
    *,
    workflow: str | None = None,
    limit: int = 100,
    recent: int | None = 10_000,
    incidents: Sequence[Incident] | None = None,
    mutations: Sequence[MutationSummary] | None = None,
) -> list[AttentionItem]:
    """List the items, oldest first, at most ``limit`` of each kind. Broken invariants, without instant, come first.

    Invariants are checked for the newest ``recent`` runs. None: the last run of the doctor is read instead, which
    takes no time. ``incidents`` and ``mutations``, unknown outcomes and approvals, are those that the
    caller has read already.
    """
    if incidents is None:
        incidents = open_incidents(resolutions, workflow=workflow)
    if mutations is None:
        unknown = resolutions.unresolved_mutations(MutationFilter(workflow=workflow), limit=limit)
        mutations = (*unknown, *resolutions.pending_approvals(workflow, limit=limit))
    alike: dict[tuple[str, str], list[Incident]] = {}
    for incident in incidents:
        alike.setdefault((incident.operation, incident.error_class), []).append(incident)
    of_mutations = [
        _indeterminate(each, alike.get((_operation(each), each.error_class), ()))
        if each.status == MutationStatus.INDETERMINATE
        else _approval(each)
        for each in mutations
    ]
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
        [*of_mutations, *kept],
        key=lambda item: (item.since is not None, item.since.timestamp() if item.since else 0.0),
    )


def counts(db: Database) -> Counter[tuple[str, str]]:
    """Count the items by kind and workflow, all of them. It costs as much as waits, and builds none of them."""
    with db.transaction() as tx:
        found = Counter({(_KINDS[row.kind], row.workflow): row.number for row in attention.waiting_counts(tx)})
        unserved = [item for row in listings.handlers(tx) for item in _unserved_handler(row)]
        found.update((item.kind, item.workflow) for item in (*unserved, *_reported_invariants(tx)))
    return found


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


def _indeterminate(mutation: MutationSummary, alike: Sequence[Incident]) -> AttentionItem:
    """Describe an unknown outcome. Of the alike incidents, it belongs to the one of its time."""
    return AttentionItem(
        kind="indeterminate",
        headline=mutation.headline,
        mutation_id=mutation.id,
        incident=next((each.id for each in alike if each.first_at <= mutation.since <= each.last_at), None),
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
    run = gauges.sweep_runs(tx).get("doctor")
    broken = invariants.broken_counts((run.report if run is not None else None) or {})
    texts = {each.name: (each.sentence, each.advice) for each in invariants.INVARIANTS}
    texts[invariants.NAME] = (invariants.SENTENCE, invariants.ADVICE)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedView:
    """A page with its filter, under a name."""

    name: str
    page: str
    query: str  #: the query string of the page
    saved_at: datetime


def list_views(db: Database, owner: str) -> list[SavedView]:
    """List the views of an operator, by name."""
    with db.transaction() as tx:
        return [_view(row) for row in access.saved_views(tx, owner)]


def save_view(db: Database, owner: str, name: str, *, page: str, query: str) -> SavedView:
    """Keep a view under a name. A view of the same name is replaced."""
    with db.transaction() as tx:
        return _view(transitions.save_view(tx, owner, name, page=page, query=query))


def delete_view(db: Database, owner: str, name: str) -> None:
    """Delete a view of an operator."""
    with db.transaction() as tx:
        transitions.delete_view(tx, owner, name)


def _view(row: SavedViewRow) -> SavedView:
    return SavedView(name=row.name, page=row.page, query=row.query, saved_at=row.saved_at)
