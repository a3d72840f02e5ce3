"""List the mutations that only an operator can resolve, and resolve them.

Command line and Python use the same calls. Every resolution is one guarded transition in its own transaction, with
actor and reason in the audit. A mutation that is no longer in the state that was shown is refused, and nothing is
changed. Many mutations are previewed first, by a filter or an ``ImportPreview``. A mutation of a high value waits for a
second person.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

from pipeline.admin import advice, given_results
from pipeline.admin.given_results import GivenResult, Operations
from pipeline.admin.operations import RegisteredOperation, operations_by_name
from pipeline.domain.acts import ProposedAct, state_changes, state_token
from pipeline.domain.codec import is_sealed, opened
from pipeline.domain.errors import (
    InvalidInputError,
    NotFoundError,
    PipelineError,
    SecondApprovalError,
    StateChangedError,
)
from pipeline.domain.operations import DeclaredResult, Grade
from pipeline.domain.redaction import BY_NAME
from pipeline.domain.states import MutationId, MutationStatus
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import access, ledger, listings, work
from pipeline.store.rows import UnresolvedMutationRow
from pipeline.store.schema import MutationRow, ProposalRow
from pipeline.telemetry import spans
from pipeline.transitions import resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An answer that another person confirms by giving the same answer."""

    id: UUID
    mutation_id: UUID
    act: str  #: happened, did_not_happen or approve
    state: str  #: of the mutation; the proposal ends when the mutation changes
    proposed_by: str
    proposed_at: datetime
    reason: str


def open_proposal(db: Database, mutation_id: UUID) -> Proposal | None:
    """Return the proposal that waits for a second person in the present state of a mutation."""
    with db.transaction() as tx:
        row, rows = access.open_proposal(tx, mutation_id), work.mutations(tx, [mutation_id])
    if row is None or not rows or state_token(rows[0]) != row.state:
        return None
    return proposal(row)


def proposal(row: ProposalRow) -> Proposal:
    """Convert a row of a proposal."""
    return Proposal(
        id=row.id,
        mutation_id=row.mutation_id,
        act=row.act,
        state=row.state,
        proposed_by=row.proposed_by,
        proposed_at=row.proposed_at,
        reason=row.reason,
    )


KEY = "idempotency_key"

_PAGE_SIZE = 10_000  #: rows of the ledger read in one transaction
_AFTER_ALL_IDS = UUID(int=2**128 - 1)
PROPOSED_TEXT = "Its value needs two people: it was proposed, and another person must give the same answer."
UNREGISTERED = "(no worker has registered its operation)"  #: shown instead of a parameter


class ResolutionKind(StrEnum):
    """How an operator resolves an indeterminate mutation."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    SKIP = "skip"  #: continue without it, whatever happened
    TRY_AGAIN = "try_again"  #: reconcile again, with a new budget


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationSummary:
    """A mutation as an operator sees it, redacted by what a worker registered about its operation."""

    headline: str  #: one line that says what it does
    id: UUID
    state: str  #: token of the state that is shown here; an act with it is refused once the mutation has changed
    workflow: str
    handler: str
    run_id: UUID
    status: str
    grade: str  #: what its operation offers after an unknown outcome, as the request was sent
    connector: str
    operation: str
    params: dict[str, Any]
    idempotency_key: str
    request_hash: str
    error: str | None
    error_class: str  #: of the error that left its outcome unknown; empty: there was none
    since: datetime
    attempts: int
    reconcile_attempts: int
    quiet_until: datetime | None  #: before this instant "did not happen" is refused: the request may still arrive
    can_try_again: bool
    message_ids: tuple[str, ...]  #: of its inputs, the first ones
    message_count: int
    look_up: str  #: the link to its effect in the outside system; empty: its operation declares none
    four_eyes_value: Decimal | None  #: two people must decide about it, because of this value
    declared_result: DeclaredResult | None  #: null: no worker has registered its operation
    after_did_not_happen: str  #: what follows that resolution; empty once it is resolved
    after_refusal: str  #: the same, if the outside system itself refused the request


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationFilter:
    """Select mutations. Empty fields do not restrict."""

    workflow: str | None = None
    connector: str | None = None
    operation: str | None = None
    older_than: timedelta | None = None
    statuses: tuple[MutationStatus, ...] = (MutationStatus.INDETERMINATE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """How one mutation is to be resolved."""

    mutation: MutationSummary
    kind: ResolutionKind
    result: GivenResult | None = None
    evidence: Mapping[str, Any] | None = None  #: kept in the audit


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchCandidate:
    """An unresolved mutation, and the value that identifies it in a provider's export."""

    value: str
    mutation: MutationSummary
    is_shared: bool = False  #: another mutation that may have happened has the same value, or may have it
    is_partial: bool = False  #: the ledger has older rows that were not searched


