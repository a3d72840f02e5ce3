"""The three phases of a cohort, as the three tasks call them.

Each takes run ids, claims what it may, calls the handlers, writes everything that succeeded in one
transaction, stops each run that failed by itself, and returns the runs that go on. Delivered twice,
late or out of order, a call finds nothing to claim and changes nothing.
"""

import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Row

from pipeline.domain.failures import Failure, classify
from pipeline.domain.ids import RunId
from pipeline.domain.values import Emitted, Held, Prepared, Stopped
from pipeline.execution import runs, stops
from pipeline.execution.runs import Claims
from pipeline.runtime.leases import Leases
from pipeline.runtime.mutator import Mutator, Wanted
from pipeline.runtime.phases import Phases, held
from pipeline.runtime.points import Point, reach
from pipeline.runtime.policy import RuntimePolicy
from pipeline.runtime.registry import Registry
from pipeline.runtime.shown import Asked
from pipeline.store.database import Database, Transaction

T = TypeVar("T")
HandOn = Callable[[Sequence[RunId]], None]


def process_name(pid: int | None = None) -> str:
    """The name under which a process holds its runs."""
    return f"{socket.gethostname()}:{os.getpid() if pid is None else pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a phase task did: which runs go on, and whose workflows may have more to start."""

    onward: tuple[RunId, ...] = ()
    workflows: frozenset[str] = frozenset()


class Runner:
    """Runs phases of the workflows this process knows."""

    def __init__(
        self, db: Database, registry: Registry, leases: Leases, policy: RuntimePolicy, chance: Callable[[], float]
    ) -> None:
        self.db, self.registry, self.leases, self.policy, self.chance = db, registry, leases, policy, chance
        self.phases = Phases(db, registry, step_limit=policy.step_limit)
        self.mutator = Mutator(db, registry, leases, policy)

    def prepare(self, ids: Sequence[UUID]) -> Ran:
        """Select and pin inputs."""
        claims = self._claim(runs.claim_prepare, ids, Point.PREPARE_CLAIMED)
        offered = self.phases.slices(claims.claimed)
        plans, failed, rest = self._each(
            claims.claimed, lambda run: self.phases.prepare(run, offered.get(run.id)), Prepared
        )
        reach(Point.PREPARE_RAN)
        with self.db.transaction() as tx:
            landing = runs.finish_prepare(tx, plans, self.policy.limits) if plans else None
            refused = landing.refused if landing else {}
            failed += [
                Stopped(held=plan.held, failure=classify(refused[plan.held.run_id]))
                for plan in plans
                if plan.held.run_id in refused
            ]
            self._finish(tx, failed, rest)
        reach(Point.PREPARE_SAVED)
        self._drop(claims)
        return _ran(claims, [run.id for run in landing.landed] if landing else [])

    def mutate(self, ids: Sequence[UUID], hand_on: HandOn) -> Ran:
        """Ask for mutations and carry them out. Runs that waited long enough for slow ones are handed on early."""
        claims = self._claim(runs.claim_mutate, ids, Point.MUTATE_CLAIMED)
        fresh = [run for run in claims.claimed if run.mutation_id is None]
        approved = [Wanted(run=run, asked=None) for run in claims.claimed if run.mutation_id is not None]
        asked, failed, rest = self._each(fresh, self._ask, Wanted)
        silent = [held(item.run) for item in asked if item.asked is None]
        with self.db.transaction() as tx:
            if silent:
                runs.no_mutation(tx, silent)
            self._finish(tx, failed, rest)
        self.leases.drop([*silent, *(item.held for item in failed), *rest])
        early = _Early(hand_on, self.policy.straggler_wait.total_seconds())
        self.mutator.send([*(item for item in asked if item.asked is not None), *approved], early.done)
        self._drop(claims)
        left = [run_id for run_id in early.waiting if run_id not in early.gone]
        return _ran(claims, [*(item.run_id for item in silent), *left])

    def next(self, ids: Sequence[UUID]) -> Ran:
        """Publish what follows, consume the inputs, commit."""
        claims = self._claim(runs.claim_next, ids, Point.NEXT_CLAIMED)
        emitted, failed, rest = self._each(claims.claimed, self.phases.next, Emitted)
        reach(Point.NEXT_RAN)
        with self.db.transaction() as tx:
            if emitted:
                runs.commit(tx, emitted, merge=self._merges(claims.claimed), limits=self.policy.limits)
            self._finish(tx, failed, rest)
        reach(Point.COMMITTED)
        self._drop(claims)
        return _ran(claims, [])

    def produce(self, ids: Sequence[UUID]) -> Ran:
        """Run producers."""
        claims = self._claim(runs.claim_produce, ids, Point.PRODUCE_CLAIMED)
        made, failed, rest = self._each(
            claims.claimed, lambda run: self.phases.produce(run, run.next_run_at or run.now), Emitted
        )
        with self.db.transaction() as tx:
            if made:
                runs.commit_producer(tx, made, self.policy.limits)
            self._finish(tx, failed, rest)
        reach(Point.PRODUCED)
        self._drop(claims)
        return _ran(claims, [])

    def _claim(self, verb: Callable[..., Claims], ids: Sequence[UUID], point: Point) -> Claims:
        known: Collection[str] = self.registry.workflows
        with self.db.transaction() as tx:
            claims = verb(tx, ids, lease=self.policy.lease, worker=process_name(), workflows=known)
        self.leases.hold(held(run) for run in claims.claimed)
        reach(point)
        return claims

    def _each(
        self, claimed: Sequence[Row[Any]], phase: Callable[[Row[Any]], Any], kind: type[T]
    ) -> tuple[list[T], list[Stopped], list[Held]]:
        """Call the handler of each run. What the budget does not suffice for is given back, not kept waiting."""
        done: list[T] = []
        failed: list[Stopped] = []
        ends_at = time.monotonic() + self.policy.cohort_budget.total_seconds()
        for number, run in enumerate(claimed):
            if number and time.monotonic() > ends_at:
                return done, failed, [held(later) for later in claimed[number:]]
            answer = phase(run)
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

    def _finish(self, tx: Transaction, failed: Sequence[Stopped], rest: Sequence[Held]) -> None:
        if failed:
            stops.stop(tx, failed, chance=self.chance())
        if rest:
            runs.release(tx, rest)

    def _drop(self, claims: Claims) -> None:
        self.leases.drop([held(run) for run in claims.claimed])

    def _merges(self, claimed: Sequence[Row[Any]]) -> dict[int, Any]:
        found = {run.handler_id: self.registry.consumer(run.workflow, run.handler).merge for run in claimed}
        return {handler: merge for handler, merge in found.items() if merge is not None}


def _ran(claims: Claims, done: Sequence[Any]) -> Ran:
    """Runs for the rest of the chain. What was given back gets a message of its own from the next tick."""
    onward = tuple(RunId(run_id) for run_id in (*done, *claims.passed))
    return Ran(onward=onward, workflows=frozenset(run.workflow for run in claims.claimed))


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
