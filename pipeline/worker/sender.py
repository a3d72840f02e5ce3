"""Send mutations: record each one before its request leaves, and each outcome as it comes.

The number of concurrent calls of a process is bounded. Each wave of ledger rows is committed in flight right before
it is sent, so a crash leaves in doubt only what was in flight. Outcomes that arrive together are recorded in one
commit. A slow call delays neither another record nor the end of its task. ``domain.reconciliation`` decides what the
end of a call means.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError, TimeoutError

from pipeline.connectors.sdk import Call, Operation
from pipeline.consumer_engine.bounded import ConcurrentCalls, FinishedCall, StepRunner
from pipeline.domain.codec import opened
from pipeline.domain.errors import (
    IllegalTransitionError,
    LogicError,
    MissingKeyError,
    StaleWriteError,
    TamperedError,
)
from pipeline.domain.failures import Failure, FailureKind, classify
from pipeline.domain.idempotency import effect_id
from pipeline.domain.reconciliation import CallDecision, CallError, CallFacts, NextAction, decide
from pipeline.domain.states import MutationStatus, RunId
from pipeline.domain.values import Actor, AppliedMutation, Request, RunFailure, RunLease
from pipeline.store.database import Database, Transaction, is_transient
from pipeline.store.reads import work
from pipeline.store.rows import ClaimedRunRow, SentMutationRow
from pipeline.store.schema import MutationRow
from pipeline.telemetry import phase_observer, spans
from pipeline.transitions import breakers, late_effects, mutations, runs, stops
from pipeline.transitions.breakers import Admission, OperationName
from pipeline.transitions.stops import StoppedRun
from pipeline.worker import calls as worker_calls
from pipeline.worker import sealing
from pipeline.worker.calls import PendingCall
from pipeline.worker.crash_points import CrashPoint, reach
from pipeline.worker.leases import Leases
from pipeline.worker.outcomes import call_end, reconcile_end
from pipeline.worker.phases import lease_of
from pipeline.worker.settings import WorkerPolicy
from pipeline.workflows.handler_types import RequestedMutation
from pipeline.workflows.registry import Registry

log = logging.getLogger(__name__)

WORKER = Actor(name="worker", reason="the call was answered after its outcome had been resolved")
OnDone = Callable[[Sequence[RunId], bool], None]  #: the runs that go on, and whether others of the cohort follow
_MIN_STRAGGLER_WAIT = 0.01  #: seconds: the calls of a wave do not end in the same instant


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationToSend:
    """A claimed run and the mutation it asks for; None when an operator approved one that is in the ledger."""

    run: ClaimedRunRow
    request: RequestedMutation | None
    cost: Decimal | None = None  #: of the phase that asked for it


_DecidedCall = tuple[PendingCall, CallDecision]
_RETRY_SECONDS = 0.5  #: pause after the database did not take the beginning of a retry
_FAILED_ACTIONS = (NextAction.FAILED, NextAction.ABSENT)


class MutationSender:
    """Sends what runs ask for."""

    def __init__(
        self,
        db: Database,
        registry: Registry,
        leases: Leases,
        policy: WorkerPolicy,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.db, self.registry, self.leases, self.policy, self.jitter = db, registry, leases, policy, jitter
        self.places = _Places(policy.mutation_concurrency)
        self._idle: list[StepRunner] = []  # threads, kept from cohort to cohort
        self._local = threading.local()

    def send(
        self, wanted: Sequence[MutationToSend], on_done: OnDone, hand_over: "Callable[[CohortSender], None]"
    ) -> None:
        """Carry out every request; ``on_done`` hears of runs whose outcome is recorded.

        When only slow calls are left, ``hand_over`` gets the cohort, to finish it in another thread.
        """
        calls = self._calls()
        cohort = CohortSender(self, calls, deque(wanted), on_done)
        try:
            if not cohort.run(leave=True):
                del self._local.calls
                hand_over(cohort)
        except BaseException:
            calls.close()
            self._local.__dict__.pop("calls", None)
            raise

    def _calls(self) -> ConcurrentCalls:
        """The calls of this thread, unless a cohort has kept them."""
        if not hasattr(self._local, "calls"):
            self._local.calls = ConcurrentCalls(self._idle)
        calls: ConcurrentCalls = self._local.calls
        return calls

    def begin(self, wave: Sequence[MutationToSend]) -> list[PendingCall]:
        """Commit a wave to the ledger. A refused run belongs to another worker by now and is dropped.

        The deadline counts from before the commit, so it is never later than the one in the ledger: a process
        that was frozen in between finds it passed, and sends nothing for a run that was resolved without it.
        """
        begun, suspended_before = time.monotonic(), worker_calls.suspended_seconds()
        by_id = {item.run.id: item.run for item in wave}
        fresh = [self._request(item.run, item.request, item.cost) for item in wave if item.request is not None]
        approved = [lease_of(item.run) for item in wave if item.request is None]
        landed, hindered = self._begin_all(fresh) if fresh else ([], [])
        probes = set[OperationName]()
        if hindered or approved:
            others, probes = self._begin_by_breaker(hindered, approved, by_id)
            landed += others
        reach(CrashPoint.IN_FLIGHT)
        self.leases.drop([lease_of(by_id[row.run_id]) for row in landed if row.status == MutationStatus.PENDING])
        sent = [row for row in landed if row.status == MutationStatus.IN_FLIGHT]
        made = [self._pending_call(row, lease_of(by_id[row.run_id]), begun, suspended_before) for row in sent]
        for pending in made:
            pending.is_probe = pending.operation_name in probes
        return made

    def _begin_all(self, fresh: Sequence[Request]) -> tuple[list[SentMutationRow], list[Request]]:
        """Begin requests in one statement. Returns what began, and what an open breaker may hold back."""
        with self.db.autocommit() as tx:
            landing = mutations.begin_mutation(tx, fresh, self.policy.limits)
        refused = landing.refused
        hindered = [item for item in fresh if isinstance(refused.get(item.lease.run_id), IllegalTransitionError)]
        return [*landing.updated], hindered

    def _begin_by_breaker(
        self, fresh: Sequence[Request], approved: Sequence[RunLease], by_id: dict[RunId, ClaimedRunRow]
    ) -> tuple[Sequence[SentMutationRow], set[OperationName]]:
        """Begin what open breakers let through, and hand the others back. Returns also the operations with a probe."""
        with self.db.transaction() as tx:
            known, void = self._sendable(tx, approved, by_id)
            barred, probes = self._held_by_breaker(tx, fresh, known)
            if barred:
                runs.hand_back(tx, barred, is_delayed=True)
            passing = [replace(item, passes_breaker=True) for item in fresh if item.lease not in barred]
            known = {item: name for item, name in known.items() if item not in barred}
            landed = [*mutations.begin_mutation(tx, passing, self.policy.limits).updated] if passing else []
            landed += mutations.send(tx, list(known), self._time_limits(known)).updated if known else ()
        phase_observer.record_failed(void)
        self.leases.drop(barred)
        return landed, probes

    def begin_retry(self, retries: Sequence[PendingCall]) -> list[PendingCall]:
        """Count another attempt and give it a new deadline, before it goes."""
        begun, suspended_before = time.monotonic(), worker_calls.suspended_seconds()
        by_id = {pending.lease.run_id: pending for pending in retries}
        with self.db.autocommit() as tx:
            costs = {pending.lease: pending.cost for pending in retries}
            landed = mutations.resend(tx, list(costs), costs).updated
        landed_at = time.monotonic()
        reach(CrashPoint.IN_FLIGHT)
        for row in landed:
            pending = by_id[row.run_id]
            pending.mutation, pending.committed_at, pending.suspended_before = row, landed_at, suspended_before
            pending.ends_at = begun + pending.operation.timeout.total_seconds()
            pending.cost = None
        return [by_id[row.run_id] for row in landed]

    def hand_back(self, rest: Sequence[RunLease]) -> None:
        """Hand back runs that there is no time for. None is in the ledger yet; the next tick redispatches them."""
        with self.db.transaction() as tx:
            runs.hand_back(tx, rest)
        self.leases.drop(rest)

    def start_call(self, calls: ConcurrentCalls, pending: PendingCall) -> None:
        """Start a call, unless its time has passed or the run belongs to another worker."""
        call = Call.within(pending.mutation.idempotency_key, pending.operation.policy.immediate_timeout)
        function = pending.operation.reconcile_function if pending.is_reconcile else pending.operation.function
        since = timedelta(seconds=time.monotonic() - pending.committed_at)
        assert pending.mutation.sent_at is not None
        pending.reconcile_started_at = pending.mutation.sent_at + since if pending.is_reconcile else None
        pending.is_unsent = False
        if self.leases.is_lost(pending.lease):
            function, pending.is_unsent = worker_calls.refuse_lost, True
        elif not pending.is_reconcile and pending.is_late:
            function, pending.is_unsent = worker_calls.refuse_late, True
        elif not pending.is_reconcile:
            call = Call(idempotency_key=pending.mutation.idempotency_key, ends_at=pending.ends_at)
        pending.span = phase_observer.start_call(
            pending.lease.run_id, pending.mutation, is_reconcile=pending.is_reconcile
        )
        pending.started_at, pending.call = time.monotonic(), call
        calls.start(pending.lease.run_id, worker_calls.call_provider, function, pending, call, ends_at=call.ends_at)

    def record(self, ended: Sequence[_DecidedCall]) -> Sequence[RunId]:
        """Write outcomes down, again and again while the database does not take them: they exist nowhere else.

        Returns the runs that go on.

        If the rescuer has taken the runs for dead meanwhile, the outcomes resolve its doubts.
        """
        for pause in self._pauses():
            try:
                settled, stopped = self._write(ended)
            except (DBAPIError, TimeoutError) as error:
                if pause is None or not is_transient(error):
                    raise
                log.warning("%d outcomes could not be recorded, trying again: %s", len(ended), error)
                threading.Event().wait(pause)
            else:
                break
        phase_observer.record_finished(settled)
        phase_observer.record_failed(stopped)
        reach(CrashPoint.OUTCOME_SAVED)
        self.leases.drop([pending.lease for pending, _ in ended])
        return [RunId(run_id) for run_id in settled]

    def _pauses(self) -> Iterator[float | None]:
        """How long to wait between tries, then None: for the last one."""
        ends_at, pause = time.monotonic() + self.policy.record_limit.total_seconds(), 0.05
        while time.monotonic() < ends_at:
            yield pause
            pause = min(2.0, pause * 2)
        yield None

    def _write(self, ended: Sequence[_DecidedCall]) -> tuple[Sequence[UUID], Sequence[StoppedRun]]:
        """Record outcomes and stop the runs that did not get theirs. Returns the others, and these."""
        if any(pending.is_probe or not worker_calls.is_applied(judged) for pending, judged in ended):
            with self.db.transaction() as tx:
                return self._write_mixed(tx, ended)
        with self.db.autocommit() as tx:
            settled, late = self._apply(tx, self._applied(ended))
        if late:
            with self.db.transaction() as tx:
                self._apply_late(tx, late)
        return settled, ()

    def _applied(self, ended: Sequence[_DecidedCall]) -> list[AppliedMutation]:
        return [
            worker_calls.applied_mutation(pending, judged, self.policy.limits)
            for pending, judged in ended
            if worker_calls.is_applied(judged)
        ]

    def _write_mixed(
        self, tx: Transaction, ended: Sequence[_DecidedCall]
    ) -> tuple[Sequence[UUID], Sequence[StoppedRun]]:
        stopped = [
            worker_calls.run_failure(pending, judged.failure) for pending, judged in ended if judged.failure is not None
        ]
        if stopped:
            stops.lock_workflows(tx, (item.lease for item in stopped))
        applied = self._applied(ended)
        settled, late = self._apply(tx, applied) if applied else ((), ())
        self._apply_late(tx, late)
        refused = [
            worker_calls.failed_mutation(pending, judged)
            for pending, judged in ended
            if judged.action in _FAILED_ACTIONS
        ]
        too_early = mutations.fail(tx, refused).refused if refused else {}
        gone = stops.stop(tx, stopped, jitter=self.jitter()).updated if stopped else ()
        doubted = [f for f, j in ended if j.action is NextAction.DOUBT or f.mutation.id in too_early]
        for name, pending in {
            pending.operation_name: pending for pending in sorted(doubted, key=worker_calls.is_approved)
        }.items():
            breakers.open_if_unknown(tx, name, pending.operation.breaker, pending.mutation.id)
        sent = [(f, j) for f, j in ended if f.is_probe and not f.is_reconcile and not f.is_unsent and f not in doubted]
        answered = [pending for pending, judged in sent if judged.has_response]
        for name in {pending.operation_name for pending in answered}:
            breakers.close_after_probe(tx, name)
        return settled, gone

    def _apply(
        self, tx: Transaction, applied: Sequence[AppliedMutation]
    ) -> tuple[Sequence[UUID], Sequence[AppliedMutation]]:
        """Write down what happened. Returns the runs, and the answers of runs that were taken for dead meanwhile."""
        landing = mutations.apply(tx, applied, limits=self.policy.limits)
        refused = landing.refused
        late = [
            replace(item, fence=None) for item in applied if isinstance(refused.get(item.mutation_id), StaleWriteError)
        ]
        return [row.run_id for row in landing.updated], late

    def _apply_late(self, tx: Transaction, late: Sequence[AppliedMutation]) -> None:
        """Resolve the doubt about runs that were taken for dead.

        If it was resolved otherwise meanwhile, a late effect is recorded.
        """
        for item in late:
            if mutations.apply(tx, [item], limits=self.policy.limits).refused:
                late_effects.record_late_effect(tx, item.mutation_id, item.result, WORKER, is_own=True)

    def _held_by_breaker(
        self, tx: Transaction, fresh: Sequence[Request], known: dict[RunLease, OperationName]
    ) -> tuple[list[RunLease], set[OperationName]]:
        """Who must wait behind an open breaker, and the operations whose probe is among the others."""
        asked = {item.lease: (item.connector, item.operation) for item in fresh if not item.needs_approval} | known
        open_ = breakers.admit(tx, set(asked.values())) if asked else {}
        probes = {name for name, admission in open_.items() if admission is Admission.ONE}
        first = {name: next(item for item, its in asked.items() if its == name) for name in probes}
        barred = [item for item, name in asked.items() if name in open_ and first.get(name) != item]
        return barred, probes

    def _sendable(
        self, tx: Transaction, approved: Sequence[RunLease], by_id: dict[RunId, ClaimedRunRow]
    ) -> tuple[dict[RunLease, OperationName], Sequence[StoppedRun]]:
        """Requests that can be sent. The runs of the others stop."""
        if not approved:
            return {}, ()
        ids = [by_id[item.run_id].mutation_id for item in approved]
        rows = work.mutations(tx, [id_ for id_ in ids if id_ is not None])
        by_run = {row.run_id: row for row in rows}
        problems = {item: problem for item in approved if (problem := self._void_reason(by_run[item.run_id]))}
        stopped = [RunFailure(lease=item, failure=failure) for item, failure in problems.items()]
        ended = stops.stop(tx, stopped).updated if stopped else ()
        kept = [item for item in approved if item not in problems]
        return {item: (by_run[item.run_id].connector, by_run[item.run_id].operation) for item in kept}, ended

    def _time_limits(self, known: dict[RunLease, OperationName]) -> dict[RunLease, tuple[timedelta, timedelta]]:
        operations = {item: self._operation(*name) for item, name in known.items()}
        return {item: (operation.timeout, operation.settle) for item, operation in operations.items()}

    def _void_reason(self, row: MutationRow) -> Failure | None:
        """Why an approved request may not be sent: it is gone from the code, or it would not be what was approved."""
        name = f"{row.connector}.{row.operation}"
        operation = self.registry.operation(row.connector, row.operation)
        if operation is None:
            return classify(LogicError(f"{name} is gone from the code"))
        try:
            params = operation.to_stored_params(opened(row.params))
            asked = RequestedMutation(connector=row.connector, operation=row.operation, params=params)
            if sealing.hash_of_request(self.db, row.workflow, asked) == row.request_hash:
                return None
            message = f"{name} would not send what was approved: it has changed"
        except (MissingKeyError, TamperedError) as error:
            return classify(error)
        except LogicError as error:
            message = f"{name} no longer takes what was approved: {error}"
        return Failure(kind=FailureKind.VOID, message=message, error_type="VoidApproval")

    def _request(self, run: ClaimedRunRow, asked: RequestedMutation, cost: Decimal | None) -> Request:
        operation = self._operation(asked.connector, asked.operation)
        hashed = sealing.hash_of_request(self.db, run.workflow, asked)
        is_private = sealing.is_private(self.db, run.workflow)
        plan = run.prepare_result or {}
        message_ids = tuple(message_id for _, message_id in run.inputs)
        request = Request(
            lease=lease_of(run),
            connector=asked.connector,
            operation=asked.operation,
            params=asked.params,
            request_hash=hashed,
            effect_id=effect_id(run.handler_uid, run.inputs, hashed),
            timeout=operation.timeout,
            settle=operation.settle,
            monitor_after=next(iter(operation.policy.monitor_after), None),
            reconcilable=operation.can_reconcile,
            keyed=operation.keyed,
            key_lifetime=operation.key_lifetime,
            needs_approval=bool(plan.get("approval")),
            cost=cost,
            headline=operation.headline(asked.params, None if is_private else plan.get("ui"), message_ids),
            message_ids=message_ids,
            four_eyes_value=operation.four_eyes_value(asked.params),
        )
        return sealing.sealed_request(self.db, run.workflow, request)

    def _pending_call(self, row: SentMutationRow, item: RunLease, begun: float, suspended_before: float) -> PendingCall:
        operation = self._operation(row.connector, row.operation)
        return PendingCall(
            lease=item,
            mutation=row,
            connector=self.registry.connectors[row.connector],
            operation=operation,
            ends_at=begun + operation.timeout.total_seconds(),
            suspended_before=suspended_before,
            committed_at=time.monotonic(),
        )

    def _operation(self, connector: str, operation: str) -> Operation[Any]:
        found = self.registry.operation(connector, operation)
        assert found is not None
        return found


class _Places:
    """How many calls this process may still send. All its cohorts share them, with and without a task."""

    def __init__(self, limit: int) -> None:
        self._free, self._lock = limit, threading.Lock()
        self._waiting: set[Callable[[], None]] = set()

    def take(self, wanted: int, wake: Callable[[], None]) -> int:
        """Take so many places, or those that are free; then ``wake`` is called once when others are."""
        with self._lock:
            taken = max(0, min(wanted, self._free))
            self._free -= taken
            if taken < wanted:
                self._waiting.add(wake)
            return taken

    def give_back(self, count: int) -> None:
        """Give places back. A negative count takes them, free or not: another attempt does not wait for one."""
        with self._lock:
            self._free += count
            waiting, self._waiting = (self._waiting, set()) if self._free > 0 else (set(), self._waiting)
        for wake in waiting:
            wake()


class CohortSender:
    """The mutations of one cohort on their way: waiting, in flight, pausing before another attempt."""

    def __init__(
        self, sender: MutationSender, calls: ConcurrentCalls, waiting: deque[MutationToSend], on_done: OnDone
    ) -> None:
        self.sender, self.calls, self.waiting, self.on_done = sender, calls, waiting, on_done
        self.in_flight: dict[RunId, PendingCall] = {}
        self.retrying: list[tuple[float, PendingCall]] = []
        self.count, self.places = len(waiting), 0
        budget = sender.policy.mutation_budget.total_seconds()
        self.closes_at = time.monotonic() + budget
        self.ends_at = self.closes_at + budget  #: as the time limit of the task: no call and no reconcile ends later
        self._patience, self._changed_at = sender.policy.straggler_wait.total_seconds(), time.monotonic()
        self._longest = 0.0

    @property
    def leases(self) -> list[RunLease]:
        """The runs that are not done."""
        return [pending.lease for pending in (*self.in_flight.values(), *(pending for _, pending in self.retrying))]

    def run(self, *, leave: bool = False) -> bool:
        """Go on until every outcome is recorded, or only slow calls are left; then False if the caller may leave."""
        try:
            while self.waiting or self.in_flight or self.retrying:
                self._send()
                if leave and self._has_only_stragglers():
                    return False
                self._take_in(self.calls.wait(self._wait_seconds(leave=leave)))
        except BaseException:
            self._hold_places(0)
            raise
        return True

    def _take_in(self, finished: Sequence[FinishedCall]) -> None:
        """Decide about calls that ended, and record those that are done."""
        ended = [(self.in_flight.pop(RunId(item.key)), item) for item in finished]  # type: ignore[arg-type]
        if ended:
            reach(CrashPoint.CALLED)
            self._changed_at = time.monotonic()
            self._longest = max(self._longest, *(self._changed_at - pending.started_at for pending, _ in ended))
        judged = [(pending, self._decide(pending, finished)) for pending, finished in ended]
        for pending, verdict in judged:
            self._apply_decision(pending, verdict)
        self._hold_places(len(self.in_flight))
        done = [
            (pending, verdict)
            for pending, verdict in judged
            if verdict.action not in (NextAction.RECONCILE, NextAction.RETRY)
        ]
        settled = self.sender.record(done) if done else ()
        self.on_done(settled, bool(self.waiting or self.in_flight or self.retrying))

    def _send(self) -> None:
        """Hand back runs without time left, send up to the concurrency, and retry calls whose pause is over."""
        taken = self.sender.places.take(len(self.waiting), self.calls.wake) if self.waiting else 0
        self.places += taken
        if self.waiting and (len(self.waiting) < self.count or not taken) and time.monotonic() > self.closes_at:
            self.sender.hand_back([lease_of(item.run) for item in self.waiting])
            self.waiting.clear()
        wave = [self.waiting.popleft() for _ in range(min(taken, len(self.waiting)))]
        due = [pending for at, pending in self.retrying if at <= time.monotonic()]
        self.retrying = [(at, pending) for at, pending in self.retrying if pending not in due]
        begun = self._begin(wave, due)
        for pending in begun:
            self._start_call(pending)
        self._hold_places(len(self.in_flight))
        if begun:
            self._changed_at = time.monotonic()

    def _begin(self, wave: Sequence[MutationToSend], due: Sequence[PendingCall]) -> list[PendingCall]:
        """Begin a wave, and the retries that are due.

        While calls are in flight, a database that is away only delays it: their answers are in no other place.
        """
        begun: list[PendingCall] = []
        try:
            begun += self.sender.begin(wave) if wave else []
            wave = ()
            begun += self.sender.begin_retry(due) if due else []
        except (DBAPIError, TimeoutError) as error:
            if not (begun or self.in_flight) or not is_transient(error):
                raise
            log.warning("%d mutations could not be begun, trying again: %s", len(wave) + len(due), error)
            self.waiting.extendleft(reversed(wave))
            self.retrying += [(time.monotonic() + _RETRY_SECONDS, pending) for pending in due]
        return begun

    def _hold_places(self, count: int) -> None:
        """Keep a place for each call in flight."""
        if count != self.places:
            given, self.places = self.places - count, count
            self.sender.places.give_back(given)

    def _has_only_stragglers(self) -> bool:
        """Whether what is left takes longer than the rest did."""
        return bool(self.in_flight or self.retrying) and not self.waiting and time.monotonic() >= self._leaves_at

    @property
    def _leaves_at(self) -> float:
        """When a call that is left is a straggler: after as long again as the slowest of the others took."""
        patience = self._patience if not self._longest else max(_MIN_STRAGGLER_WAIT, self._longest)
        return self._changed_at + min(self._patience, patience)

    def _decide(self, pending: PendingCall, finished: FinishedCall) -> CallDecision:
        read = reconcile_end if pending.is_reconcile else call_end
        is_private = sealing.is_private(self.sender.db, pending.mutation.workflow)
        end = read(pending.connector, pending.operation, pending.mutation.params, finished, is_private=is_private)
        pending.is_overdue |= isinstance(end, CallError) and end.is_overdue
        worker_calls.count_cost(pending)
        facts = CallFacts(
            timeout=pending.operation.timeout,
            retry=pending.operation.retry,
            can_reconcile=pending.operation.can_reconcile,
            attempts=pending.mutation.attempts,
            time_left=timedelta(seconds=self.closes_at - time.monotonic()),
            is_overdue=pending.is_overdue,
            doubt_reason=pending.doubt_reason,
            doubt_type=pending.doubt_type,
        )
        decision = decide(end, facts, jitter=self.sender.jitter())
        spans.end_span(pending.span, decision.action, finished.error)
        worker_calls.record_metrics(pending, decision, end)
        return decision

    def _apply_decision(self, pending: PendingCall, verdict: CallDecision) -> None:
        if verdict.action is NextAction.RECONCILE:
            pending.is_reconcile, pending.doubt_reason = True, verdict.reason
            pending.doubt_type = verdict.failure.error_type if verdict.failure else ""
            self._start_call(pending)
        elif verdict.action is NextAction.RETRY:
            pause = verdict.pause or timedelta(0)
            self.retrying.append((time.monotonic() + pause.total_seconds(), pending))

    def _start_call(self, pending: PendingCall) -> None:
        self.in_flight[pending.lease.run_id] = pending
        self.sender.start_call(self.calls, pending)

    def _wait_seconds(self, *, leave: bool) -> float:
        """How long to wait for the next answer: until a retry is due or the caller leaves, and at most a second."""
        due_at = min((at for at, _ in self.retrying), default=time.monotonic() + 1.0)
        if leave and not self.waiting:
            due_at = min(due_at, self._leaves_at)
        return min(1.0, max(0.0, due_at - time.monotonic()))
