"""More random steps: approvals, replaced payloads, an operator's acts on events, watermarks, whole cohorts."""

from contextlib import nullcontext

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from pipeline.domain.errors import IllegalTransitionError
from pipeline.domain.failures import FailureKind
from pipeline.domain.scheduling import DueReason
from pipeline.domain.states import EventId, Fence, MutationId, RunId
from pipeline.domain.values import NewEvent, RunFailure, RunLease, RunOutput
from pipeline.transitions import events, resolution, runs, stops, workflows
from tests.factories import LEASE, SOMEBODY, a_failure
from tests.lifecycle.model import ModelRun
from tests.lifecycle.state_machine import CLAIM, KINDS, PICK, Lifecycle
from tests.support.table_reads import rows
from tests.support.transition_steps import reason_due

_ACTS = {
    "skip": (events.skip, ("pending", "quarantined"), "skipped"),
    "quarantine": (events.quarantine, ("pending",), "quarantined"),
    "release": (events.release, ("quarantined",), "pending"),
}
_OFFERED = "SELECT event_id FROM pipeline.deliveries WHERE event_id = :event AND offered_to IS NOT NULL"
_DONE = ("consumed", "skipped", "quarantined")


class Acts(Lifecycle):
    """The whole machine, and a way to bring everything it has begun to an end."""

    @rule(pick=PICK, yes=st.booleans())
    def decide_approval(self, pick: int, yes: bool) -> None:
        waiting = [run for run in self.model.runs.values() if run.waiting]
        if waiting:
            self._decide(waiting[pick % len(waiting)], yes)

    def _decide(self, run: ModelRun, yes: bool) -> None:
        assert run.mutation_id is not None
        with self.db.transaction() as tx:
            if yes:
                resolution.approve(tx, MutationId(run.mutation_id), SOMEBODY, request_hash="abc")
            else:
                resolution.reject(tx, MutationId(run.mutation_id), SOMEBODY)
        if yes:
            run.waiting = False
        else:
            self.model.rejected(run)

    @rule(pick=PICK)
    def replace(self, pick: int) -> None:
        """Only what no run can have seen is rewritten."""
        event = list(self.names)[pick % len(self.names)]
        workflow, topic = self._publisher(pick)
        new = NewEvent(topic=topic, message_id=self.names[event], payload={"replaced": pick})
        with self.db.transaction() as tx:
            replaced = events.publish(tx, workflow, [new], replace=True).replaced
        assert not replaced or self.model.events[event] == "pending"

    @rule(pick=PICK, act=st.sampled_from(sorted(_ACTS)))
    def act_on_event(self, pick: int, act: str) -> None:
        """An operator decides about one event, unless a run holds it or is offered it."""
        event = EventId(list(self.names)[pick % len(self.names)])
        verb, needs, becomes = _ACTS[act]
        may = self.model.events[event] in needs and not self._is_offered(event)
        with nullcontext() if may else pytest.raises(IllegalTransitionError), self.db.transaction() as tx:
            verb(tx, self.workflow, self.handler, event, SOMEBODY)
        if may:
            self.model.events[event] = becomes

    def _is_offered(self, event: EventId) -> bool:
        return bool(rows(self.db, _OFFERED, event=event))

    @rule()
    def raise_watermarks(self) -> None:
        with self.db.transaction() as tx:
            workflows.raise_watermarks(tx)

    @rule(phase=st.sampled_from(["prepare", "next"]))
    def claim_all(self, phase: str) -> None:
        """One claim for every run there is: it takes those that it may, and no other."""
        everyone = list(self.model.runs.values())
        expected = {run.id for run in everyone if run.can_claim(phase)}
        with self.db.transaction() as tx:
            claims = runs.claim(tx, CLAIM[phase], [RunId(run.id) for run in everyone], lease_duration=LEASE, worker="w")
        assert {row.id for row in claims.claimed} == expected
        for row in claims.claimed:
            run = self.model.runs[row.id]
            self.model.claimed(run, phase)
            self.tokens.append((run.id, run.fence))

    @rule()
    @precondition(lambda self: self.tokens)
    def commit_all(self) -> None:
        held = self._newest()
        with self.db.transaction() as tx:
            landing = runs.commit(tx, [RunOutput(lease=item) for item in held])
        landed = {row.id for row in landing.updated}
        can = [self.model.runs[item.run_id] for item in held if self._emits(item)]
        assert landed == {run.id for run in can}
        for run in can:
            self.model.committed(run)

    @rule(kind=KINDS, every=st.integers(2, 4))
    @precondition(lambda self: self.tokens)
    def stop_some(self, kind: FailureKind, every: int) -> None:
        held = self._newest()[::every]
        with self.db.transaction() as tx:
            landing = stops.stop(tx, [RunFailure(lease=item, failure=a_failure(kind)) for item in held])
        can = {item.run_id for item in held if self.model.runs[item.run_id].holds(item.fence)}
        assert {ended.run_id for ended in landing.updated} == can
        self._stopped(landing.updated)

    def _newest(self) -> list[RunLease]:
        """The newest token of every run."""
        return [RunLease(RunId(run_id), Fence(fence)) for run_id, fence in dict(self.tokens).items()]

    def _emits(self, item: RunLease) -> bool:
        run = self.model.runs[item.run_id]
        return run.holds(item.fence) and run.phase == "emitting"

    def settle(self, rounds: int = 200) -> None:
        """Recover, resolve, deploy, retry, start only what is due: then nothing may be left."""
        for number in range(rounds):
            self.everybody_dies_and_is_recovered()
            for run in [run for run in self.model.runs.values() if run.waiting]:
                self._decide(run, yes=True)
            for pick in range(self._doubts()):
                self.person(pick, "truth")
            self.mend()
            self.carry_forward()
            self._start_what_is_due()
            for run in [run for run in self.model.runs.values() if run.moving]:
                while run.moving and not run.waiting and self._step(run, 3 + 5 * number, "applied"):
                    pass
            if (
                not any(run.moving or run.carry for run in self.model.runs.values())
                and reason_due(self.db, self.handler, self.workflow) is not DueReason.EVENTS
            ):
                break
        left = {event: status for event, status in self.model.events.items() if status not in _DONE}
        assert left == {}, f"due: {reason_due(self.db, self.handler, self.workflow)}"

    def _doubts(self) -> int:
        return sum(run.ledger == "needs_reconcile" and run.carry for run in self.model.runs.values())

    def _start_what_is_due(self) -> None:
        """Only for events: no prepare here declines what it is shown, so no event may need a wake to be found."""
        if reason_due(self.db, self.handler, self.workflow) is DueReason.EVENTS:
            self.start(4)
