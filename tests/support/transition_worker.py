"""A worker and a scheduler made of nothing but the verbs, one transaction per step.

The runtime will do the same through Celery. Here every commit boundary is visible, so a test can
let the process die at each of them and let another walker pick up what is left.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from pipeline.background import rescuer
from pipeline.background.scheduler import facts_of
from pipeline.domain.failures import Failure, FailureKind
from pipeline.domain.idempotency import effect_id
from pipeline.domain.scheduling import due_reason
from pipeline.domain.states import EventId, Evidence, Fence, MutationStatus, Phase, PhaseTask, Resolver, RunId
from pipeline.domain.values import (
    Actor,
    AppliedMutation,
    FailedMutation,
    NewEvent,
    PreparedRun,
    Request,
    Reservation,
    RunFailure,
    RunLease,
    RunOutput,
)
from pipeline.store.database import Database, Statement, Transaction
from pipeline.store.reads import ledger, work
from pipeline.transitions import mutations, reconciliation, resolution, runs, starts, stops, workflows
from tests.factories import IN, LEASE, OUT
from tests.support.fake_provider import RefusedError, TimedOutError, World

PERSON = Actor(name="ada", reason="asked the world")


@dataclass
class Walker:
    """Walks runs of one workflow. ``prepare_fails`` and ``next_fails``: what the next of these fail with."""

    db: Database
    world: World
    workflow: str = "billing"
    handlers: tuple[str, ...] = ("send",)
    topic: str = IN
    prepare_fails: list[FailureKind] = field(default_factory=list)
    next_fails: list[FailureKind] = field(default_factory=list)
    batch: int = 1
    produces: int = 0  #: how many events a producer run publishes
    needs_approval: bool = False
    poison: EventId | None = None  #: no run can mutate for this event
    skips: bool = False  #: nobody can be asked about a doubt, and the person goes on without it

    def walk_new(self, count: int = 1) -> int:
        """Start what can be started and walk it as far as it gets."""
        return sum(self._walk_new_of(handler, count) for handler in self.handlers)

    def _walk_new_of(self, handler: str, count: int) -> int:
        with self.db.transaction() as tx:
            started = starts.start(tx, self.workflow, handler, count=count).runs
        for run in started:
            self.walk(run.id)
        return len(started)

    def walk(self, run_id: UUID) -> None:
        """Prepare, mutate, next: as the three tasks of a chain would, each claiming the run anew."""
        self._produce(run_id)
        self._prepare(run_id)
        self._mutate(run_id)
        self._next(run_id)

    def _produce(self, run_id: UUID) -> None:
        if not self.produces:
            return
        with self.db.transaction() as tx:
            claims = runs.claim(tx, PhaseTask.PRODUCE, [run_id], lease_duration=LEASE, worker="w").claimed
        for run in claims:
            made = tuple(NewEvent(topic=self.topic, message_id=f"p{n}", payload={}) for n in range(self.produces))
            slot = run.now + timedelta(days=365)
            with self.db.transaction() as tx:
                runs.commit_producer(tx, [RunOutput(lease=_held(run), events=made, next_run_at=slot)]).only()

    def _prepare(self, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            claims = runs.claim(tx, PhaseTask.PREPARE, [run_id], lease_duration=LEASE, worker="w").claimed
        for run in claims:
            with self.db.transaction() as tx:
                if self.prepare_fails:
                    _stop(tx, run, self.prepare_fails.pop(0))
                    continue
                seen = work.reservable_events(
                    tx, run, self.topic, limit=self.batch, ordered=run.ordered, low_watermark=run.low_watermark
                )
                ids = tuple(EventId(row.id) for row in seen)
                reservations = (Reservation(topic=self.topic, ids=ids),) if ids else ()
                runs.finish_prepare(tx, [PreparedRun(lease=_held(run), reservations=reservations)]).only()

    def _mutate(self, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            claims = runs.claim(tx, PhaseTask.MUTATE, [run_id], lease_duration=LEASE, worker="w").claimed
        for run in claims:
            with self.db.transaction() as tx:
                if self.poison in run.event_ids:
                    _stop(tx, run, FailureKind.TRANSIENT)
                    continue
                if run.phase == Phase.MUTATING:
                    sent = mutations.send(tx, [_held(run)]).only()
                else:
                    sent = mutations.begin_mutation(tx, [self._request(run)]).only()
            if sent.status == MutationStatus.IN_FLIGHT:
                self._send(run, sent)

    def _send(self, run: Any, sent: Any) -> None:
        """The call is made outside any transaction; its verdict is written in one."""
        fence = Fence(run.fence)
        try:
            result = self.world.send(sent.idempotency_key, run.event_ids)
        except RefusedError as error:
            with self.db.transaction() as tx:
                verdict = FailedMutation(mutation_id=sent.id, error=str(error), evidence=Evidence.REFUSED, fence=fence)
                mutations.fail(tx, [verdict]).only()
                _stop(tx, run, FailureKind.TRANSIENT)
        except TimedOutError:
            with self.db.transaction() as tx:
                _stop(tx, run, FailureKind.TRANSIENT)
        else:
            with self.db.transaction() as tx:
                mutations.apply(tx, [AppliedMutation(mutation_id=sent.id, result=result, fence=fence)]).only()

    def _next(self, run_id: UUID) -> None:
        with self.db.transaction() as tx:
            claims = runs.claim(tx, PhaseTask.NEXT, [run_id], lease_duration=LEASE, worker="w").claimed
        for run in claims:
            with self.db.transaction() as tx:
                if self.next_fails:
                    _stop(tx, run, self.next_fails.pop(0))
                    continue
                outputs = tuple(
                    NewEvent(topic=OUT, message_id=f"{run.handler}:{event}", payload={"of": event})
                    for event in run.event_ids
                )
                runs.commit(tx, [RunOutput(lease=_held(run), events=outputs)]).only()

    def settle(self, rounds: int = 40, *, must_end: bool = True) -> None:
        """Be every sweep, the scheduler and a person at once, until nothing is left to do."""
        for _ in range(rounds):
            self.db.advance_clock(timedelta(hours=1))
            if not self._round():
                return
        assert not must_end, f"still not settled after {rounds} rounds"

    def _round(self) -> bool:
        recovered = rescuer.recover(self.db)
        moved = bool(recovered.runs or recovered.sessions or recovered.maintenance_tasks)
        moved |= self._reconcile()
        self._persons_turn()
        with self.db.transaction() as tx:
            unheld = [row.id for row in work.stale_dispatches(tx, redispatch_after=timedelta(0))]
            retryable = work.retryable_runs(tx, self.workflow)
        for run_id in unheld:
            self.walk(run_id)
        for retried in retryable:
            with self.db.transaction() as tx:
                carried = starts.retry(tx, [retried]).runs
            for run in carried:
                self.walk(run.id)
        new = sum(self._walk_new_of(handler, 8) for handler in self._due())
        return bool(moved or unheld or retryable or new)

    def _reconcile(self) -> bool:
        """Ask the world about every mutation in doubt, the look booked before it begins."""
        with self.db.transaction() as tx:
            due = work.mutations(tx, [row.id for row in ledger.due_mutations(tx)])
            doubted = [row for row in due if row.status == MutationStatus.NEEDS_RECONCILE]
            reconciliation.book(tx, [(m.id, m.reconcile_attempts, timedelta(seconds=10)) for m in doubted])
        for mutation in doubted:
            with self.db.transaction() as tx:
                if self.world.has(mutation.idempotency_key):
                    found = AppliedMutation(mutation_id=mutation.id, resolved_by=Resolver.RECONCILE)
                    mutations.apply(tx, [found]).only()
                else:
                    verdict = FailedMutation(
                        mutation_id=mutation.id,
                        error="not found",
                        evidence=Evidence.ABSENCE,
                        resolved_by=Resolver.RECONCILE,
                    )
                    mutations.fail(tx, [verdict]).only()
        return bool(doubted)

    def _persons_turn(self) -> None:
        """Settle what nobody can know by the world's own truth, approve, mend code, lift blocks."""
        with self.db.transaction() as tx:
            asked = tx.all(_ASKED_OF_A_PERSON, workflow=self.workflow)
        for mutation in asked:
            with self.db.transaction() as tx:
                self._decide(tx, mutation)
        with self.db.transaction() as tx:
            workflows.exit_maintenance(tx, self.workflow, PERSON)
            workflows.resume(tx, self.workflow, PERSON)

    def _decide(self, tx: Transaction, mutation: Any) -> None:
        if mutation.status == MutationStatus.PENDING:
            resolution.approve(tx, mutation.id, PERSON, request_hash=mutation.request_hash)
        elif self.skips:
            resolution.skip(tx, mutation.id, PERSON)
        elif self.world.has(mutation.idempotency_key):
            resolution.happened(tx, mutation.id, PERSON)
        else:
            resolution.did_not_happen(tx, mutation.id, PERSON)

    def _due(self) -> list[str]:
        with self.db.transaction() as tx:
            facts = [row for row in work.handler_facts(tx, self.workflow) if row.name in self.handlers]
        return [row.name for row in facts if due_reason(facts_of(row), row.now)]

    def _request(self, run: Any) -> Request:
        return Request(
            lease=_held(run),
            connector="world",
            operation="do",
            params={"events": list(run.event_ids)},
            request_hash="h",
            effect_id=effect_id(run.handler_uid, run.inputs, "h"),
            keyed=self.world.honours_keys,
            timeout=timedelta(seconds=5),
            reconcilable=not self.skips,
            needs_approval=self.needs_approval,
        )


#: What waits for a person: unknown outcomes that nobody can look into, and requests to approve.
_ASKED_OF_A_PERSON = Statement[Any]("""
SELECT m.* FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id
WHERE m.workflow = :workflow
  AND (m.status = 'indeterminate' OR (m.status = 'pending' AND r.status = 'paused:approval')) ORDER BY m.id
""")


def _held(run: Any) -> RunLease:
    return RunLease(RunId(run.id), Fence(run.fence))


def _stop(tx: Any, run: Any, kind: FailureKind) -> None:
    stops.stop(tx, [RunFailure(lease=_held(run), failure=Failure(kind=kind, message=str(kind)))]).only()
