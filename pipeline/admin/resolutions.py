"""The desk: what only a person can settle, and the ways to settle it.

Console, command line and Python use the same calls. Every answer is one guarded verb in a transaction
of its own, with who and why in the audit; what moved on meanwhile is refused and nothing is changed.
Many at once are previewed first: an ``Import`` or a filter shows what it would do before it does it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Row

from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.ids import MutationId
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import ledger, listings, work
from pipeline.telemetry.tracing import spans
from pipeline.transitions import resolution

KEY = "idempotency_key"

_PAGE_SIZE = 10_000  #: rows of the ledger looked at in one transaction
_AFTER_ALL_IDS = UUID(int=2**128 - 1)


class ResolutionKind(StrEnum):
    """What a person says about a mutation nobody else can settle."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    SKIP = "skip"  #: go on without it, whatever happened
    TRY_AGAIN = "try_again"  #: ask the outside system again, with a fresh budget


class Operations(Protocol):
    """Where operations are found, to show requests as they may be shown."""

    def operation(self, connector: str, operation: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationSummary:
    """A mutation as a person sees it. Parameters are as its operation lets them be seen."""

    id: UUID
    workflow: str
    handler: str
    run_id: UUID
    status: str
    connector: str
    operation: str
    title: str
    params: dict[str, Any]
    idempotency_key: str
    request_hash: str
    error: str | None
    since: datetime
    attempts: int
    reconcile_attempts: int
    quiet_until: datetime | None  #: before this instant "did not happen" is refused: it may still be travelling
    can_try_again: bool
    message_ids: tuple[str, ...]
    is_hidden: bool  #: its operation is not known here, so nobody can see what it asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationFilter:
    """Which questions. Empty fields say nothing."""

    workflow: str | None = None
    connector: str | None = None
    operation: str | None = None
    older_than: timedelta | None = None
    statuses: tuple[MutationStatus, ...] = (MutationStatus.INDETERMINATE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """One answer to one question."""

    mutation: MutationSummary
    kind: ResolutionKind
    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchCandidate:
    """A question, and what a provider's records know it by."""

    value: str
    mutation: MutationSummary
    is_shared: bool = False  #: something else that may have happened is known by the same, or that cannot be ruled out
    is_partial: bool = False  #: the ledger reaches further back than was looked


@dataclass(slots=True, kw_only=True)
class ResolveResult:
    """What became of many answers: those that were taken, and why the others were not."""

    updated: list[UUID] = field(default_factory=list)
    refused: dict[UUID, str] = field(default_factory=dict)


class Resolutions:
    """Questions and answers over one database.

    ``ring`` hears of workflows that may go on, ``send`` of runs whose request was allowed.
    """

    def __init__(
        self,
        db: Database,
        operations: Operations | None = None,
        ring: Callable[[str], object] = lambda _: None,
        send: Callable[[UUID], object] = lambda _: None,
    ) -> None:
        self.db, self.operations, self.wake_workflow, self.dispatch_run = db, operations, ring, send

    def unresolved_mutations(self, only: MutationFilter | None = None, *, limit: int = 100) -> list[MutationSummary]:
        """What waits for an answer, oldest first."""
        return [self._summary(row) for row in self._rows(only or MutationFilter(), limit)]

    def resolved_mutations(
        self, only: MutationFilter, *, limit: int = 100, recent: int = 10_000
    ) -> list[MutationSummary]:
        """What is long settled, newest first, among the newest ``recent`` rows of the ledger."""
        with self.db.transaction() as tx:
            ids = [
                mutation_id
                for status in only.statuses
                for mutation_id in listings.recent_mutations(
                    tx, status=status, workflow=only.workflow, recent=recent, limit=limit
                )
            ]
            rows = ledger.mutations_by_status(tx, statuses=only.statuses, ids=ids, limit=limit)
        return [self._summary(row) for row in reversed(rows)]

    def match_candidates(
        self, match_by: str, only: MutationFilter | None = None, *, limit: int = 10_000, recent: int = 1_000_000
    ) -> list[MatchCandidate]:
        """Questions by what a provider's records may know them by: ``idempotency_key`` or ``params.<name>``.

        A parameter may be shared with another mutation, whose row would answer for the wrong one. It is looked for
        among the newest ``recent`` rows of the ledger; where that is not all of it, every question counts as shared.
        """
        name = match_by.removeprefix("params.")
        if match_by != KEY and (name == match_by or not name):
            raise InvalidInputError(
                f"Questions cannot be matched by {match_by!r}; expected {KEY!r} or 'params.<name>'."
            )
        given = only or MutationFilter()
        rows = [
            (row, value) for row in self._rows(given, limit) if (value := _match_value(row, match_by, name)) is not None
        ]
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
                mutation=self._summary(row),
                is_shared=is_beyond or value in shared,
                is_partial=is_beyond,
            )
            for row, value in rows
        ]

    def pending_approvals(self, workflow: str | None = None, *, limit: int = 100) -> list[MutationSummary]:
        """Requests that wait to be allowed or refused, oldest first."""
        with self.db.transaction() as tx:
            ids = listings.pending_approvals(tx, workflow, limit=limit)
            rows = ledger.mutations_by_status(tx, statuses=(MutationStatus.PENDING,), ids=ids, limit=limit)
        return [self._summary(row) for row in rows]

    def mutation(self, mutation_id: UUID) -> MutationSummary:
        """One mutation, whatever its status."""
        with self.db.transaction() as tx:
            rows = ledger.mutations_by_status(tx, statuses=tuple(MutationStatus), ids=[mutation_id], limit=1)
        if not rows:
            raise InvalidInputError(f"There is no mutation {mutation_id}. `pipeline mutations` lists those that wait.")
        return self._summary(rows[0])

    def resolve(self, mutation_id: UUID, kind: ResolutionKind, by: Actor, *, result: Any = None) -> None:
        """Settle one mutation. Refused while its request may still travel, and when it moved on."""
        self._check(kind, by, result)
        with self._traced_transaction(mutation_id, kind, by) as tx:
            row = self._resolve(tx, MutationId(mutation_id), kind, by, result)
        self.wake_workflow(row.workflow)

    def approve(self, mutation: MutationSummary, by: Actor) -> None:
        """Allow exactly the request this question shows; one that changed meanwhile is not sent."""
        with self._traced_transaction(mutation.id, "approve", by) as tx:
            resolution.approve(tx, MutationId(mutation.id), by, request_hash=mutation.request_hash)
        self.dispatch_run(mutation.run_id)

    def reject(self, mutation_id: UUID, by: Actor) -> None:
        """Refuse a request: its events are skipped, and it is never sent."""
        with self._traced_transaction(mutation_id, "reject", by) as tx:
            row = resolution.reject(tx, MutationId(mutation_id), by)
        self.wake_workflow(row.workflow)

    def acknowledge(self, mutation_id: UUID, by: Actor) -> None:
        """An effect that surfaced late was dealt with outside; nobody is reminded of it any more."""
        with self.db.transaction() as tx:
            resolution.acknowledge(tx, MutationId(mutation_id), by)

    def resolve_many(self, resolutions: Iterable[Resolution], by: Actor) -> ResolveResult:
        """Give many answers, each on its own: one that is refused does not keep the others from being taken."""
        settled = ResolveResult()
        workflows: set[str] = set()
        for item in resolutions:
            try:
                self._check(item.kind, by, item.result)
                who = (
                    by if item.result is None else replace(by, evidence={**(by.evidence or {}), "result": item.result})
                )
                with self._traced_transaction(item.mutation.id, item.kind, who) as tx:
                    self._resolve(tx, MutationId(item.mutation.id), item.kind, who, item.result)
            except PipelineError as error:
                settled.refused[item.mutation.id] = str(error)
                continue
            settled.updated.append(item.mutation.id)
            workflows.add(item.mutation.workflow)
        for workflow in sorted(workflows):
            self.wake_workflow(workflow)
        return settled

    @contextmanager
    def _traced_transaction(self, mutation_id: UUID, words: str, by: Actor) -> Iterator[Transaction]:
        """A transaction for one act of a person; when somebody listens, a span in the trace of the run as well."""
        with ExitStack() as last:
            if spans.is_on():
                with self.db.transaction() as tx:
                    rows = work.mutations(tx, [mutation_id])
                about = {spans.ACTOR: by.name, spans.RESOLUTION: str(words)}
                for row in rows:
                    last.enter_context(spans.resolution_span(spans.RESOLVE, row, about))
            yield last.enter_context(self.db.transaction())

    def _rows(self, only: MutationFilter, limit: int) -> Sequence[Row[Any]]:
        with self.db.transaction() as tx:
            return ledger.mutations_by_status(
                tx,
                statuses=only.statuses,
                limit=limit,
                workflow=only.workflow,
                connector=only.connector,
                operation=only.operation,
                older_than=only.older_than,
            )

    def _shared_values(
        self, name: str, connector: str | None, asked: Mapping[UUID, str], recent: int
    ) -> tuple[set[str], bool]:
        """Which values others that may have happened have as well, and whether the ledger holds more rows than these.

        Whatever the questions were chosen by: a provider's records know nothing of workflows and operations.
        """
        values, found = set(asked.values()), set[str]()
        below, left = _AFTER_ALL_IDS, recent + 1
        while left:
            limit = min(left, _PAGE_SIZE)
            with self.db.transaction() as tx:
                page = ledger.parameter_values(tx, name, connector=connector, below=below, limit=limit)
            found |= values & {_normalize(row.value) for row in page if row.value is not None and row.id not in asked}
            if len(page) < limit:
                return found, False
            below, left = page[-1].id, left - limit
        return found, True

    def _resolve(
        self, tx: Transaction, mutation_id: MutationId, answer: ResolutionKind, by: Actor, result: Any
    ) -> Row[Any]:
        match answer:
            case ResolutionKind.HAPPENED:
                return resolution.happened(tx, mutation_id, by, result)
            case ResolutionKind.DID_NOT_HAPPEN:
                return resolution.did_not_happen(tx, mutation_id, by)
            case ResolutionKind.SKIP:
                return resolution.skip(tx, mutation_id, by)
            case ResolutionKind.TRY_AGAIN:
                can_look = any(self._can_reconcile(row) for row in work.mutations(tx, [mutation_id]))
                return resolution.try_again(tx, mutation_id, by, can_reconcile=can_look)

    def _can_reconcile(self, row: Row[Any]) -> bool:
        """Whether the operation can reconcile by today's code, as far as that is here."""
        found = self.operations.operation(row.connector, row.operation) if self.operations else None
        return found is not None and found.can_reconcile

    def _check(self, answer: ResolutionKind, by: Actor, result: Any) -> None:
        if not by.reason:
            raise InvalidInputError(f"{by.name} gave no reason; expected one, for whoever reads the audit later.")
        if result is not None and answer is not ResolutionKind.HAPPENED:
            raise InvalidInputError(f"A result was given with {answer}; only what happened has one.")

    def _summary(self, row: Row[Any]) -> MutationSummary:
        found = self.operations.operation(row.connector, row.operation) if self.operations else None
        params = row.params if isinstance(row.params, dict) else {}
        return MutationSummary(
            id=row.id,
            workflow=row.workflow,
            handler=row.handler,
            run_id=row.run_id,
            status=row.status,
            connector=row.connector,
            operation=row.operation,
            title=found.title(params) if found else f"{row.connector}.{row.operation}",
            params=found.redact_params(params) if found else dict.fromkeys(params, "(its operation is not known here)"),
            idempotency_key=row.idempotency_key,
            request_hash=row.request_hash,
            error=row.error,
            since=row.doubted_at or row.created_at,
            attempts=row.attempts,
            reconcile_attempts=row.reconcile_attempts,
            quiet_until=row.quiet_until if row.is_quiet else None,
            can_try_again=row.status == MutationStatus.INDETERMINATE and (row.reconcilable or self._can_reconcile(row)),
            message_ids=tuple(row.message_ids or ()),
            is_hidden=found is None and bool(params),
        )


def _match_value(row: Row[Any], to: str, name: str) -> str | None:
    value = row.idempotency_key if to == KEY else (row.params or {}).get(name)
    return None if value is None else _normalize(value)


def _normalize(value: Any) -> str:
    return str(value).strip()


def resolutions_for(mutations: Sequence[MutationSummary], kind: ResolutionKind, result: Any = None) -> list[Resolution]:
    """The same answer for many: look at it before it is given to ``Desk.settle``."""
    return [Resolution(mutation=question, kind=kind, result=result) for question in mutations]
