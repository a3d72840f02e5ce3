"""Run the phases of a cohort, as the tasks call them.

Each takes run ids, claims what it may, calls the handlers, writes everything that succeeded in one
transaction, stops each run that failed by itself, and returns the runs that go on. Delivered twice,
late or out of order, a call finds nothing to claim and changes nothing.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from pipeline.domain.errors import OutdatedCodeError, StaleWriteError
from pipeline.domain.failures import Failure, FailureKind, classify
from pipeline.domain.states import PhaseTask, RunId
from pipeline.domain.values import PreparedRun, RunFailure, RunLease, RunOutput
from pipeline.domain.workflows import can_overtake
from pipeline.store.database import SHORT_LOCK_TIMEOUT, Database, Transaction, is_lock_timeout, is_transient
from pipeline.store.reads import gauges, work
from pipeline.store.rows import ClaimedRunRow
from pipeline.store.schema import RunRow
from pipeline.telemetry import phase_observer
from pipeline.transitions import runs, stops
from pipeline.transitions.results import BatchResult
from pipeline.transitions.runs import Claims
from pipeline.transitions.stops import StoppedRun
from pipeline.worker import sealing
from pipeline.worker.crash_points import CrashPoint, reach
from pipeline.worker.leases import Leases
from pipeline.worker.phases import HandlerCall, Phases, lease_of, offered_events
from pipeline.worker.sender import CohortSender, MutationSender, MutationToSend
from pipeline.worker.settings import HandlerDurations, WorkerPolicy
from pipeline.worker.stragglers import Stragglers
from pipeline.workflows.registry import Registry

log = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P", bound=PreparedRun | RunOutput)
DispatchNext = Callable[[Sequence[RunId]], None]
Verb = Callable[[Transaction, Sequence[P]], BatchResult[RunRow]]


#: Made before a worker forks, so that its processes share it and no process of another worker has it:
#: host names and process ids are not unique across containers.
_WORKER_ID = secrets.token_hex(4)


_LOCK_BUDGET_SECONDS = 10  #: for the runs of a cohort that wait one by one for what another transaction holds


def process_name(pid: int | None = None) -> str:
    """The name under which a process of this worker holds its runs."""
    return f"{socket.gethostname()}:{_WORKER_ID}:{os.getpid() if pid is None else pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """What a phase task did: which runs go on, and whose workflows may have more to start."""

    continuing: tuple[RunId, ...] = ()
    unknown_handler_runs: tuple[RunId, ...] = ()  #: runs of handlers this process does not know
    workflows: frozenset[str] = frozenset()


class Runner:
    """Runs phases of the workflows this process knows."""

    def __init__(
        self, db: Database, registry: Registry, leases: Leases, policy: WorkerPolicy, jitter: Callable[[], float]
    ) -> None:
        self.db, self.registry, self.leases, self.policy, self.jitter = db, registry, leases, policy, jitter
        self.phases = Phases(db, registry, step_limit=policy.step_limit, limits=policy.limits)
        self.durations = HandlerDurations()
        self.outgrown = frozenset[tuple[str, str]]()  #: consumers whose state newer code merges, and this code cannot
        self.sender = MutationSender(db, registry, leases, policy, jitter)
        self.stragglers = Stragglers()

    def prepare(self, ids: Sequence[UUID]) -> PhaseResult:
        """Select and reserve inputs."""
        with self._claim(PhaseTask.PREPARE, ids, CrashPoint.PREPARE_CLAIMED) as claims:
            planned, failed, rest = self._call_each(
                claims.claimed, lambda run: self.phases.prepare(run, offered_events(run)), PhaseTask.PREPARE
            )
            plans = sealing.sealed_plans(self.db, planned)
            reach(CrashPoint.PREPARE_RAN)
            landed = self._write(
                lambda tx, items: runs.finish_prepare(tx, items, self.policy.limits), plans, failed, rest
            )
            reach(CrashPoint.PREPARE_SAVED)
        return _phase_result(claims, [run.id for run in landed])

    def mutate(self, ids: Sequence[UUID], dispatch_next: DispatchNext) -> PhaseResult:
        """Ask for mutations and carry them out. Slow calls outlive the task; their runs are handed on later."""
        with self._claim(PhaseTask.MUTATE, ids, CrashPoint.MUTATE_CLAIMED) as claims:
            fresh = [run for run in claims.claimed if run.mutation_id is None]
            approved = [MutationToSend(run=run, request=None) for run in claims.claimed if run.mutation_id is not None]
            answers, failed, rest = self._call_each(fresh, self.phases.mutate, PhaseTask.MUTATE)
            asked = [MutationToSend(run=run, request=answer.request, cost=answer.cost) for run, answer in answers]
            silent = {lease_of(item.run): item.cost for item in asked if item.request is None}
            if silent or failed or rest:
                with self.db.transaction() as tx:
                    if failed:
                        stops.lock_workflows(tx, (item.lease for item in failed))
                    if silent:
                        runs.no_mutation(tx, list(silent), silent)
                    ended = self._stop_and_hand_back(tx, failed, rest)
                phase_observer.record_finished(item.run_id for item in silent)
                phase_observer.record_failed(ended)
            self.leases.drop([*silent, *(item.lease for item in failed), *rest])
            early = _EarlyDispatch(dispatch_next, self.policy.straggler_wait.total_seconds())
            wanted = [*(item for item in asked if item.request is not None), *approved]
            begun = time.monotonic()
            self.sender.send(wanted, early.on_done, lambda cohort: self._follow(cohort, dispatch_next))
            for item in wanted:
                self.durations.record(item.run.handler_id, "calls", (time.monotonic() - begun) / len(wanted))
        left = [run_id for run_id in early.waiting if run_id not in early.dispatched]
        return _phase_result(claims, [*(item.run_id for item in silent), *left])

    def next(self, ids: Sequence[UUID]) -> PhaseResult:
        """Publish what follows, consume the inputs, commit."""
        with self._claim(PhaseTask.NEXT, ids, CrashPoint.NEXT_CLAIMED) as claims:
            answers, failed, rest = self._call_each(claims.claimed, self.phases.next, PhaseTask.NEXT)
            emitted = sealing.sealed_outputs(self.db, answers)
            reach(CrashPoint.NEXT_RAN)
            merge, alone = self._merges(claims.claimed), {run.handler_id for run in claims.claimed}
            self._write(
                lambda tx, items: runs.commit(
                    tx, items, merge=merge, limits=self.policy.limits, exclusive_handlers=alone
                ),
                emitted,
                failed,
                rest,
            )
            reach(CrashPoint.COMMITTED)
        return _phase_result(claims, [])

    def produce(self, ids: Sequence[UUID]) -> PhaseResult:
        """Run producers."""
        with self._claim(PhaseTask.PRODUCE, ids, CrashPoint.PRODUCE_CLAIMED) as claims:
            answers, failed, rest = self._call_each(
                claims.claimed, lambda run: self.phases.produce(run, run.next_run_at or run.now), PhaseTask.PRODUCE
            )
            made = sealing.sealed_outputs(self.db, answers)
            self._write(lambda tx, items: runs.commit_producer(tx, items, self.policy.limits), made, failed, rest)
            reach(CrashPoint.PRODUCED)
        return _phase_result(claims, [])

    @contextmanager
    def _claim(self, task: PhaseTask, ids: Sequence[UUID], point: CrashPoint) -> Iterator[Claims]:
        """Hold runs for a phase. However it ends, they are extended no longer, so that a rescuer can find them."""
        with ExitStack() as last:
            with self.db.autocommit() as tx:
                claims = runs.claim(
                    tx,
                    task,
                    ids,
                    lease_duration=self.policy.lease,
                    worker=process_name(),
                    known_handlers=self._runnable_handlers(tx),
                    known_topics=self.registry.topics,
                )
                ignored = len(ids) - len(claims.claimed) - len(claims.unknown_handler) - claims.idle_count
                last.enter_context(phase_observer.observe(task.method, claims.claimed, task=task, ignored=ignored))
            mine = [lease_of(run) for run in claims.claimed]
            self.leases.hold(mine)
            with self._holding(mine, besides=self.stragglers):
                reach(point)
                yield claims

    @contextmanager
    def _holding(self, leases: Sequence[RunLease], besides: Container[RunLease] = ()) -> Iterator[None]:
        """Stop what is held when the block fails, and hold nothing after it, ``besides`` what is held elsewhere."""
        try:
            yield
        except Exception as error:
            if not is_transient(error):
                mine = [item for item in leases if self.leases.is_held(item) and item not in besides]
                self._stop_held_runs(mine, error)
            raise
        finally:
            self.leases.drop([item for item in leases if item not in besides])

    def _follow(self, cohort: CohortSender, dispatch_next: DispatchNext) -> None:
        """Let the last calls of a cohort outlive its task, for no longer than its time limit."""
        leases = cohort.leases
        cohort.on_done = lambda run_ids, _: dispatch_next(run_ids) if run_ids else None
        self.leases.hold_until(leases, cohort.ends_at)
        phase_observer.keep_open(item.run_id for item in leases)
        self.stragglers.follow(leases, lambda: self._finish(cohort, leases))

    def _finish(self, cohort: CohortSender, leases: Sequence[RunLease]) -> None:
        """Record the outcomes of calls that outlived their task."""
        try:
            with self._holding(leases):
                cohort.run()
        except Exception:
            log.exception("the outcomes of %d slow calls could not be recorded; they are reconciled", len(leases))
        finally:
            phase_observer.end_kept_open()

    def _runnable_handlers(self, tx: Transaction) -> set[tuple[str, str]]:
        """Handlers whose runs this process may take. What has outgrown it waits for a worker that has newer code."""
        self.outgrown = frozenset((name, handler) for name, handler in self.outgrown if _has_overlap(tx, name))
        return self.registry.handlers - self.outgrown

    def _leave_to_newer_code(self, error: OutdatedCodeError) -> None:
        for workflow, handler in frozenset(error.handlers) - self.outgrown:
            log.warning(
                "this worker leaves the state of %r of workflow %r to newer code, whose runs may overtake each other",
                handler,
                workflow,
            )
        self.outgrown |= frozenset(error.handlers)

    def _stop_held_runs(self, mine: Sequence[RunLease], error: Exception) -> None:
        """Stop what this process can do nothing more for, for the true reason, instead of letting leases lapse."""
        cause = classify(error)
        failure = Failure(
            kind=FailureKind.CRASH, message=f"its task failed: {cause.message}", error_type=cause.error_type
        )
        with self.db.transaction() as tx:
            ended = stops.stop(tx, [RunFailure(lease=item, failure=failure) for item in mine], jitter=self.jitter())
        phase_observer.record_failed(ended.updated)

    def _write(
        self, verb: Verb[P], items: Sequence[P], failed: Sequence[RunFailure], rest: Sequence[RunLease]
    ) -> Sequence[RunRow]:
        """Record what a cohort decided, in one transaction; each run that is refused stops by itself.

        What one run made the verb choke on (a merge that raises, a value over its limit, an event that another
        transaction is publishing) is found by writing the runs one by one. When the database cannot be reached, no
        run is at fault, and the write is not repeated.
        """
        try:
            return self._record(verb, items, failed, rest)
        except Exception as error:
            if _is_database_unavailable(error):
                raise
            if not isinstance(error, OutdatedCodeError):
                log.exception("a cohort of %d runs could not be written together; one by one", len(items))
            held_up = is_lock_timeout(error)
        landed, later = self._write_one_by_one(verb, items, held_up=held_up)
        self._record(verb, (), failed, [*rest, *later])
        return landed

    def _write_one_by_one(
        self, verb: Verb[P], items: Sequence[P], *, held_up: bool
    ) -> tuple[Sequence[RunRow], Sequence[RunLease]]:
        """Write each run by itself: what landed, and what is given back: to newer code, or for lack of time."""
        landed: list[RunRow] = []
        later: list[RunLease] = []
        ends_at = time.monotonic() + _LOCK_BUDGET_SECONDS
        for number, item in enumerate(items):
            if held_up and time.monotonic() > ends_at:
                return landed, [*later, *(item.lease for item in items[number:])]
            try:
                landed += self._record(verb, [item], (), (), SHORT_LOCK_TIMEOUT if held_up else None)
            except OutdatedCodeError as error:
                self._leave_to_newer_code(error)
                later.append(item.lease)
            except Exception as error:
                if _is_database_unavailable(error):
                    raise
                held_up |= is_lock_timeout(error)
                failure = _lock_failure(error) if is_lock_timeout(error) else classify(error)
                failure = replace(failure, cost=item.cost)
                self._record(verb, (), [RunFailure(lease=item.lease, failure=failure)], ())
        return landed, later

    def _record(
        self,
        verb: Verb[P],
        items: Sequence[P],
        failed: Sequence[RunFailure],
        rest: Sequence[RunLease],
        lock_wait: timedelta | None = None,
    ) -> Sequence[RunRow]:
        is_one_statement = not (failed or rest or lock_wait or phase_observer.is_timed()) and _is_stateless(items)
        with self.db.autocommit() if is_one_statement else self.db.transaction() as tx:
            if lock_wait is not None:
                tx.set_lock_timeout(lock_wait)
            if failed:
                stops.lock_workflows(tx, (item.lease for item in failed), committing=(item.lease for item in items))
            landing: BatchResult[RunRow] = verb(tx, items) if items else BatchResult(updated=())
            refused = [
                RunFailure(
                    lease=item.lease, failure=replace(classify(landing.refused[item.lease.run_id]), cost=item.cost)
                )
                for item in items
                if not isinstance(landing.refused.get(item.lease.run_id), StaleWriteError | None)
            ]
            ended = self._stop_and_hand_back(tx, failed, rest)
            self._record_latency(tx, landing.updated)
        if refused:
            with self.db.transaction() as tx:  # a stop locks the workflow, and the runs above were locked first
                ended = [*ended, *stops.stop(tx, refused, jitter=self.jitter()).updated]
        phase_observer.record_finished((row.id for row in landing.updated), landing.updated)
        phase_observer.record_failed(ended)
        return landing.updated

    def _record_latency(self, tx: Transaction, landed: Sequence[RunRow]) -> None:
        """How long the inputs of runs that commit have waited: one more read, and only where it is counted."""
        committed = [row.id for row in landed if row.finished_at is not None] if phase_observer.is_timed() else []
        for row in gauges.run_latencies(tx, committed) if committed else ():
            tx.count_on_commit(
                "pipeline.run.latency", {"workflow": row.workflow, "handler": row.handler}, float(row.seconds)
            )

    def _call_each(
        self, claimed: Sequence[ClaimedRunRow], phase: Callable[[ClaimedRunRow], HandlerCall[T]], task: PhaseTask
    ) -> tuple[list[tuple[ClaimedRunRow, T]], list[RunFailure], list[RunLease]]:
        """Call the handler of each run. What the budget does not suffice for is given back, not kept waiting."""
        ends_at = time.monotonic() + self.policy.cohort_budget.total_seconds()
        done: list[tuple[ClaimedRunRow, T]] = []
        failed: list[RunFailure] = []
        answers = self.phases.answers([phase_observer.make_in_span(phase, run) for run in claimed], ends_at=ends_at)
        for call, answer in answers:
            self.durations.record(call.run.handler_id, task.method, call.step.seconds)
            if isinstance(answer, Failure):
                failed.append(RunFailure(lease=lease_of(call.run), failure=answer))
            else:
                done.append((call.run, answer))
        return done, failed, [lease_of(later) for later in claimed[len(answers) :]]

    def _stop_and_hand_back(
        self, tx: Transaction, failed: Sequence[RunFailure], rest: Sequence[RunLease]
    ) -> Sequence[StoppedRun]:
        ended = stops.stop(tx, failed, jitter=self.jitter()).updated if failed else ()
        if rest:
            runs.hand_back(tx, rest)
        return ended

    def _merges(self, claimed: Sequence[ClaimedRunRow]) -> dict[int, Any]:
        """How each handler folds its state: user code like any other step, so that it cannot hold a row for long."""
        found = {
            run.handler_id: self.phases.merge_function(self.registry.consumer(run.workflow, run.handler))
            for run in claimed
        }
        return {handler: merge for handler, merge in found.items() if merge is not None}


def _is_stateless(items: Sequence[PreparedRun | RunOutput]) -> bool:
    """Whether none of these saves a state, which is a second statement."""
    return not any(isinstance(item, RunOutput) and item.has_state for item in items)


def _has_overlap(tx: Transaction, workflow: str) -> bool:
    found = work.workflow(tx, workflow)
    return found is not None and can_overtake(found.concurrency, found.on_uncertain)


def _is_database_unavailable(error: Exception) -> bool:
    """Whether the database cannot be used now, by any run. A lock is kept only from those that need it."""
    return is_transient(error) and not is_lock_timeout(error)


def _lock_failure(error: Exception) -> Failure:
    message = (
        "another transaction holds what this run needs to write, such as the message id of an event it publishes, and "
        "does not end; look for old ones in pg_stat_activity"
    )
    return replace(classify(error), message=message)


def _phase_result(claims: Claims, done: Sequence[Any]) -> PhaseResult:
    """Runs for the rest of the chain. What was given back gets a message of its own from the next tick."""
    onward = tuple(RunId(run_id) for run_id in (*done, *claims.passed))
    return PhaseResult(
        continuing=onward,
        unknown_handler_runs=claims.unknown_handler,
        workflows=frozenset(run.workflow for run in claims.claimed),
    )


class _EarlyDispatch:
    """Hands finished runs on when the rest of their cohort keeps them waiting too long."""

    def __init__(self, dispatch_next: DispatchNext, max_wait: float) -> None:
        self.dispatch_next, self.max_wait = dispatch_next, max_wait
        self.waiting: list[RunId] = []
        self.dispatched: set[RunId] = set()
        self._since = time.monotonic()

    def on_done(self, run_ids: Sequence[RunId], has_more: bool) -> None:
        self.waiting.extend(run_ids)
        if not has_more:
            return
        ready = [run_id for run_id in self.waiting if run_id not in self.dispatched]
        if ready and time.monotonic() - self._since > self.max_wait:
            self.dispatch_next(ready)
            self.dispatched.update(ready)
        if not ready:
            self._since = time.monotonic()
