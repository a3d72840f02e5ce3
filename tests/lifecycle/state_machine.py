"""Transitions of workers, sweeps and an operator as random steps, each compared with the model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.idempotency import effect_id
from pipeline.domain.renames import NameKind
from pipeline.domain.states import EventId, Evidence, Fence, MutationId, PhaseTask, RunId
from pipeline.domain.values import (
    AppliedMutation,
    FailedMutation,
    NewEvent,
    PreparedRun,
    Reservation,
    RunFailure,
    RunLease,
    RunOutput,
    WorkflowSpec,
)
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import work
from pipeline.store.reads.invariants import Severity
from pipeline.transitions import events, mutations, registration, resolution, runs, starts, stops, workflows
from pipeline.transitions.stops import StoppedRun
from tests.factories import (
    IN,
    LEASE,
    NO_PAUSE,
    OUT,
    SOMEBODY,
    TIMEOUT,
    a_failure,
    a_request,
    a_workflow,
)
from tests.lifecycle.model import Model, ModelRun
from tests.support import databases
from tests.support.table_reads import rows

PICK = st.integers(min_value=0, max_value=10_000)
KINDS = st.sampled_from([FailureKind.TRANSIENT, FailureKind.LOGIC, FailureKind.AUTH])
#: How often an event may fail alone in walks that set events aside.
ALLOWED = {"max_failures": 4, "quarantine_after": 2}
CLAIM = {"prepare": PhaseTask.PREPARE, "mutate": PhaseTask.MUTATE, "next": PhaseTask.NEXT}


class Lifecycle(RuleBasedStateMachine):
    """Each token is what some worker believes it holds; a crashed worker's token comes back as a zombie."""

    db: Database

    def __init__(self) -> None:
        super().__init__()
        databases.delete_all_rows(self.db)
        self.model = Model()
        self.tokens: list[tuple[UUID, int]] = []
        self.effects: Counter[int] = Counter()
        self.happened: set[UUID] = set()
        self.effect_ids: dict[UUID, UUID] = {}  #: of runs that were claimed to mutate
        self.keys: dict[UUID, str] = {}  #: of mutations
        self.applied_keys: set[str] = set()
        self.repeats = 0  #: requests whose effect the provider already had under their key
        self.published = 0
        self.names: dict[int, str] = {}
        self.ordered = False
        self.releases = 0
        self.called: dict[str, str] = {"workflow": "billing", "topic": IN, "handler": "send"}
        self.former = dict(self.called)

    @initialize(
        concurrency=st.sampled_from([1, 3]),
        batch=st.integers(1, 3),
        ordered=st.booleans(),
        contain=st.booleans(),
        sets_aside=st.booleans(),
        honours_keys=st.booleans(),
    )
    def begin(
        self, concurrency: int, batch: int, ordered: bool, contain: bool, sets_aside: bool, honours_keys: bool
    ) -> None:
        allowed = ALLOWED if sets_aside else {"max_failures": 10_000}
        policy = NO_PAUSE.model_copy(update=allowed)
        uncertain = "contain" if contain else "pause"
        options: dict[str, Any] = {
            "concurrency": concurrency,
            "batch": batch,
            "ordered": ordered,
            "on_uncertain": uncertain,
            "on_logic_error": "quarantine" if sets_aside else "maintenance",
            "on_exhausted": "quarantine" if sets_aside else "block",
        }
        self.spec = a_workflow(self.db, failures=policy, **options)
        self.batch, self.ordered, self.honours_keys = batch, ordered, honours_keys
        self.publish(5, "a")
        self.publish(4, None)
        self.start(3)

    @rule(pick=PICK, steps=st.integers(1, 6), answer=st.sampled_from(["applied", "refused", "silence", "late"]))
    def forward(self, pick: int, steps: int, answer: str) -> None:
        """Let a worker take the natural next steps of a run: random transitions alone do not get far."""
        moving = [run for run in self.model.runs.values() if run.moving and not run.waiting]
        if not moving:
            self.start(2)
            return
        run = moving[pick % len(moving)]
        for _ in range(steps):
            if not run.moving or not self._step(run, pick, answer):
                return

    @rule(count=st.integers(1, 3), key=st.sampled_from([None, "a", "b"]))
    def publish(self, count: int, key: str | None) -> None:
        names = [f"m{self.published + n}" for n in range(count)]
        self.published += count
        workflow, topic = self._publisher(self.published)
        new = [NewEvent(topic=topic, message_id=name, payload={}, key=key) for name in names]
        with self.db.transaction() as tx:
            written = events.publish(tx, workflow, new).new
        for name in names:
            event = written[topic, name]
            self.model.events[event], self.names[event] = "pending", name

    def _publisher(self, pick: int) -> tuple[str, str]:
        """What a publisher calls the workflow and the topic: it may not know yet that they were renamed."""
        return (self.workflow, self.topic) if pick % 2 else (self.former["workflow"], self.former["topic"])

    @rule(kind=st.sampled_from(NameKind))
    def rename(self, kind: NameKind) -> None:
        """A worker of the next release starts, which has another name for something."""
        self.releases += 1
        name = f"{kind}-{self.releases}"
        self.former = dict(self.called)
        self.called[kind] = name
        with self.db.transaction() as tx:
            registration.register(tx, self._release())
        for run in self.model.runs.values() if kind is NameKind.TOPIC else ():
            if run.moving and run.phase == "preparing":
                run.fence, run.leased = run.fence + 1, False

    def _release(self) -> WorkflowSpec:
        """The code in its present names, with the former ones that differ."""
        given: dict[str, str] = {
            kind: "" if self.former[kind] == self.called[kind] else self.former[kind] for kind in NameKind
        }
        (topic, *topics), (handler, *handlers) = self.spec.topics, self.spec.handlers
        return replace(
            self.spec,
            name=self.workflow,
            renamed_from=given["workflow"],
            fingerprint=f"release {self.releases}",
            topics=(replace(topic, name=self.topic, renamed_from=given["topic"]), *topics),
            handlers=(
                replace(handler, name=self.handler, subscribes=(self.topic,), renamed_from=given["handler"]),
                *handlers,
            ),
        )

    @property
    def workflow(self) -> str:
        return self.called["workflow"]

    @property
    def topic(self) -> str:
        return self.called["topic"]

    @property
    def handler(self) -> str:
        return self.called["handler"]

    @rule(count=st.integers(1, 4), alone=st.booleans())
    def start(self, count: int, alone: bool = False) -> None:
        with self.db.transaction() as tx:
            started = starts.start(tx, self.workflow, self.handler, count=count, is_unsliced=alone)
        for run in started.runs:
            self.model.runs[run.id] = ModelRun(run.id, None if run.offered is None else list(run.offered))

    @rule(phase=st.sampled_from(sorted(CLAIM)), pick=PICK)
    @precondition(lambda self: self.model.runs)
    def claim(self, phase: str, pick: int) -> None:
        self._claim(self._run(pick), phase)

    def _claim(self, run: ModelRun, phase: str) -> bool:
        with self.db.transaction() as tx:
            expected = run.can_claim(phase) and not (run.phase == "mutating" and _is_off(tx, self.workflow))
            claims = runs.claim(tx, CLAIM[phase], [RunId(run.id)], lease_duration=LEASE, worker="w")
        assert bool(claims.claimed) == expected
        if expected:
            self.model.claimed(run, phase)
            (claimed,) = claims.claimed
            assert claimed.fence == run.fence
            if phase == "mutate":
                self.effect_ids[run.id] = effect_id(claimed.handler_uid, claimed.inputs, "abc")
            self.tokens.append((run.id, run.fence))
        return expected

    @rule(pick=PICK, wanted=st.integers(0, 3))
    @precondition(lambda self: self.tokens)
    def finish_prepare(self, pick: int, wanted: int) -> None:
        run, held = self._held(pick)
        with self.db.transaction() as tx:
            (row,) = work.runs(tx, [run.id])
            shown = work.reservable_events(tx, row, self.topic, limit=min(wanted, self.batch), ordered=self.ordered)
            peeked = [EventId(event.id) for event in shown]
            reservations = (Reservation(topic=self.topic, ids=tuple(peeked)),) if peeked else ()
            wake_at = tx.clock() + timedelta(minutes=1) if pick % 4 == 0 else None
            landing = runs.finish_prepare(tx, [PreparedRun(lease=held, reservations=reservations, wake_at=wake_at)])
        if self._lands(landing, run.holds(held.fence) and run.phase == "preparing"):
            self.model.prepared(run, [int(event) for event in peeked])

    @rule(pick=PICK, approval=st.booleans())
    @precondition(lambda self: self.tokens)
    def begin_mutation(self, pick: int, approval: bool = False) -> None:
        run, held = self._held(pick)
        with self.db.transaction() as tx:
            (row,) = work.runs(tx, [run.id])
            effect = self.effect_ids.get(run.id, run.id)
            request = a_request(row, needs_approval=approval, keyed=self.honours_keys, effect_id=effect)
            landing = mutations.begin_mutation(tx, [_with(request, held)])
        can = run.holds(held.fence) and run.leased and run.phase == "prepared" and bool(run.events)
        if self._lands(landing, can):
            self.model.began(run, landing.updated[0].id, approval=approval)
            self.keys[landing.updated[0].id] = landing.updated[0].idempotency_key

    @rule(pick=PICK)
    @precondition(lambda self: self.tokens)
    def send_approved(self, pick: int) -> None:
        run, held = self._held(pick)
        with self.db.transaction() as tx:
            landing = mutations.send(tx, [held])
        if self._lands(landing, run.holds(held.fence) and run.leased and run.ledger == "pending"):
            run.ledger = "in_flight"

    @rule(pick=PICK)
    @precondition(lambda self: self.tokens)
    def no_mutation(self, pick: int) -> None:
        run, held = self._held(pick)
        with self.db.transaction() as tx:
            landing = runs.no_mutation(tx, [held])
        if self._lands(landing, run.holds(held.fence) and run.phase == "prepared"):
            run.advance("mutated")
            run.leased = False

    @rule(pick=PICK, applies=st.booleans(), answers=st.booleans())
    @precondition(lambda self: self.tokens)
    def send(self, pick: int, applies: bool, answers: bool) -> None:
        """The outside system applies or not, and answers or not. Without an answer the worker dies.

        If it honours keys, it answers a repeat with the old result.
        """
        run, held = self._held(pick)
        if run.ledger != "in_flight" or not run.holds(held.fence) or run.mutation_id in self.happened:
            return
        assert run.mutation_id is not None
        key = self.keys[run.mutation_id]
        is_repeat = self.honours_keys and key in self.applied_keys
        self.repeats += is_repeat
        if applies or is_repeat:
            self.effects.update([] if is_repeat else run.events)
            self.applied_keys.add(key)
            self.happened.add(run.mutation_id)
        if answers:
            self._verdict(run, held.fence, applies or is_repeat, Evidence.REFUSED)

    @rule(pick=PICK, applied=st.booleans())
    @precondition(lambda self: self.tokens)
    def late_verdict(self, pick: int, applied: bool) -> None:
        """A worker reports a true verdict, whether or not it still holds the run."""
        run, held = self._held(pick)
        if run.mutation_id is not None and (run.mutation_id in self.happened) == applied:
            self._verdict(run, held.fence, applied)

    @rule(pick=PICK)
    @precondition(lambda self: self.tokens)
    def commit(self, pick: int) -> None:
        run, held = self._held(pick)
        outputs = tuple(NewEvent(topic=OUT, message_id=f"out:{event}", payload={}) for event in run.events)
        with self.db.transaction() as tx:
            landing = runs.commit(tx, [RunOutput(lease=held, events=outputs)])
        if self._lands(landing, run.holds(held.fence) and run.phase == "emitting"):
            self.model.committed(run)

    @rule(pick=PICK, kind=KINDS)
    @precondition(lambda self: self.tokens)
    def stop(self, pick: int, kind: FailureKind) -> None:
        run, held = self._held(pick)
        with self.db.transaction() as tx:
            landing = stops.stop(tx, [RunFailure(lease=held, failure=a_failure(kind))])
        if self._lands(landing, run.holds(held.fence)):
            self._stopped(landing.updated)

    def _stopped(self, ended: Sequence[StoppedRun]) -> None:
        """Follow stops in the model. Whom a failure is put down to is the database's choice, within its budget."""
        for item in ended:
            run, decision = self.model.runs[item.run_id], item.decision
            self.model.stopped(run)
            shown = [] if run.carry else run.events or run.offered or [int(event) for event in item.failure.shown]
            self.model.blamed(shown, is_narrowed=bool(decision.slice_limit), is_set_aside=decision.quarantine)

    @rule(pick=PICK)
    @precondition(lambda self: self.tokens)
    def release(self, pick: int) -> None:
        run, held = self._held(pick)
        with self.db.transaction() as tx:
            landing = runs.hand_back(tx, [held])
        can = run.holds(held.fence) and run.leased and run.phase in ("preparing", "prepared", "emitting")
        if self._lands(landing, can):
            run.leased = False

    @rule()
    def everybody_dies_and_is_recovered(self) -> None:
        self.db.advance_clock(LEASE + TIMEOUT + timedelta(seconds=1))
        recovered = rescuer.recover_crashed_runs(self.db)
        expected = {run.id for run in self.model.runs.values() if run.moving and run.leased}
        assert {ended.run_id for ended in recovered} == expected
        self._stopped(recovered)

    @rule(pick=PICK, says=st.sampled_from(["truth", "skip", "wrong"]))
    def person(self, pick: int, says: str) -> None:
        doubted = [run for run in self.model.runs.values() if run.ledger == "needs_reconcile" and run.carry]
        if not doubted:
            return
        run = doubted[pick % len(doubted)]
        assert run.mutation_id is not None
        mutation_id = MutationId(run.mutation_id)
        # another batch would be another request, whose key protects nothing
        is_wrong = says == "wrong" and self.honours_keys and self.batch == 1
        if rows(self.db, _QUIET, id=run.mutation_id):  # it may still be travelling: the person comes later
            self.everybody_dies_and_is_recovered()
        with self.db.transaction() as tx:
            if says == "skip":
                resolution.skip(tx, mutation_id, SOMEBODY)
            elif run.mutation_id in self.happened and not is_wrong:
                resolution.happened(tx, mutation_id, SOMEBODY)
            else:
                resolution.did_not_happen(tx, mutation_id, SOMEBODY)
        truth = "success" if run.mutation_id in self.happened and not is_wrong else "failure"
        self.model.settled(run, "skipped" if says == "skip" else truth)

    @rule()
    def mend(self) -> None:
        with self.db.transaction() as tx:
            workflows.exit_maintenance(tx, self.workflow, SOMEBODY)
            if not work.blocking_mutations(tx, self.workflow):
                workflows.resume(tx, self.workflow, SOMEBODY)

    @rule(pick=PICK, says=st.sampled_from(["truth", "skip", "wrong"]), recover=st.booleans())
    def clean_up(self, pick: int, says: str, recover: bool) -> None:
        """Do what sweeps and operators do, one after the other, so that stopped work continues."""
        if recover:
            self.everybody_dies_and_is_recovered()
        self.person(pick, says)
        self.mend()
        self.carry_forward()

    @rule()
    def carry_forward(self) -> None:
        with self.db.transaction() as tx:
            retryable = work.retryable_runs(tx, self.workflow)
        expected = {run.id for run in self.model.runs.values() if run.carry and run.ledger != "needs_reconcile"}
        assert set(retryable) == expected
        for run_id in retryable:
            with self.db.transaction() as tx:
                for new in starts.retry(tx, [run_id]).runs:
                    self.model.carried(self.model.runs[run_id], new.id)

    @invariant()
    def the_invariants_hold(self) -> None:
        with self.db.transaction() as tx:
            broken = databases.invariant_findings(tx, Severity.BROKEN)
        assert broken == []

    @invariant()
    def the_tables_are_what_the_model_says(self) -> None:
        found = {row.id: row for row in rows(self.db, "SELECT * FROM pipeline.runs")}
        for run in self.model.runs.values():
            row = found[run.id]
            assert (row.phase, row.finished_at is None, row.fence) == (run.phase, run.moving, run.fence)
            assert (row.retry_pending, row.mutation_outcome) == (run.carry, run.outcome)
        delivered = rows(self.db, _EVENTS)
        assert {row.event_id: row.status for row in delivered} == self.model.events

    @invariant()
    def a_key_is_held_by_one_run_at_a_time(self) -> None:
        assert not self.ordered or rows(self.db, _SHARED_KEYS) == []

    @invariant()
    def no_effect_happens_twice(self) -> None:
        assert all(count == 1 for count in self.effects.values()), self.effects

    def _step(self, run: ModelRun, pick: int, answer: str) -> bool:
        """One natural step; False when the worker falls silent in the middle of it."""
        if not run.leased:
            phase = next((phase for phase in CLAIM if run.can_claim(phase)), None)
            return phase is not None and self._claim(run, phase)
        token = next(n for n, held in enumerate(self.tokens) if held == (run.id, run.fence))
        if run.phase == "preparing":
            self.finish_prepare(token, 1 + pick % 3)
        elif run.phase == "prepared":
            self.begin_mutation(token, approval=pick % 5 == 0)
        elif run.ledger == "pending":
            self.send_approved(token)
        elif run.phase == "mutating":
            self.send(token, applies=answer in ("applied", "late"), answers=answer in ("applied", "refused"))
            return answer in ("applied", "refused")
        elif run.phase == "emitting":
            self.commit(token)
        else:
            self.stop(token, FailureKind.TRANSIENT)
        return True

    def _verdict(self, run: ModelRun, fence: int, applied: bool, evidence: Evidence = Evidence.DEFINITE) -> None:
        assert run.mutation_id is not None
        mutation_id = MutationId(run.mutation_id)
        with self.db.transaction() as tx:
            landing = _judge(tx, mutation_id, Fence(fence), applied, evidence)
        if self._lands(landing, run.holds(fence) and run.ledger == "in_flight"):
            self.model.settled(run, "success" if applied else "failure")

    def _run(self, pick: int) -> ModelRun:
        return list(self.model.runs.values())[pick % len(self.model.runs)]

    def _held(self, pick: int) -> tuple[ModelRun, RunLease]:
        run_id, fence = self.tokens[pick % len(self.tokens)]
        return self.model.runs[run_id], RunLease(RunId(run_id), Fence(fence))

    def _lands(self, landing: Any, expected: bool) -> bool:
        assert bool(landing.updated) == expected, landing.refused
        return expected


def _is_off(tx: Transaction, workflow: str) -> bool:
    row = work.workflow(tx, workflow)
    assert row is not None
    return bool(row.maintenance or row.desired != "active")


_EVENTS = """
SELECT d.event_id, d.status FROM pipeline.deliveries d JOIN pipeline.handlers h ON h.id = d.handler_id
WHERE h.kind = 'consumer'
"""


_QUIET = "SELECT id FROM pipeline.mutations WHERE id = :id AND quiet_until > pipeline.clock()"

_SHARED_KEYS = """
SELECT key FROM pipeline.deliveries WHERE key IS NOT NULL AND (status = 'reserved' OR offered_to IS NOT NULL)
GROUP BY key HAVING count(DISTINCT coalesce(run_id, offered_to)) > 1
"""


def _judge(tx: Transaction, mutation_id: MutationId, fence: Fence, applied: bool, evidence: Evidence) -> Any:
    if applied:
        return mutations.apply(tx, [AppliedMutation(mutation_id=mutation_id, fence=fence)])
    verdict = FailedMutation(mutation_id=mutation_id, error="422", evidence=evidence, fence=fence)
    return mutations.fail(tx, [verdict])


def _with(request: Any, held: RunLease) -> Any:
    return replace(request, lease=held)
