"""The desk: what only a person can settle, and the ways to settle it.

Console, command line and Python use the same calls. Every answer is one guarded verb in a transaction
of its own, with who and why in the audit; what moved on meanwhile is refused and nothing is changed.
Many at once are previewed first: an ``Import`` or a filter shows what it would do before it does it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import Row

from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.ids import MutationId
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Person
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import ledger, listings, work
from pipeline.telemetry.tracing import spans
from pipeline.transitions import resolution

KEY = "idempotency_key"

_PAGE = 10_000  #: rows of the ledger looked at in one transaction
_BEHIND_ALL = UUID(int=2**128 - 1)


class Answer(StrEnum):
    """What a person says about a mutation nobody else can settle."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    SKIP = "skip"  #: go on without it, whatever happened
    TRY_AGAIN = "try_again"  #: ask the outside system again, with a fresh budget


class Operations(Protocol):
    """Where operations are found, to show requests as they may be shown."""

    def operation(self, connector: str, operation: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
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
    looks: int
    quiet_until: datetime | None  #: before this instant "did not happen" is refused: it may still be travelling
    can_try_again: bool
    message_ids: tuple[str, ...]
    is_hidden: bool  #: its operation is not known here, so nobody can see what it asks for

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which questions. Empty fields say nothing."""

    workflow: str | None = None
    connector: str | None = None
    operation: str | None = None
    older_than: timedelta | None = None
    statuses: tuple[MutationStatus, ...] = (MutationStatus.INDETERMINATE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One answer to one question."""

    question: Question
    answer: Answer
    result: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A question, and what a provider's records know it by."""

    value: str
    question: Question
    is_shared: bool = False  #: something else that may have happened is known by the same, or that cannot be ruled out
    is_beyond: bool = False  #: the ledger reaches further back than was looked


@dataclass(slots=True, kw_only=True)
class Settled:
    """What became of many answers: those that were taken, and why the others were not."""

    taken: list[UUID] = field(default_factory=list)
    refused: dict[UUID, str] = field(default_factory=dict)


class Desk:
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
        self.db, self.operations, self.ring, self.send = db, operations, ring, send

    def questions(self, only: Filter | None = None, *, limit: int = 100) -> list[Question]:
        """What waits for an answer, oldest first."""
        return [self._question(row) for row in self._rows(only or Filter(), limit)]

    def settled(self, only: Filter, *, limit: int = 100, recent: int = 10_000) -> list[Question]:
        """What is long settled, newest first, among the newest ``recent`` rows of the ledger."""
        with self.db.transaction() as tx:
            ids = [
                mutation_id
                for status in only.statuses
                for mutation_id in listings.recent_mutations(
                    tx, status=status, workflow=only.workflow, recent=recent, limit=limit
                )
            ]
            rows = ledger.questions(tx, statuses=only.statuses, ids=ids, limit=limit)
        return [self._question(row) for row in reversed(rows)]

    def asked_by(
        self, to: str, only: Filter | None = None, *, limit: int = 10_000, recent: int = 1_000_000
    ) -> list[Matched]:
        """Questions by what a provider's records may know them by: ``idempotency_key`` or ``params.<name>``.

        A parameter may be shared with another mutation, whose row would answer for the wrong one. It is looked for
        among the newest ``recent`` rows of the ledger; where that is not all of it, every question counts as shared.
        """
        name = to.removeprefix("params.")
        if to != KEY and (name == to or not name):
            raise InvalidInputError(f"Questions cannot be matched by {to!r}; expected {KEY!r} or 'params.<name>'.")
        given = only or Filter()
        rows = [(row, value) for row in self._rows(given, limit) if (value := _known_by(row, to, name)) is not None]
        shared = {value for value, count in Counter(value for _, value in rows).items() if count > 1}
        is_beyond = False
        if rows and to != KEY:
            others, is_beyond = self._others(name, given.connector, {row.id: value for row, value in rows}, recent)
            shared |= others
        return [
            Matched(
                value=value,
                question=self._question(row),
                is_shared=is_beyond or value in shared,
                is_beyond=is_beyond,
            )
            for row, value in rows
        ]

    def approvals(self, workflow: str | None = None, *, limit: int = 100) -> list[Question]:
        """Requests that wait to be allowed or refused, oldest first."""
        with self.db.transaction() as tx:
            ids = listings.approvals(tx, workflow, limit=limit)
            rows = ledger.questions(tx, statuses=(MutationStatus.PENDING,), ids=ids, limit=limit)
        return [self._question(row) for row in rows]

    def question(self, mutation_id: UUID) -> Question:
        """One mutation, whatever its status."""
        with self.db.transaction() as tx:
            rows = ledger.questions(tx, statuses=tuple(MutationStatus), ids=[mutation_id], limit=1)
        if not rows:
            raise InvalidInputError(f"There is no mutation {mutation_id}. `pipeline mutations` lists those that wait.")
        return self._question(rows[0])

    def answer(self, mutation_id: UUID, answer: Answer, by: Person, *, result: Any = None) -> None:
        """Settle one mutation. Refused while its request may still travel, and when it moved on."""
        self._check(answer, by, result)
        with self._acting(mutation_id, answer, by) as tx:
            row = self._settle(tx, MutationId(mutation_id), answer, by, result)
        self.ring(row.workflow)

    def approve(self, question: Question, by: Person) -> None:
        """Allow exactly the request this question shows; one that changed meanwhile is not sent."""
        with self._acting(question.id, "approve", by) as tx:
            resolution.approve(tx, MutationId(question.id), by, request_hash=question.request_hash)
        self.send(question.run_id)

    def reject(self, mutation_id: UUID, by: Person) -> None:
        """Refuse a request: its events are skipped, and it is never sent."""
        with self._acting(mutation_id, "reject", by) as tx:
            row = resolution.reject(tx, MutationId(mutation_id), by)
        self.ring(row.workflow)

    def acknowledge(self, mutation_id: UUID, by: Person) -> None:
        """An effect that surfaced late was dealt with outside; nobody is reminded of it any more."""
        with self.db.transaction() as tx:
            resolution.acknowledge(tx, MutationId(mutation_id), by)

    def settle(self, given: Iterable[Given], by: Person) -> Settled:
        """Give many answers, each on its own: one that is refused does not keep the others from being taken."""
        settled = Settled()
        workflows: set[str] = set()
        for item in given:
            try:
                self._check(item.answer, by, item.result)
                who = (
                    by if item.result is None else replace(by, evidence={**(by.evidence or {}), "result": item.result})
                )
                with self._acting(item.question.id, item.answer, who) as tx:
                    self._settle(tx, MutationId(item.question.id), item.answer, who, item.result)
            except PipelineError as error:
                settled.refused[item.question.id] = str(error)
                continue
            settled.taken.append(item.question.id)
            workflows.add(item.question.workflow)
        for workflow in sorted(workflows):
            self.ring(workflow)
        return settled

    @contextmanager
    def _acting(self, mutation_id: UUID, words: str, by: Person) -> Iterator[Transaction]:
        """A transaction for one act of a person; when somebody listens, a span in the trace of the run as well."""
        with ExitStack() as last:
            if spans.is_on():
                with self.db.transaction() as tx:
                    rows = work.mutations(tx, [mutation_id])
                about = {spans.ACTOR: by.name, spans.WORDS: str(words)}
                for row in rows:
                    last.enter_context(spans.settling(spans.ANSWER, row, about))
            yield last.enter_context(self.db.transaction())

    def _rows(self, only: Filter, limit: int) -> Sequence[Row[Any]]:
        with self.db.transaction() as tx:
            return ledger.questions(
                tx,
                statuses=only.statuses,
                limit=limit,
                workflow=only.workflow,
                connector=only.connector,
                operation=only.operation,
                older_than=only.older_than,
            )

    def _others(
        self, name: str, connector: str | None, asked: Mapping[UUID, str], recent: int
    ) -> tuple[set[str], bool]:
        """Which values others that may have happened have as well, and whether the ledger holds more rows than these.

        Whatever the questions were chosen by: a provider's records know nothing of workflows and operations.
        """
        values, found = set(asked.values()), set[str]()
        below, left = _BEHIND_ALL, recent + 1
        while left:
            limit = min(left, _PAGE)
            with self.db.transaction() as tx:
                page = ledger.known_by(tx, name, connector=connector, below=below, limit=limit)
            found |= values & {_plain(row.value) for row in page if row.value is not None and row.id not in asked}
            if len(page) < limit:
                return found, False
            below, left = page[-1].id, left - limit
        return found, True

    def _settle(self, tx: Transaction, mutation_id: MutationId, answer: Answer, by: Person, result: Any) -> Row[Any]:
        match answer:
            case Answer.HAPPENED:
                return resolution.happened(tx, mutation_id, by, result)
            case Answer.DID_NOT_HAPPEN:
                return resolution.did_not_happen(tx, mutation_id, by)
            case Answer.SKIP:
                return resolution.skip(tx, mutation_id, by)
            case Answer.TRY_AGAIN:
                can_look = any(self._can_look(row) for row in work.mutations(tx, [mutation_id]))
                return resolution.try_again(tx, mutation_id, by, can_look=can_look)

    def _can_look(self, row: Row[Any]) -> bool:
        """Whether the operation can reconcile by today's code, as far as that is here."""
        found = self.operations.operation(row.connector, row.operation) if self.operations else None
        return found is not None and found.can_reconcile

    def _check(self, answer: Answer, by: Person, result: Any) -> None:
        if not by.reason:
            raise InvalidInputError(f"{by.name} gave no reason; expected one, for whoever reads the audit later.")
        if result is not None and answer is not Answer.HAPPENED:
            raise InvalidInputError(f"A result was given with {answer}; only what happened has one.")

    def _question(self, row: Row[Any]) -> Question:
        found = self.operations.operation(row.connector, row.operation) if self.operations else None
        params = row.params if isinstance(row.params, dict) else {}
        return Question(
            id=row.id,
            workflow=row.workflow,
            handler=row.handler,
            run_id=row.run_id,
            status=row.status,
            connector=row.connector,
            operation=row.operation,
            title=found.title(params) if found else f"{row.connector}.{row.operation}",
            params=found.shown(params) if found else dict.fromkeys(params, "(its operation is not known here)"),
            idempotency_key=row.idempotency_key,
            request_hash=row.request_hash,
            error=row.error,
            since=row.doubted_at or row.created_at,
            attempts=row.attempts,
            looks=row.reconcile_attempts,
            quiet_until=row.quiet_until if row.is_quiet else None,
            can_try_again=row.status == MutationStatus.INDETERMINATE and (row.reconcilable or self._can_look(row)),
            message_ids=tuple(row.message_ids or ()),
            is_hidden=found is None and bool(params),
        )


def _known_by(row: Row[Any], to: str, name: str) -> str | None:
    value = row.idempotency_key if to == KEY else (row.params or {}).get(name)
    return None if value is None else _plain(value)


def _plain(value: Any) -> str:
    return str(value).strip()


def given_to_all(questions: Sequence[Question], answer: Answer, result: Any = None) -> list[Given]:
    """The same answer for many: look at it before it is given to ``Desk.settle``."""
    return [Given(question=question, answer=answer, result=result) for question in questions]