@dataclass(slots=True, kw_only=True)
class ResolveResult:
    """The mutations that were resolved, and why others were refused."""

    updated: list[UUID] = field(default_factory=list)
    refused: dict[UUID, str] = field(default_factory=dict)


class Resolutions:
    """Read and resolve the mutations of one database.

    ``operations`` is the loaded code of connectors, which only fetching a result by an external id needs.
    ``wake_workflow`` is called for workflows that may continue, ``dispatch_run`` for runs whose request was approved.
    """

    def __init__(
        self,
        db: Database,
        operations: Operations | None = None,
        wake_workflow: Callable[[str], object] = lambda _: None,
        dispatch_run: Callable[[UUID], object] = lambda _: None,
    ) -> None:
        self.db, self.operations = db, operations
        self.wake_workflow, self.dispatch_run = wake_workflow, dispatch_run

    def unresolved_mutations(self, only: MutationFilter | None = None, *, limit: int = 100) -> list[MutationSummary]:
        """List the mutations that wait for a resolution, oldest first."""
        with self.db.transaction() as tx:
            return _summaries(tx, _rows(tx, only or MutationFilter(), limit))

    def resolved_mutations(
        self, only: MutationFilter, *, limit: int = 100, recent: int = 10_000
    ) -> list[MutationSummary]:
        """List resolved mutations, newest first, among the newest ``recent`` rows of the ledger."""
        with self.db.transaction() as tx:
            ids = [
                mutation_id
                for status in only.statuses
                for mutation_id in listings.recent_mutations(
                    tx, status=status, workflow=only.workflow, recent=recent, limit=limit
                )
            ]
            rows = ledger.mutations_by_status(tx, statuses=only.statuses, ids=ids, limit=limit)
            return _summaries(tx, list(reversed(rows)))

    def match_candidates(
        self, match_by: str, only: MutationFilter | None = None, *, limit: int = 10_000, recent: int = 1_000_000
    ) -> list[MatchCandidate]:
        """List unresolved mutations with the value that an export has: ``idempotency_key`` or ``params.<name>``.

        Another mutation may have the same parameter, and its row would resolve the wrong one. Such mutations are
        searched in the newest ``recent`` rows of the ledger. If there are more rows, every candidate counts as shared.
        """
        name = match_by.removeprefix("params.")
        if match_by != KEY and (name == match_by or not name):
            raise InvalidInputError(
                f"Mutations cannot be matched by {match_by!r}; expected {KEY!r} or 'params.<name>'."
            )
        given = only or MutationFilter()
        with self.db.transaction() as tx:
            listed = _rows(tx, given, limit)
            summaries = {summary.id: summary for summary in _summaries(tx, listed)}
        rows = [(row, value) for row in listed if (value := _match_value(row, match_by, name)) is not None]
        shared = {value for value, count in Counter(value for _, value in rows).items() if count > 1}
        is_beyond = False
        if rows and match_by != KEY:
            others, is_beyond = self._shared_values(
                name, given.connector, {row.id: value for row, value in rows}, recent
            )
            shared |= others
        return [
            MatchCandidate(
                value=value,
                mutation=summaries[row.id],
                is_shared=is_beyond or value in shared,
                is_partial=is_beyond,
            )
            for row, value in rows
        ]

    def pending_approvals(self, workflow: str | None = None, *, limit: int = 100) -> list[MutationSummary]:
        """List requests that wait for approval, oldest first."""
        with self.db.transaction() as tx:
            ids = listings.pending_approvals(tx, workflow, limit=limit)
            rows = ledger.mutations_by_status(tx, statuses=(MutationStatus.PENDING,), ids=ids, limit=limit)
            return _summaries(tx, rows)

    def mutation(self, mutation_id: UUID) -> MutationSummary:
        """Return one mutation of any status."""
        with self.db.transaction() as tx:
            rows = ledger.mutations_by_status(tx, statuses=tuple(MutationStatus), ids=[mutation_id], limit=1)
            found = _summaries(tx, rows)
        if not found:
            raise NotFoundError("mutation", mutation_id, hint="`pipeline mutations` lists those that wait.")
        return found[0]

    def mutations_by_id(self, ids: Sequence[UUID]) -> list[MutationSummary]:
        """Return the mutations with these ids, of any status. Ids without a mutation are left out."""
        with self.db.transaction() as tx:
            rows = ledger.mutations_by_status(tx, statuses=tuple(MutationStatus), ids=list(ids), limit=len(ids))
            return _summaries(tx, rows)

    def resolve(
        self,
        mutation_id: UUID,
        kind: ResolutionKind,
        by: Actor,
        *,
        result: GivenResult | None = None,
        is_refused: bool = False,
        state: str | None = None,
    ) -> Proposal | None:
        """Resolve one mutation. Refused while its request may still arrive, and when its state changed.

        A mutation of a high value needs two people: the first answer is only proposed, and the proposal is returned.
        ``is_refused``: with did_not_happen, the outside system itself refused the request; a repeat gets a new key.
        ``state`` is the token of the state that the operator saw; by default the state at the begin of this call.
        """
        _check(kind, by, result)
        if is_refused and kind is not ResolutionKind.DID_NOT_HAPPEN:
            raise InvalidInputError(f"A refusal was given with {kind}; expected it with did_not_happen only.")
        row, operation = self._row(mutation_id)
        if state is not None and (changes := state_changes(state, row)):  # before anything is fetched for it
            raise StateChangedError(mutation_id, verb=f"resolve as {kind}", changes=changes)
        who, value = self._stated_result(row, operation, by, result)
        shown = state_token(row) if state is None else state
        try:
            with self._traced_transaction(mutation_id, kind, who) as tx:
                if is_refused:
                    resolution.did_not_happen(tx, MutationId(mutation_id), who, is_refused=True, state=shown)
                else:
                    self._resolve(tx, MutationId(mutation_id), kind, who, value, shown)
        except SecondApprovalError as error:
            answer = {"result": value} if kind is ResolutionKind.HAPPENED else {"is_refused": is_refused}
            return self._propose(error, answer, who, shown)
        self.wake_workflow(row.workflow)
        return None

    def fetch_result(self, mutation_id: UUID, external_id: str) -> Any:
        """Return the result that the outside system has under an id, checked. Nothing is recorded."""
        row, operation = self._row(mutation_id)
        return given_results.checked_result(self.operations, row, operation, GivenResult(external_id=external_id))

    def approve(self, mutation: MutationSummary, by: Actor, *, state: str | None = None) -> Proposal | None:
        """Approve exactly this request in the state that was shown; a changed request is not sent.

        A request of a high value needs two people: the first approval is only proposed, and the proposal is returned.
        """
        shown = mutation.state if state is None else state
        try:
            with self._traced_transaction(mutation.id, "approve", by) as tx:
                resolution.approve(tx, MutationId(mutation.id), by, request_hash=mutation.request_hash, state=shown)
        except SecondApprovalError as error:
            return self._propose(error, {"request_hash": mutation.request_hash}, by, shown)
        self.dispatch_run(mutation.run_id)
        return None

    def reject(self, mutation_id: UUID, by: Actor, *, state: str | None = None) -> None:
        """Reject a request: it is never sent, and its events are skipped."""
        with self._traced_transaction(mutation_id, "reject", by) as tx:
            row = resolution.reject(tx, MutationId(mutation_id), by, state=state)
        self.wake_workflow(row.workflow)

    def acknowledge(self, mutation_id: UUID, by: Actor, *, state: str | None = None) -> None:
        """Record that an operator dealt with a late effect; it is no longer reported."""
        with self.db.transaction() as tx:
            resolution.acknowledge(tx, MutationId(mutation_id), by, state=state)

    def resolve_many(self, resolutions: Iterable[Resolution], by: Actor) -> ResolveResult:
        """Resolve each mutation in its own transaction: a refused one does not affect the others."""
        done = ResolveResult()
        workflows: set[str] = set()
        for item in resolutions:
            try:
                _check(item.kind, by, item.result)
                who = replace(by, evidence={**(by.evidence or {}), **item.evidence}) if item.evidence else by
                who, value = self._stated_result(*self._row(item.mutation.id), who, item.result)
                with self._traced_transaction(item.mutation.id, item.kind, who) as tx:
                    self._resolve(tx, MutationId(item.mutation.id), item.kind, who, value, item.mutation.state)
            except SecondApprovalError as error:
                answer = {"result": value} if item.kind is ResolutionKind.HAPPENED else {"is_refused": False}
                self._propose(error, answer, who, item.mutation.state)
                done.refused[item.mutation.id] = PROPOSED_TEXT
                continue
            except PipelineError as error:
                done.refused[item.mutation.id] = str(error)
                continue
            done.updated.append(item.mutation.id)
            workflows.add(item.mutation.workflow)
        for workflow in sorted(workflows):
            self.wake_workflow(workflow)
        return done

    def problems(self, resolutions: Iterable[Resolution], by: Actor) -> dict[UUID, str]:
        """Return why resolutions would be refused for their results. Nothing is fetched or changed."""
        found: dict[UUID, str] = {}
        for item in resolutions:
            try:
                _check(item.kind, by, item.result)
                if item.result is not None and item.result.external_id is None:
                    given_results.checked_result(self.operations, *self._row(item.mutation.id), item.result)
            except PipelineError as error:
                found[item.mutation.id] = str(error)
        return found

    def _propose(self, needed: SecondApprovalError, answer: Mapping[str, Any], by: Actor, state: str) -> Proposal:
        """Keep an answer that another person must confirm."""
        with self.db.transaction() as tx:
            mutation_id, act = MutationId(needed.mutation_id), ProposedAct(needed.act)
            return proposal(resolution.propose(tx, mutation_id, act, answer, by, state=state))

    def _stated_result(
        self, row: MutationRow, operation: RegisteredOperation | None, by: Actor, given: GivenResult | None
    ) -> tuple[Actor, Any]:
        """Return the result to record, and the actor with the evidence of where it is from."""
        if given is None:
            return by, None
        value = given_results.checked_result(self.operations, row, operation, given)
        evidence = {"result": value}
        if given.external_id is not None:
            evidence["external_id"] = given.external_id
        if given.is_unchecked:
            evidence["unchecked"] = True
        return replace(by, evidence={**(by.evidence or {}), **evidence}), value

    def _row(self, mutation_id: UUID) -> tuple[MutationRow, RegisteredOperation | None]:
        with self.db.transaction() as tx:
            rows = work.mutations(tx, [mutation_id])
            operations = operations_by_name(tx, [(row.connector, row.operation) for row in rows])
        if not rows:
            raise NotFoundError("mutation", mutation_id, hint="Nothing was changed.")
        return rows[0], operations.get((rows[0].connector, rows[0].operation))

    @contextmanager
    def _traced_transaction(self, mutation_id: UUID, act: str, by: Actor) -> Iterator[Transaction]:
        """Open a transaction for one act of an operator. With tracing on, add a span to the run's trace."""
        with ExitStack() as last:
            if spans.is_on():
                with self.db.transaction() as tx:
                    rows = work.mutations(tx, [mutation_id])
                about = {spans.ACTOR: by.name, spans.RESOLUTION: str(act)}
                for row in rows:
                    last.enter_context(spans.resolution_span(spans.RESOLVE, row, about))
            yield last.enter_context(self.db.transaction())

    def _shared_values(
        self, name: str, connector: str | None, asked: Mapping[UUID, str], recent: int
    ) -> tuple[set[str], bool]:
        """Return the values of other mutations that may have happened, and whether the ledger has more rows.

        Mutations of all workflows and operations count: a provider's export does not know these.
        """
        values, found = set(asked.values()), set[str]()
        below, left = _AFTER_ALL_IDS, recent + 1
        while left:
            limit = min(left, _PAGE_SIZE)
            with self.db.transaction() as tx:
                page = ledger.parameter_values(tx, name, connector=connector, below=below, limit=limit)
            others = [row for row in page if row.id not in asked]
            if any(is_sealed(row.params) for row in others):  # of a key that is not here: any of them may be meant
                return found, True
            known = (row.value if row.params is None else row.params.get(name) for row in others)
            found |= values & {_normalize(value) for value in known if value is not None}
            if len(page) < limit:
                return found, False
            below, left = page[-1].id, left - limit
        return found, True

    def _resolve(
        self, tx: Transaction, mutation_id: MutationId, kind: ResolutionKind, by: Actor, result: Any, state: str
    ) -> MutationRow:
        match kind:
            case ResolutionKind.HAPPENED:
                return resolution.happened(tx, mutation_id, by, result, state=state)
            case ResolutionKind.DID_NOT_HAPPEN:
                return resolution.did_not_happen(tx, mutation_id, by, state=state)
            case ResolutionKind.SKIP:
                return resolution.skip(tx, mutation_id, by, state=state)
            case ResolutionKind.TRY_AGAIN:
                names = [(row.connector, row.operation) for row in work.mutations(tx, [mutation_id])]
                can_reconcile = any(each.can_reconcile for each in operations_by_name(tx, names).values())
                return resolution.try_again(tx, mutation_id, by, can_reconcile=can_reconcile, state=state)


