"""Carrying out mutations: written down before they are sent, and their outcome written down as it comes.

At most so many calls are in the air; each wave of ledger rows is committed in flight right before it
is sent, so a crash leaves in doubt only what was in the air. What arrives together is recorded in one
commit; a slow call delays nobody else's record.
"""

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import InterfaceError, OperationalError

from pipeline.connectors.sdk import Applied as Found
from pipeline.connectors.sdk import Call, NotFound, Operation, Retry
from pipeline.domain.errors import AuthError, LogicError, PayloadError, TransientError
from pipeline.domain.failures import Failure, FailureKind, classify
from pipeline.domain.ids import Fence, MutationId, RunId
from pipeline.domain.limits import Limits
from pipeline.domain.mutations import Evidence, MutationStatus
from pipeline.domain.payloads import checked_json
from pipeline.domain.values import Applied, Failed, Held, Request, Stopped
from pipeline.engine.calls import Calls, Finished
from pipeline.engine.steps import TimedOutError
from pipeline.execution import mutations, runs, stops
from pipeline.runtime.leases import Leases
from pipeline.runtime.phases import held
from pipeline.runtime.points import Point, reach
from pipeline.runtime.policy import RuntimePolicy
from pipeline.runtime.registry import Registry
from pipeline.runtime.shown import Asked
from pipeline.store import views
from pipeline.store.database import Database, Transaction

log = logging.getLogger(__name__)

