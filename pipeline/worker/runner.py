"""The three phases of a cohort, as the three tasks call them.

Each takes run ids, claims what it may, calls the handlers, writes everything that succeeded in one
transaction, stops each run that failed by itself, and returns the runs that go on. Delivered twice,
late or out of order, a call finds nothing to claim and changes nothing.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError

from pipeline.domain.errors import OutgrownError, StaleWriteError
from pipeline.domain.failures import Failure, FailureKind, classify
from pipeline.domain.ids import RunId
from pipeline.domain.values import Emitted, Held, Prepared, Stopped
from pipeline.domain.workflows import may_overtake
from pipeline.store.database import SHORT_LOCK_WAIT, Database, Transaction, is_locked_out, passes
from pipeline.store.reads import gauges, work
from pipeline.telemetry import cohorts
from pipeline.telemetry.tracing import spans
from pipeline.transitions import runs, stops
from pipeline.transitions.results import Landing
from pipeline.transitions.runs import Claims
from pipeline.transitions.stops import Ended
from pipeline.worker.crash_points import Point, reach
from pipeline.worker.leases import Leases
from pipeline.worker.phases import Phases, held
from pipeline.worker.sender import Mutator, Wanted
from pipeline.worker.settings import RuntimePolicy, Speeds
from pipeline.workflows.handler_types import Asked
from pipeline.workflows.registry import Registry

log = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P", bound=Prepared | Emitted)
HandOn = Callable[[Sequence[RunId]], None]
Verb = Callable[[Transaction, Sequence[P]], Landing[Row[Any]]]


#: Made before a worker forks, so that its processes share it and no process of another worker has it:
#: host names and process ids are not unique across containers.
_WORKER = secrets.token_hex(4)


_WAITING_SECONDS = 10  #: for the runs of a cohort that wait one by one for what another transaction holds


def process_name(pid: int | None = None) -> str:
    """The name under which a process of this worker holds its runs."""
    return f"{socket.gethostname()}:{_WORKER}:{os.getpid() if pid is None else pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a phase task did: which runs go on, and whose workflows may have more to start."""

    onward: tuple[RunId, ...] = ()
    strange: tuple[RunId, ...] = ()  #: runs of handlers this process does not know
    workflows: frozenset[str] = frozenset()