def _rows(tx: Transaction, only: MutationFilter, limit: int) -> Sequence[UnresolvedMutationRow]:
    return ledger.mutations_by_status(
        tx,
        statuses=only.statuses,
        limit=limit,
        workflow=only.workflow,
        connector=only.connector,
        operation=only.operation,
        older_than=only.older_than,
    )


def _summaries(tx: Transaction, rows: Sequence[UnresolvedMutationRow]) -> list[MutationSummary]:
    operations = operations_by_name(tx, [(row.connector, row.operation) for row in rows])
    return [_summary(row, operations.get((row.connector, row.operation))) for row in rows]


def _summary(row: UnresolvedMutationRow, operation: RegisteredOperation | None) -> MutationSummary:
    params = row.params if isinstance(row.params, dict) else {}
    redaction = operation.redaction if operation else BY_NAME
    is_open = row.resolved_at is None
    can_reconcile = row.reconcilable or (operation is not None and operation.can_reconcile)
    return MutationSummary(
        headline=row.headline or f"{row.connector}.{row.operation}",
        id=row.id,
        state=state_token(row),
        grade=Grade.of(keyed=row.keyed, can_reconcile=row.reconcilable),
        workflow=row.workflow,
        handler=row.handler,
        run_id=row.run_id,
        status=row.status,
        connector=row.connector,
        operation=row.operation,
        params=redaction.value(params) if operation else dict.fromkeys(params, UNREGISTERED),
        idempotency_key=row.idempotency_key,
        request_hash=row.request_hash,
        error=row.error and redaction.text(row.error, params),
        error_class=row.error_type or "",
        since=row.doubted_at or row.created_at,
        attempts=row.attempts,
        reconcile_attempts=row.reconcile_attempts,
        quiet_until=row.quiet_until if row.is_quiet else None,
        can_try_again=row.status == MutationStatus.INDETERMINATE and can_reconcile,
        message_ids=tuple(row.message_ids),
        message_count=row.message_count,
        look_up=operation.look_up_link(row.idempotency_key, params) if operation else "",
        four_eyes_value=row.four_eyes_value,
        declared_result=operation.declared_result if operation else None,
        after_did_not_happen=f"{advice.release_text(row)} {advice.repeat_text(row)}" if is_open else "",
        after_refusal=f"{advice.release_text(row)} {advice.REFUSED_TEXT}" if is_open else "",
    )


