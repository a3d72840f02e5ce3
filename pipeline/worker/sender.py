"""Carrying out mutations: written down before they are sent, and their outcome written down as it comes.

At most so many calls are in the air; each wave of ledger rows is committed in flight right before it
is sent, so a crash leaves in doubt only what was in the air. What arrives together is recorded in one
commit; a slow call delays nobody else's record. What a call's end means is decided by ``outcomes``.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError

from pipeline.connectors.sdk import Call, Operation
from pipeline.consumer_engine.calls import Calls, Finished
from pipeline.consumer_engine.steps import TimedOutError
from pipeline.domain.errors import LogicError, StaleWriteError
from pipeline.domain.failures import Failure, FailureKind, classify
from pipeline.domain.ids import RunId
from pipeline.domain.states import MutationStatus
from pipeline.domain.values import Applied, Held, Person, Request, Stopped
from pipeline.store.database import Database, Transaction, passes
from pipeline.store.reads import work
from pipeline.telemetry import cohorts
from pipeline.telemetry.tracing import spans
from pipeline.transitions import breakers, late_effects, mutations, runs, stops
from pipeline.transitions.breakers import Admission, OperationName
from pipeline.transitions.stops import Ended
from pipeline.worker import calls as worker_calls
from pipeline.worker.calls import Flight
from pipeline.worker.crash_points import Point, reach
from pipeline.worker.leases import Leases
from pipeline.worker.outcomes import Judged, Step, Tried, judge
from pipeline.worker.phases import held
from pipeline.worker.settings import RuntimePolicy
from pipeline.workflows.handler_types import Asked, request_hash
from pipeline.workflows.registry import Registry

log = logging.getLogger(__name__)

WORKER = Person(name="worker", reason="the call was answered after its outcome had been settled")
OnDone = Callable[[Sequence[RunId]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A claimed run and the mutation it asks for; None when a person approved one that is in the ledger."""

    run: Row[Any]
    asked: Asked | None


_Ended = tuple[Flight, Judged]
_NOT_DONE = (Step.FAILED, Step.ABSENT)