#: What a connector raises to say that nothing happened. Everything else leaves the outcome unknown.
DEFINITE = (LogicError, TransientError, AuthError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A claimed run and the mutation it asks for; None when a person approved one that is in the ledger."""

    run: Row[Any]
    asked: Asked | None


@dataclass(slots=True, kw_only=True)
class _Flight:
    """One mutation in the air, or being looked for."""

    held: Held
    mutation: Row[Any]
    operation: Operation[Any]
    ends_at: float  #: on the monotonic clock; nothing may be sent after it, whatever froze this process meanwhile
    looks: bool = False
    doubt: str = ""


class Mutator:
    """Sends what runs ask for."""

    def __init__(self, db: Database, registry: Registry, leases: Leases, policy: RuntimePolicy) -> None:
        self.db, self.registry, self.leases, self.policy = db, registry, leases, policy
        self._local = threading.local()

    def send(self, wanted: Sequence[Wanted], on_done: Callable[[Sequence[RunId]], None]) -> None:
        """Carry out every request; ``on_done`` hears of runs whose outcome is recorded."""
        calls = self._calls()
        try:
            self._send(deque(wanted), calls, on_done)
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

    def _send(self, waiting: deque[Wanted], calls: Calls, on_done: Callable[[Sequence[RunId]], None]) -> None:
        flights: dict[RunId, _Flight] = {}
        began, budget = time.monotonic(), self.policy.mutation_budget.total_seconds()
        count = len(waiting)
        while waiting or flights:
            if waiting and len(waiting) < count and time.monotonic() - began > budget:
                self._give_back(waiting)
            free = self.policy.mutation_concurrency - len(flights)
            wave = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            for flight in self._begin(wave) if wave else ():
                flights[flight.held.run_id] = flight
                self._launch(calls, flight)
            ended = [(flights.pop(RunId(item.key)), item) for item in calls.wait(1.0)]  # type: ignore[arg-type]
            for flight in self._record(ended):
                flights[flight.held.run_id] = flight
                self._launch(calls, flight)
            on_done([flight.held.run_id for flight, _ in ended if flight.held.run_id not in flights])

    def _give_back(self, waiting: deque[Wanted]) -> None:
        """What there was no time for goes back before anything of it is in the ledger; the next tick rings for it."""
        rest = [held(item.run) for item in waiting]
        waiting.clear()
        with self.db.transaction() as tx:
            runs.release(tx, rest)
        self.leases.drop(rest)

    def _begin(self, wave: Sequence[Wanted]) -> list[_Flight]:
        """Commit a wave to the ledger. Whoever is refused was taken over by somebody else and is dropped.

        The deadline counts from before the commit, so it is never later than the one in the ledger: a process
        that was frozen in between finds it passed, and sends nothing for a run that was settled without it.
        """
        begun = time.monotonic()
        by_id = {item.run.id: item.run for item in wave}
        fresh = [self._request(item.run, item.asked) for item in wave if item.asked is not None]
        approved = [held(item.run) for item in wave if item.asked is None]
        with self.db.transaction() as tx:
            landed = [*mutations.begin_mutation(tx, fresh, self.policy.limits).landed] if fresh else []
            known = self._still_known(tx, approved, by_id)
            landed += mutations.send(tx, known).landed if known else ()
        reach(Point.IN_FLIGHT)
        waiting = [row for row in landed if row.status == MutationStatus.PENDING]
        self.leases.drop([held(by_id[row.run_id]) for row in waiting])
        return [
            _Flight(
                held=held(by_id[row.run_id]),
                mutation=row,
                operation=self._operation(row),
                ends_at=begun + self._operation(row).timeout.total_seconds(),
            )
            for row in landed
            if row.status == MutationStatus.IN_FLIGHT
        ]

    def _still_known(self, tx: Transaction, approved: Sequence[Held], by_id: dict[Any, Row[Any]]) -> list[Held]:
        """Requests that can be sent. One whose operation is gone from the code is void, and its run stops."""
        if not approved:
            return []
        rows = views.mutations(tx, [by_id[item.run_id].mutation_id for item in approved])
        gone = {row.run_id: f"{row.connector}.{row.operation}" for row in rows if self._found(row) is None}
        stopped = [
            Stopped(held=item, failure=classify(LogicError(f"{gone[item.run_id]} is gone from the code")))
            for item in approved
            if item.run_id in gone
        ]
        if stopped:
            stops.stop(tx, stopped)
        return [item for item in approved if item.run_id not in gone]

    def _found(self, row: Row[Any]) -> Operation[Any] | None:
        connector = self.registry.connectors.get(row.connector)
        return type(connector).operations().get(row.operation) if connector else None

    def _request(self, run: Row[Any], asked: Asked) -> Request:
        operation = type(self.registry.connectors[asked.connector]).operations()[asked.operation]
        body = json.dumps([asked.connector, asked.operation, asked.params], sort_keys=True, default=str)
        return Request(
            held=held(run),
            connector=asked.connector,
            operation=asked.operation,
            params=asked.params,
            request_hash=hashlib.sha256(body.encode()).hexdigest(),
            idempotency_key=f"{run.workflow}:{run.id}",
            timeout=operation.timeout,
            settle=operation.settle,
            reconcilable=operation.can_reconcile,
            needs_approval=bool((run.prepare_result or {}).get("approval")),
        )

    def _operation(self, row: Row[Any]) -> Operation[Any]:
        return type(self.registry.connectors[row.connector]).operations()[row.operation]

    def _launch(self, calls: Calls, flight: _Flight) -> None:
        """Put a call in the air, unless its time has passed or the run was found to be somebody else's."""
        connector = self.registry.connectors[flight.mutation.connector]
        call = Call.within(flight.mutation.idempotency_key, flight.operation.policy.immediate_timeout)
        function = flight.operation.look if flight.looks else flight.operation.function
        if self.leases.is_lost(flight.held):
            function = _refuse_lost
        elif not flight.looks and time.monotonic() >= flight.ends_at:
            function = _refuse_late
        elif not flight.looks:
            call = Call(idempotency_key=flight.mutation.idempotency_key, ends_at=flight.ends_at)
        calls.launch(
            flight.held.run_id, _with_params, function, connector, call, flight.mutation.params, ends_at=call.ends_at
        )

    def _record(self, ended: Sequence[tuple[_Flight, Finished]]) -> list[_Flight]:
        """Write down outcomes; return the flights whose outcome must be looked for first."""
        if ended:
            reach(Point.CALLED)
        looks = [flight for flight, finished in ended if _must_look(flight, finished)]
        known = [(flight, finished) for flight, finished in ended if flight not in looks]
        if known:
            self._persist(known)
            reach(Point.OUTCOME_SAVED)
            self.leases.drop([flight.held for flight, _ in known])
        return looks

    def _persist(self, known: Sequence[tuple[_Flight, Finished]]) -> None:
        """Write answers down, again and again while the database is away: they exist nowhere else.

        After a lease's time somebody else has taken the runs for dead, and finds out in another way.
        """
        for pause in self._pauses():
            try:
                with self.db.transaction() as tx:
                    self._write(tx, known)
            except (OperationalError, InterfaceError) as error:
                if pause is None:
                    raise
                log.warning("%d answers could not be written down, trying again: %s", len(known), error)
                threading.Event().wait(pause)
            else:
                return

    def _pauses(self) -> Iterator[float | None]:
        """How long to wait between tries, then None: for the last one."""
        ends_at, pause = time.monotonic() + self.policy.lease.total_seconds(), 0.05
        while time.monotonic() < ends_at:
            yield pause
            pause = min(2.0, pause * 2)
        yield None

    def _write(self, tx: Transaction, known: Sequence[tuple[_Flight, Finished]]) -> None:
        applied = [
            _applied(flight, finished, self.policy.limits) for flight, finished in known if _happened(flight, finished)
        ]
        refused = [(flight, finished) for flight, finished in known if _did_not(flight, finished)]
        if applied:
            mutations.apply(tx, applied, limits=self.policy.limits)
        verdicts = [_failed(flight, finished) for flight, finished in refused]
        too_early = mutations.fail(tx, verdicts).refused if verdicts else {}
        stopped = [
            Stopped(held=flight.held, failure=_failure(flight, finished))
            for flight, finished in known
            if not _happened(flight, finished)
        ]
        if stopped:
            stops.stop(tx, stopped)
        for mutation_id, error in too_early.items():
            log.info("mutation.in_doubt", extra={"mutation_id": mutation_id, "reason": str(error)})


def _with_params(function: Callable[..., Any], connector: Any, call: Call, params: dict[str, Any]) -> Any:
    if not call.remaining:
        _refuse_late()
    return function(connector, call, **params)


def _refuse_lost(*_: Any, **__: Any) -> Any:
    raise TransientError("the run was taken over before its mutation was sent")


def _refuse_late(*_: Any, **__: Any) -> Any:
    raise TransientError("the time for its mutation had passed before anything was sent")


def _must_look(flight: _Flight, finished: Finished) -> bool:
    """An unknown outcome is looked for once, at once, where the operation knows how."""
    if flight.looks or finished.error is None or _did_not(flight, finished):
        return False
    flight.doubt = classify(finished.error).message
    flight.looks = flight.operation.can_reconcile
    return flight.looks


def _timed_out(finished: Finished) -> bool:
    return isinstance(finished.error, TimedOutError)


def _happened(flight: _Flight, finished: Finished) -> bool:
    if finished.error is not None:
        return False
    return isinstance(finished.value, Found) if flight.looks else True


def _did_not(flight: _Flight, finished: Finished) -> bool:
    if flight.looks:
        return isinstance(finished.value, NotFound)
    return isinstance(finished.error, DEFINITE) and not _timed_out(finished)


def _applied(flight: _Flight, finished: Finished, limits: Limits) -> Applied:
    """It happened, whatever its result looks like: a result that cannot be stored is described instead."""
    result = finished.value.result if flight.looks else finished.value
    try:
        checked_json(result, what="result", limit=limits.result)
    except PayloadError as error:
        result = {"unstorable": str(error)}
    return Applied(mutation_id=_id(flight), result=result, fence=Fence(flight.held.fence))


def _failed(flight: _Flight, finished: Finished) -> Failed:
    if flight.looks:
        return Failed(
            mutation_id=_id(flight), error=finished.value.reason, evidence=Evidence.ABSENCE, fence=flight.held.fence
        )
    assert finished.error is not None
    error = classify(finished.error).message
    return Failed(mutation_id=_id(flight), error=error, evidence=Evidence.DEFINITE, fence=flight.held.fence)


def _failure(flight: _Flight, finished: Finished) -> Failure:
    """Why the run stops: the connector's own words, or the doubt about them."""
    if not flight.looks and finished.error is not None:
        return classify(finished.error)
    reason = finished.value.reason if isinstance(finished.value, NotFound | Retry) else flight.doubt
    return Failure(kind=FailureKind.TRANSIENT, message=reason or flight.doubt, error_type="UnknownOutcome")


def _id(flight: _Flight) -> MutationId:
    return MutationId(flight.mutation.id)