class Runner:
    """Runs phases of the workflows this process knows."""

    def __init__(
        self, db: Database, registry: Registry, leases: Leases, policy: RuntimePolicy, chance: Callable[[], float]
    ) -> None:
        self.db, self.registry, self.leases, self.policy, self.chance = db, registry, leases, policy, chance
        self.phases = Phases(db, registry, step_limit=policy.step_limit, limits=policy.limits)
        self.speeds = Speeds()
        self.outgrown = frozenset[tuple[str, str]]()  #: consumers whose state newer code merges, and this code cannot
        self.mutator = Mutator(db, registry, leases, policy, chance)

    def prepare(self, ids: Sequence[UUID]) -> Ran:
        """Select and pin inputs."""
        with self._claimed("prepare", runs.claim_prepare, ids, Point.PREPARE_CLAIMED) as claims:
            offered = self.phases.slices(claims.claimed)
            plans, failed, rest = self._each(
                claims.claimed, lambda run: self.phases.prepare(run, offered.get(run.id)), Prepared, "prepare"
            )
            reach(Point.PREPARE_RAN)
            landed = self._write(
                lambda tx, items: runs.finish_prepare(tx, items, self.policy.limits), plans, failed, rest
            )
            reach(Point.PREPARE_SAVED)
        return _ran(claims, [run.id for run in landed])

    def mutate(self, ids: Sequence[UUID], hand_on: HandOn) -> Ran:
        """Ask for mutations and carry them out. Runs that waited long enough for slow ones are handed on early."""
        with self._claimed("mutate", runs.claim_mutate, ids, Point.MUTATE_CLAIMED) as claims:
            fresh = [run for run in claims.claimed if run.mutation_id is None]
            approved = [Wanted(run=run, asked=None) for run in claims.claimed if run.mutation_id is not None]
            asked, failed, rest = self._each(fresh, self._ask, Wanted, "mutate")
            silent = [held(item.run) for item in asked if item.asked is None]
            if silent or failed or rest:
                with self.db.transaction() as tx:
                    if silent:
                        runs.no_mutation(tx, silent)
                    ended = self._finish(tx, failed, rest)
                cohorts.done(item.run_id for item in silent)
                _stopped(ended)
            self.leases.drop([*silent, *(item.held for item in failed), *rest])
            early = _Early(hand_on, self.policy.straggler_wait.total_seconds())
            wanted = [*(item for item in asked if item.asked is not None), *approved]
            begun = time.monotonic()
            self.mutator.send(wanted, early.done)
            for item in wanted:
                self.speeds.seen(item.run.handler_id, "calls", (time.monotonic() - begun) / len(wanted))
        left = [run_id for run_id in early.waiting if run_id not in early.gone]
        return _ran(claims, [*(item.run_id for item in silent), *left])

    def next(self, ids: Sequence[UUID]) -> Ran:
        """Publish what follows, consume the inputs, commit."""
        with self._claimed("next", runs.claim_next, ids, Point.NEXT_CLAIMED) as claims:
            emitted, failed, rest = self._each(claims.claimed, self.phases.next, Emitted, "next")
            reach(Point.NEXT_RAN)
            merge, alone = self._merges(claims.claimed), {run.handler_id for run in claims.claimed}
            self._write(
                lambda tx, items: runs.commit(tx, items, merge=merge, limits=self.policy.limits, alone=alone),
                emitted,
                failed,
                rest,
            )
            reach(Point.COMMITTED)
        return _ran(claims, [])

    def produce(self, ids: Sequence[UUID]) -> Ran:
        """Run producers."""
        with self._claimed("produce", runs.claim_produce, ids, Point.PRODUCE_CLAIMED) as claims:
            made, failed, rest = self._each(
                claims.claimed, lambda run: self.phases.produce(run, run.next_run_at or run.now), Emitted, "produce"
            )
            self._write(lambda tx, items: runs.commit_producer(tx, items, self.policy.limits), made, failed, rest)
            reach(Point.PRODUCED)
        return _ran(claims, [])

    @contextmanager
    def _claimed(self, phase: str, verb: Callable[..., Claims], ids: Sequence[UUID], point: Point) -> Iterator[Claims]:
        """Hold runs for a phase. However it ends, they are extended no longer, so that a rescuer can find them."""
        with ExitStack() as last:
            with self.db.transaction() as tx:
                claims = verb(tx, ids, lease=self.policy.lease, worker=process_name(), known=self._known(tx))
                last.callback(spans.watch(phase, claims.claimed).close)
                ignored = len(ids) - len(claims.claimed) - len(claims.strange) - claims.idle
                last.callback(cohorts.watch(phase, claims.claimed, ignored=ignored).close)
            mine = [held(run) for run in claims.claimed]
            self.leases.hold(mine)
            try:
                reach(point)
                yield claims
            except Exception as error:
                if not _is_nobodys_fault(error) and not is_locked_out(error):
                    self._give_up([item for item in mine if self.leases.holds(item)], error)
                raise
            finally:
                self.leases.drop(mine)

    def _known(self, tx: Transaction) -> set[tuple[str, str]]:
        """Handlers whose runs this process may take. What has outgrown it waits for a worker that has newer code."""
        self.outgrown = frozenset((name, handler) for name, handler in self.outgrown if _has_overlap(tx, name))
        return self.registry.handlers - self.outgrown

    def _outgrow(self, error: OutgrownError) -> None:
        for workflow, handler in frozenset(error.handlers) - self.outgrown:
            log.warning(
                "this worker leaves the state of %r of workflow %r to newer code, whose runs may overtake each other",
                handler,
                workflow,
            )
        self.outgrown |= frozenset(error.handlers)

    def _give_up(self, mine: Sequence[Held], error: Exception) -> None:
        """Stop what this process can do nothing more for, for the true reason, instead of letting leases lapse."""
        said = classify(error)
        failure = Failure(
            kind=FailureKind.CRASH, message=f"its task failed: {said.message}", error_type=said.error_type
        )
        with self.db.transaction() as tx:
            ended = stops.stop(tx, [Stopped(held=item, failure=failure) for item in mine], chance=self.chance())
        _stopped(ended.landed)

    def _write(
        self, verb: Verb[P], items: Sequence[P], failed: Sequence[Stopped], rest: Sequence[Held]
    ) -> Sequence[Row[Any]]:
        """Record what a cohort decided, in one transaction; each run that is refused stops by itself.

        What one run made the verb choke on (a merge that raises, a value over its limit, an event that another
        transaction is publishing) is found by writing the runs one by one. A database that cannot be reached is
        nobody's fault and is not asked again.
        """
        try:
            return self._record(verb, items, failed, rest)
        except Exception as error:
            if _is_nobodys_fault(error):
                raise
            if not isinstance(error, OutgrownError):
                log.exception("a cohort of %d runs could not be written together; one by one", len(items))
            held_up = is_locked_out(error)
        landed, later = self._one_by_one(verb, items, held_up=held_up)
        self._record(verb, (), failed, [*rest, *later])
        return landed

    def _one_by_one(
        self, verb: Verb[P], items: Sequence[P], *, held_up: bool
    ) -> tuple[Sequence[Row[Any]], Sequence[Held]]:
        """Write each run by itself: what landed, and what is given back: to newer code, or for lack of time."""
        landed: list[Row[Any]] = []
        later: list[Held] = []
        ends_at = time.monotonic() + _WAITING_SECONDS
        for number, item in enumerate(items):
            if held_up and time.monotonic() > ends_at:
                return landed, [*later, *(item.held for item in items[number:])]
            try:
                landed += self._record(verb, [item], (), (), SHORT_LOCK_WAIT if held_up else None)
            except OutgrownError as error:
                self._outgrow(error)
                later.append(item.held)
            except Exception as error:
                if _is_nobodys_fault(error):
                    raise
                held_up |= is_locked_out(error)
                failure = _locked_out(error) if is_locked_out(error) else classify(error)
                self._record(verb, (), [Stopped(held=item.held, failure=failure)], ())
        return landed, later

    def _record(
        self,
        verb: Verb[P],
        items: Sequence[P],
        failed: Sequence[Stopped],
        rest: Sequence[Held],
        lock_wait: timedelta | None = None,
    ) -> Sequence[Row[Any]]:
        with self.db.transaction() as tx:
            if lock_wait is not None:
                tx.wait_at_most(lock_wait)
            landing: Landing[Row[Any]] = verb(tx, items) if items else Landing(landed=())
            refused = [
                Stopped(held=item.held, failure=classify(landing.refused[item.held.run_id]))
                for item in items
                if not isinstance(landing.refused.get(item.held.run_id), StaleWriteError | None)
            ]
            ended = self._finish(tx, [*failed, *refused], rest)
            self._count_waits(tx, landing.landed)
        spans.over(landing.landed)
        cohorts.done(row.id for row in landing.landed)
        _stopped(ended)
        return landing.landed

    def _count_waits(self, tx: Transaction, landed: Sequence[Row[Any]]) -> None:
        """How long the inputs of runs that commit have waited: one more read, and only where it is counted."""
        committed = [row.id for row in landed if row.finished_at is not None] if cohorts.is_counted() else []
        for row in gauges.waited(tx, committed) if committed else ():
            tx.count("pipeline.run.latency", {"workflow": row.workflow, "handler": row.handler}, float(row.seconds))

    def _each(
        self, claimed: Sequence[Row[Any]], phase: Callable[[Row[Any]], Any], kind: type[T], name: str
    ) -> tuple[list[T], list[Stopped], list[Held]]:
        """Call the handler of each run. What the budget does not suffice for is given back, not kept waiting."""
        phase = spans.watched(phase)
        done: list[T] = []
        failed: list[Stopped] = []
        ends_at = time.monotonic() + self.policy.cohort_budget.total_seconds()
        for number, run in enumerate(claimed):
            begun = time.monotonic()
            if number and begun > ends_at:
                return done, failed, [held(later) for later in claimed[number:]]
            answer = phase(run)
            self.speeds.seen(run.handler_id, name, time.monotonic() - begun)
            if isinstance(answer, Failure):
                failed.append(Stopped(held=held(run), failure=answer))
            else:
                assert isinstance(answer, kind)
                done.append(answer)
        return done, failed, []

    def _ask(self, run: Row[Any]) -> Wanted | Failure:
        answer = self.phases.mutate(run)
        if isinstance(answer, Failure):
            return answer
        return Wanted(run=run, asked=answer if isinstance(answer, Asked) else None)

    def _finish(self, tx: Transaction, failed: Sequence[Stopped], rest: Sequence[Held]) -> Sequence[Ended]:
        ended = stops.stop(tx, failed, chance=self.chance()).landed if failed else ()
        if rest:
            runs.release(tx, rest)
        return ended

    def _merges(self, claimed: Sequence[Row[Any]]) -> dict[int, Any]:
        """How each handler folds its state: user code like any other step, so that it cannot hold a row for long."""
        found = {
            run.handler_id: self.phases.merge(self.registry.consumer(run.workflow, run.handler)) for run in claimed
        }
        return {handler: merge for handler, merge in found.items() if merge is not None}


