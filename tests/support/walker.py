"""A worker and a scheduler made of nothing but the verbs, one transaction per step.

The runtime will do the same through Celery. Here every commit boundary is visible, so a test can
let the process die at each of them and let another walker pick up what is left.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.ids import EventId, Fence, RunId
from pipeline.domain.mutations import Evidence, Resolver
from pipeline.domain.scheduling import HandlerFacts, due
from pipeline.domain.values import (
    Applied,
    Emitted,
    Failed,
    Held,
    NewEvent,
    Person,
    Prepared,
    Request,
    Reservation,
    Stopped,
)
from pipeline.domain.workflows import HandlerKind
from pipeline.execution import mutations, recovery, runs, starts, stops, workflows
from pipeline.store import views
from pipeline.store.database import Database
from tests.factories import IN, LEASE, OUT
from tests.support.world import RefusedError, TimedOutError, World

PERSON = Person(name="ada", reason="asked the world")


@dataclass
class Walker:
    """Walks runs of one workflow. ``next_fails`` holds the kinds that the next emits will fail with."""

    db: Database
    world: World
    workflow: str = "billing"
    handler: str = "send"
    next_fails: list[FailureKind] = field(default_factory=list)
    batch: int = 1

    def walk_new(self, count: int = 1) -> int:
        """Start what can be started and walk it as far as it gets."""
        with self.db.transaction() as tx:
            started = starts.start(tx, self.workflow, self.handler, count=count).runs
        for run in started:
            self.walk(run.id)
        return len(started)

    def walk(self, run_id: UUID) -> None:
        """Prepare, mutate, next: as the three tasks of a chain would, each claiming the run anew."""
        self._prepare(run_id)
        self._mutate(run_id)
        self._next(run_id)

    def _prepare(self, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            claims = runs.claim_prepare(tx, [run_id], lease=LEASE, worker="w").claimed
        for run in claims:
            with self.db.transaction() as tx:
                ids = tuple(EventId(row.id) for row in views.peeked(tx, run, IN, limit=self.batch))
                reservations = (Reservation(topic=IN, ids=ids),) if ids else ()
                runs.finish_prepare(tx, [Prepared(held=_held(run), reservations=reservations)]).only()

    def _mutate(self, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            claims = runs.claim_mutate(tx, [run_id], lease=LEASE, worker="w").claimed
        for run in claims:
            with self.db.transaction() as tx:
                sent = mutations.begin_mutation(tx, [_request(run)]).only()
            self._send(run, sent)

    def _send(self, run: Row[Any], sent: Row[Any]) -> None:
        """The call is made outside any transaction; its verdict is written in one."""
        fence = Fence(run.fence)
        try:
            result = self.world.send(sent.idempotency_key, run.event_ids)
        except RefusedError as error:
            with self.db.transaction() as tx:
                verdict = Failed(mutation_id=sent.id, error=str(error), evidence=Evidence.DEFINITE, fence=fence)
                mutations.fail(tx, [verdict]).only()
                _stop(tx, run, FailureKind.TRANSIENT)
        except TimedOutError:
            with self.db.transaction() as tx:
                _stop(tx, run, FailureKind.TRANSIENT)
        else:
            with self.db.transaction() as tx:
                mutations.apply(tx, [Applied(mutation_id=sent.id, result=result, fence=fence)]).only()

    def _next(self, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            claims = runs.claim_next(tx, [run_id], lease=LEASE, worker="w").claimed
        for run in claims:
            with self.db.transaction() as tx:
                if self.next_fails:
                    _stop(tx, run, self.next_fails.pop(0))
                    continue
                outputs = tuple(
                    NewEvent(topic=OUT, message_id=f"out:{event}", payload={"of": event}) for event in run.event_ids
                )
                runs.commit(tx, [Emitted(held=_held(run), events=outputs)]).only()

    def settle(self, rounds: int = 40) -> None:
        """Be every sweep, the scheduler and a person at once, until nothing is left to do."""
        for _ in range(rounds):
            self.db.advance(timedelta(hours=1))
            if not self._round():
                return
        raise AssertionError(f"still not settled after {rounds} rounds")

    def _round(self) -> bool:
        recovered = recovery.recover(self.db)
        moved = bool(recovered.runs or recovered.sessions or recovered.maintenance_tasks)
        moved |= self._reconcile()
        self._persons_turn()
        with self.db.transaction() as tx:
            unheld = [row.id for row in views.unheld_runs(tx, silence=timedelta(0))]
            retryable = views.retryable_runs(tx, self.workflow)
        for run_id in unheld:
            self.walk(run_id)
        for run_id in retryable:
            with self.db.transaction() as tx:
                carried = starts.retry(tx, [run_id]).runs
            for run in carried:
                self.walk(run.id)
        return bool(moved or unheld or retryable or (self._is_due() and self.walk_new(count=8)))

    def _reconcile(self) -> bool:
        """Ask the world about every mutation in doubt, the look booked before it begins."""
        with self.db.transaction() as tx:
            doubted = [*views.due_mutations(tx)]
            mutations.book(tx, [(m.id, m.reconcile_attempts, timedelta(seconds=10)) for m in doubted])
        for mutation in doubted:
            with self.db.transaction() as tx:
                if self.world.has(mutation.idempotency_key):
                    mutations.apply(tx, [Applied(mutation_id=mutation.id)], by=Resolver.RECONCILE).only()
                else:
                    verdict = Failed(mutation_id=mutation.id, error="not found", evidence=Evidence.ABSENCE)
                    mutations.fail(tx, [verdict], by=Resolver.RECONCILE).only()
        return bool(doubted)

    def _persons_turn(self) -> None:
        """Settle what nobody can know by the world's own truth, mend code, lift blocks."""
        with self.db.transaction() as tx:
            for mutation_id in views.blocking_mutations(tx, self.workflow):
                (mutation,) = views.mutations(tx, [mutation_id])
                if self.world.has(mutation.idempotency_key):
                    mutations.happened(tx, mutation.id, PERSON)
                else:
                    mutations.did_not_happen(tx, mutation.id, PERSON)
            workflows.exit_maintenance(tx, self.workflow, PERSON)
            workflows.resume(tx, self.workflow, PERSON)

    def _is_due(self) -> bool:
        with self.db.transaction() as tx:
            facts = [row for row in views.due_facts(tx, self.workflow) if row.name == self.handler]
        names = HandlerFacts.__dataclass_fields__
        return any(due(HandlerFacts(**{name: _fact(row, name) for name in names}), row.now) for row in facts)


def _fact(row: Row[Any], name: str) -> Any:
    return HandlerKind(row.kind) if name == "kind" else getattr(row, name)


def _held(run: Row[Any]) -> Held:
    return Held(RunId(run.id), Fence(run.fence))


def _stop(tx: Any, run: Row[Any], kind: FailureKind) -> None:
    stops.stop(tx, [Stopped(held=_held(run), failure=Failure(kind=kind, message=str(kind)))]).only()


def _request(run: Row[Any]) -> Request:
    return Request(
        held=_held(run),
        connector="world",
        operation="do",
        params={"events": list(run.event_ids)},
        request_hash="h",
        idempotency_key=f"run:{run.id}",
        timeout=timedelta(seconds=5),
        reconcilable=True,
    )