class Mutator:
    """Sends what runs ask for."""

    def __init__(
        self,
        db: Database,
        registry: Registry,
        leases: Leases,
        policy: RuntimePolicy,
        chance: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.db, self.registry, self.leases, self.policy, self.chance = db, registry, leases, policy, chance
        self._local = threading.local()

    def send(self, wanted: Sequence[Wanted], on_done: OnDone) -> None:
        """Carry out every request; ``on_done`` hears of runs whose outcome is recorded."""
        calls = self._calls()
        try:
            _Cohort(self, calls, deque(wanted), on_done).run()
        except BaseException:
            calls.close()
            del self._local.calls
            raise

    def _calls(self) -> Calls:
        """The calls of this thread, whose own threads are kept from cohort to cohort."""
        if not hasattr(self._local, "calls"):
            self._local.calls = Calls()
        calls: Calls = self._local.calls
        return calls

    def begin(self, wave: Sequence[Wanted]) -> list[Flight]:
        """Commit a wave to the ledger. Whoever is refused was taken over by somebody else and is dropped.

        The deadline counts from before the commit, so it is never later than the one in the ledger: a process
        that was frozen in between finds it passed, and sends nothing for a run that was settled without it.
        """
        begun, asleep = time.monotonic(), worker_calls.asleep()
        by_id = {item.run.id: item.run for item in wave}
        fresh = [self._request(item.run, item.asked) for item in wave if item.asked is not None]
        approved = [held(item.run) for item in wave if item.asked is None]
        with self.db.transaction() as tx:
            known, void = self._still_known(tx, approved, by_id)
            barred, probes = self._barred(tx, fresh, known)
            if barred:
                runs.release(tx, barred, later=True)
            fresh = [item for item in fresh if item.held not in barred]
            known = {item: name for item, name in known.items() if item not in barred}
            landed = [*mutations.begin_mutation(tx, fresh, self.policy.limits).landed] if fresh else []
            landed += mutations.send(tx, list(known), self._bounds(known)).landed if known else ()
        _stopped(void)
        reach(Point.IN_FLIGHT)
        waiting = [held(by_id[row.run_id]) for row in landed if row.status == MutationStatus.PENDING]
        self.leases.drop([*waiting, *barred])
        sent = [row for row in landed if row.status == MutationStatus.IN_FLIGHT]
        made = [self._flight(row, held(by_id[row.run_id]), begun, asleep) for row in sent]
        for flight in made:
            flight.probes = flight.name in probes
        return made

    def begin_again(self, resting: Sequence[Flight]) -> list[Flight]:
        """Count another attempt and give it a new deadline, before it goes."""
        begun, asleep = time.monotonic(), worker_calls.asleep()
        by_id = {flight.held.run_id: flight for flight in resting}
        with self.db.transaction() as tx:
            landed = mutations.resend(tx, [flight.held for flight in resting]).landed
        landed_at = time.monotonic()
        reach(Point.IN_FLIGHT)
        for row in landed:
            flight = by_id[row.run_id]
            flight.mutation, flight.landed_at, flight.asleep = row, landed_at, asleep
            flight.ends_at = begun + flight.operation.timeout.total_seconds()
        return [by_id[row.run_id] for row in landed]

    def give_back(self, rest: Sequence[Held]) -> None:
        """What there was no time for goes back before anything of it is in the ledger; the next tick rings for it."""
        with self.db.transaction() as tx:
            runs.release(tx, rest)
        self.leases.drop(rest)

    def launch(self, calls: Calls, flight: Flight) -> None:
        """Put a call in the air, unless its time has passed or the run was found to be somebody else's."""
        call = Call.within(flight.mutation.idempotency_key, flight.operation.policy.immediate_timeout)
        function = flight.operation.look if flight.looks else flight.operation.function
        since = timedelta(seconds=time.monotonic() - flight.landed_at)
        flight.asked_at = flight.mutation.sent_at + since if flight.looks else None
        flight.unsent = False
        if self.leases.is_lost(flight.held):
            function, flight.unsent = worker_calls.refuse_lost, True
        elif not flight.looks and flight.is_late:
            function, flight.unsent = worker_calls.refuse_late, True
        elif not flight.looks:
            call = Call(idempotency_key=flight.mutation.idempotency_key, ends_at=flight.ends_at)
        flight.span = spans.call(flight.held.run_id, flight.mutation, looks=flight.looks)
        flight.launched_at = time.monotonic()
        calls.launch(flight.held.run_id, worker_calls.called, function, flight, call, ends_at=call.ends_at)

    def record(self, ended: Sequence[_Ended]) -> None:
        """Write outcomes down, again and again while the database does not take them: they exist nowhere else.

        After a lease's time somebody else has taken the runs for dead, and finds out in another way.
        """
        for pause in self._pauses():
            try:
                with self.db.transaction() as tx:
                    settled, stopped = self._write(tx, ended)
            except (DBAPIError, TimeoutError) as error:
                if pause is None or not _is_away(error):
                    raise
                log.warning("%d answers could not be written down, trying again: %s", len(ended), error)
                threading.Event().wait(pause)
            else:
                break
        cohorts.done(settled)
        _stopped(stopped)
        reach(Point.OUTCOME_SAVED)
        self.leases.drop([flight.held for flight, _ in ended])

    def _pauses(self) -> Iterator[float | None]:
        """How long to wait between tries, then None: for the last one."""
        ends_at, pause = time.monotonic() + self.policy.lease.total_seconds(), 0.05
        while time.monotonic() < ends_at:
            yield pause
            pause = min(2.0, pause * 2)
        yield None

    def _write(self, tx: Transaction, ended: Sequence[_Ended]) -> tuple[Sequence[UUID], Sequence[Ended]]:
        """Record outcomes and stop the runs that did not get theirs. Returns the others, and these."""
        applied = [
            worker_calls.applied(flight, judged, self.policy.limits)
            for flight, judged in ended
            if worker_calls.is_applied(judged)
        ]
        settled = self._apply(tx, applied) if applied else ()
        refused = [worker_calls.failed(flight, judged) for flight, judged in ended if judged.step in _NOT_DONE]
        too_early = mutations.fail(tx, refused).refused if refused else {}
        stopped = [
            Stopped(held=flight.held, failure=judged.failure) for flight, judged in ended if judged.failure is not None
        ]
        gone = stops.stop(tx, stopped, chance=self.chance()).landed if stopped else ()
        doubted = [f for f, j in ended if j.step is Step.DOUBT or f.mutation.id in too_early]
        for name, flight in {flight.name: flight for flight in sorted(doubted, key=worker_calls.is_approved)}.items():
            breakers.judge(tx, name, flight.operation.breaker, flight.mutation.id)
        sent = [(f, j) for f, j in ended if f.probes and not f.looks and not f.unsent and f not in doubted]
        answered = [flight for flight, judged in sent if judged.is_answered]
        for name in {flight.name for flight in answered}:
            breakers.succeeded(tx, name)
        return settled, gone

    def _apply(self, tx: Transaction, applied: Sequence[Applied]) -> Sequence[UUID]:
        """Write down what happened, and return the runs. An answer that comes after the run was taken for dead still
        settles the doubt, and if it was settled otherwise meanwhile, people are told."""
        landing = mutations.apply(tx, applied, limits=self.policy.limits)
        refused = landing.refused
        late = [
            replace(item, fence=None) for item in applied if isinstance(refused.get(item.mutation_id), StaleWriteError)
        ]
        for item in late:
            if mutations.apply(tx, [item], limits=self.policy.limits).refused:
                late_effects.surface(tx, item.mutation_id, item.result, WORKER, is_own=True)
        return [row.run_id for row in landing.landed]

    def _barred(
        self, tx: Transaction, fresh: Sequence[Request], known: dict[Held, OperationName]
    ) -> tuple[list[Held], set[OperationName]]:
        """Who must wait behind an open breaker, and the operations whose probe is among the others."""
        asked = {item.held: (item.connector, item.operation) for item in fresh if not item.needs_approval} | known
        open_ = breakers.admit(tx, set(asked.values())) if asked else {}
        probes = {name for name, admission in open_.items() if admission is Admission.ONE}
        first = {name: next(item for item, its in asked.items() if its == name) for name in probes}
        barred = [item for item, name in asked.items() if name in open_ and first.get(name) != item]
        return barred, probes

    def _still_known(
        self, tx: Transaction, approved: Sequence[Held], by_id: dict[Any, Row[Any]]
    ) -> tuple[dict[Held, OperationName], Sequence[Ended]]:
        """Requests that can be sent. The runs of the others stop."""
        if not approved:
            return {}, ()
        rows = work.mutations(tx, [by_id[item.run_id].mutation_id for item in approved])
        by_run = {row.run_id: row for row in rows}
        problems = {item: problem for item in approved if (problem := self._void(by_run[item.run_id]))}
        stopped = [Stopped(held=item, failure=failure) for item, failure in problems.items()]
        ended = stops.stop(tx, stopped).landed if stopped else ()
        kept = [item for item in approved if item not in problems]
        return {item: (by_run[item.run_id].connector, by_run[item.run_id].operation) for item in kept}, ended

    def _bounds(self, known: dict[Held, OperationName]) -> dict[Held, tuple[timedelta, timedelta]]:
        operations = {item: self._operation(*name) for item, name in known.items()}
        return {item: (operation.timeout, operation.settle) for item, operation in operations.items()}

    def _void(self, row: Row[Any]) -> Failure | None:
        """Why an approved request may not be sent: it is gone from the code, or it would not be what was approved."""
        name = f"{row.connector}.{row.operation}"
        operation = self.registry.operation(row.connector, row.operation)
        if operation is None:
            return classify(LogicError(f"{name} is gone from the code"))
        try:
            if request_hash(row.connector, row.operation, operation.check(row.params)) == row.request_hash:
                return None
            words = f"{name} would not send what was approved: it has changed"
        except LogicError as error:
            words = f"{name} no longer takes what was approved: {error}"
        return Failure(kind=FailureKind.VOID, message=words, error_type="VoidApproval")

    def _request(self, run: Row[Any], asked: Asked) -> Request:
        operation = self._operation(asked.connector, asked.operation)
        return Request(
            held=held(run),
            connector=asked.connector,
            operation=asked.operation,
            params=asked.params,
            request_hash=request_hash(asked.connector, asked.operation, asked.params),
            idempotency_key=f"{run.workflow}:{run.id}",
            timeout=operation.timeout,
            settle=operation.settle,
            watch=next(iter(operation.policy.watch), None),
            reconcilable=operation.can_reconcile,
            needs_approval=bool((run.prepare_result or {}).get("approval")),
        )

    def _flight(self, row: Row[Any], item: Held, begun: float, asleep: float) -> Flight:
        operation = self._operation(row.connector, row.operation)
        return Flight(
            held=item,
            mutation=row,
            connector=self.registry.connectors[row.connector],
            operation=operation,
            ends_at=begun + operation.timeout.total_seconds(),
            asleep=asleep,
            landed_at=time.monotonic(),
        )

    def _operation(self, connector: str, operation: str) -> Operation[Any]:
        found = self.registry.operation(connector, operation)
        assert found is not None
        return found


def _is_away(error: Exception) -> bool:
    """Whether the database may take later what it refuses now: gone, read-only, or every connection is taken."""
    is_known = isinstance(error, OperationalError | InterfaceError | TimeoutError)
    return is_known or (isinstance(error, DBAPIError) and passes(error))


def _stopped(ended: Sequence[Ended]) -> None:
    """Show that runs were stopped in this phase."""
    spans.stopped(ended)
    cohorts.failed(item.run_id for item in ended)


class _Cohort:
    """The mutations of one cohort on their way: waiting, in the air, resting before another attempt."""

    def __init__(self, mutator: Mutator, calls: Calls, waiting: deque[Wanted], on_done: OnDone) -> None:
        self.mutator, self.calls, self.waiting, self.on_done = mutator, calls, waiting, on_done
        self.flights: dict[RunId, Flight] = {}
        self.resting: list[tuple[float, Flight]] = []
        self.count = len(waiting)
        self.closes_at = time.monotonic() + mutator.policy.mutation_budget.total_seconds()

    def run(self) -> None:
        while self.waiting or self.flights or self.resting:
            self._send()
            ended = [(self.flights.pop(RunId(item.key)), item) for item in self.calls.wait(self._patience())]  # type: ignore[arg-type]
            if ended:
                reach(Point.CALLED)
            judged = [(flight, self._judge(flight, finished)) for flight, finished in ended]
            for flight, verdict in judged:
                self._follow(flight, verdict)
            done = [(flight, verdict) for flight, verdict in judged if verdict.step not in (Step.LOOK, Step.AGAIN)]
            if done:
                self.mutator.record(done)
            self.on_done([flight.held.run_id for flight, _ in done])

    def _send(self) -> None:
        """Give back what there is no time for, send what there is room for, and attempt again what has rested."""
        if self.waiting and len(self.waiting) < self.count and time.monotonic() > self.closes_at:
            self.mutator.give_back([held(item.run) for item in self.waiting])
            self.waiting.clear()
        free = self.mutator.policy.mutation_concurrency - len(self.flights)
        wave = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        rested = [flight for at, flight in self.resting if at <= time.monotonic()]
        self.resting = [(at, flight) for at, flight in self.resting if flight not in rested]
        begun = self.mutator.begin(wave) if wave else []
        begun += self.mutator.begin_again(rested) if rested else []
        for flight in begun:
            self._launch(flight)

    def _judge(self, flight: Flight, finished: Finished) -> Judged:
        flight.overdue |= not flight.looks and isinstance(finished.error, TimedOutError)
        tried = Tried(
            connector=flight.connector,
            operation=flight.operation,
            params=flight.mutation.params,
            attempts=flight.mutation.attempts,
            left=timedelta(seconds=self.closes_at - time.monotonic()),
            looked=flight.looks,
            overdue=flight.overdue,
            doubt=flight.doubt,
        )
        verdict = judge(tried, finished, chance=self.mutator.chance())
        spans.ended(flight.span, verdict.step, finished.error)
        worker_calls.counted(flight, verdict, finished)
        return verdict

    def _follow(self, flight: Flight, verdict: Judged) -> None:
        if verdict.step is Step.LOOK:
            flight.looks, flight.doubt = True, verdict.reason
            self._launch(flight)
        elif verdict.step is Step.AGAIN:
            self.resting.append((time.monotonic() + verdict.pause.total_seconds(), flight))

    def _launch(self, flight: Flight) -> None:
        self.flights[flight.held.run_id] = flight
        self.mutator.launch(self.calls, flight)

    def _patience(self) -> float:
        """How long to wait for the next answer: until somebody has rested, and never for long."""
        rest = min((at for at, _ in self.resting), default=time.monotonic() + 1.0)
        return min(1.0, max(0.0, rest - time.monotonic()))