def _has_overlap(tx: Transaction, workflow: str) -> bool:
    found = work.workflow(tx, workflow)
    return found is not None and may_overtake(found.concurrency, found.on_uncertain)


def _is_nobodys_fault(error: Exception) -> bool:
    """Whether the database cannot be used now, by any run. A lock is kept only from those that need it."""
    if is_locked_out(error):
        return False
    passing = isinstance(error, DBAPIError) and passes(error)
    return passing or isinstance(error, OperationalError | InterfaceError | TimeoutError)


def _locked_out(error: Exception) -> Failure:
    words = (
        "another transaction holds what this run needs to write, such as the message id of an event it publishes, and "
        "does not end; look for old ones in pg_stat_activity"
    )
    return replace(classify(error), message=words)


def _stopped(ended: Sequence[Ended]) -> None:
    """Show that runs were stopped in this phase."""
    spans.stopped(ended)
    cohorts.failed(item.run_id for item in ended)


def _ran(claims: Claims, done: Sequence[Any]) -> Ran:
    """Runs for the rest of the chain. What was given back gets a message of its own from the next tick."""
    onward = tuple(RunId(run_id) for run_id in (*done, *claims.passed))
    return Ran(onward=onward, strange=claims.strange, workflows=frozenset(run.workflow for run in claims.claimed))


class _Early:
    """Hands finished runs on when the rest of their cohort keeps them waiting too long."""

    def __init__(self, hand_on: HandOn, patience: float) -> None:
        self.hand_on, self.patience = hand_on, patience
        self.waiting: list[RunId] = []
        self.gone: set[RunId] = set()
        self._since = time.monotonic()

    def done(self, run_ids: Sequence[RunId]) -> None:
        self.waiting.extend(run_ids)
        ready = [run_id for run_id in self.waiting if run_id not in self.gone]
        if ready and time.monotonic() - self._since > self.patience:
            self.hand_on(ready)
            self.gone.update(ready)
        if not ready:
            self._since = time.monotonic()