def resolve_commands(mutation: MutationSummary) -> tuple[str, ...]:
    """Return the commands that resolve a mutation as it is shown."""
    return advice.resolve_commands(
        mutation.id, mutation.state, mutation.declared_result, can_try_again=mutation.can_try_again
    )


def _check(kind: ResolutionKind, by: Actor, result: GivenResult | None) -> None:
    if not by.reason:
        raise InvalidInputError(f"{by.name} gave no reason; expected one, for the audit.")
    if result is not None and kind is not ResolutionKind.HAPPENED:
        raise InvalidInputError(f"A result was given with {kind}; expected it with happened only.")
    if result is None and kind is ResolutionKind.HAPPENED:
        raise InvalidInputError(
            "It happened, and its result was not given; `next` needs it. Expected --result JSON, --external-id ID, "
            "or --no-result. Nothing was changed."
        )


def _match_value(row: UnresolvedMutationRow, to: str, name: str) -> str | None:
    value = row.idempotency_key if to == KEY else (opened(row.params) or {}).get(name)
    return None if value is None else _normalize(value)


def _normalize(value: Any) -> str:
    return str(value).strip()


def resolutions_for(
    mutations: Sequence[MutationSummary], kind: ResolutionKind, result: GivenResult | None = None
) -> list[Resolution]:
    """Build the same resolution for many mutations, to preview it before ``resolve_many``."""
    return [Resolution(mutation=mutation, kind=kind, result=result) for mutation in mutations]
