"""A model of the transitions without a database: the judge of the state machine test.

Deliberately simple and independent of ``pipeline.domain``: a run knows its phase, whether it is
moving, who holds it and what it holds; an event knows where it is; the outside system knows what happened.
"""

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

FEWEST_FAILURES = 2  #: no event is set aside that failed less often
ORDER = ["pending", "preparing", "prepared", "mutating", "mutated", "emitting", "committed"]


@dataclass
class ModelRun:
    """One run as the model believes it to be."""

    id: UUID
    offered: list[int] | None
    phase: str = "pending"
    moving: bool = True
    fence: int = 0
    leased: bool = False
    events: list[int] = field(default_factory=list)
    outcome: str = ""
    ledger: str | None = None
    mutation_id: UUID | None = None
    carry: bool = False  #: waits for a retry
    waiting: bool = False  #: for a person's approval

    def holds(self, fence: int) -> bool:
        return self.moving and not self.waiting and self.fence == fence

    def can_claim(self, phase: str) -> bool:
        free = self.moving and not self.leased and not self.waiting
        if phase == "prepare":
            return free and self.phase in ("pending", "preparing")
        if phase == "mutate":
            return free and ((self.phase == "prepared" and bool(self.events)) or self.ledger == "pending")
        emits = self.phase in ("mutated", "emitting") and self.outcome != "failure"
        return free and (emits or (self.phase == "prepared" and not self.events))

    def advance(self, phase: str) -> None:
        assert ORDER.index(phase) >= ORDER.index(self.phase), f"{self.phase} -> {phase}"
        self.phase = phase


@dataclass
class Model:
    """All runs and events, and the moves between their states."""

    runs: dict[UUID, ModelRun] = field(default_factory=dict)
    events: dict[int, str] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)  #: counted failures of each event

    def claimed(self, run: ModelRun, phase: str) -> None:
        run.fence, run.leased = run.fence + 1, True
        if phase == "prepare":
            run.advance("preparing")
        if phase == "next":
            run.advance("emitting")

    def prepared(self, run: ModelRun, events: list[int]) -> None:
        run.advance("prepared")
        run.leased, run.events = False, events
        for event in events:
            assert self.events[event] == "pending", "the database let a run reserve what is not pending"
            self.events[event] = "reserved"

    def began(self, run: ModelRun, mutation_id: UUID, *, approval: bool) -> None:
        run.advance("mutating")
        run.ledger, run.mutation_id = "pending" if approval else "in_flight", mutation_id
        run.waiting, run.leased = approval, run.leased and not approval

    def rejected(self, run: ModelRun) -> None:
        """Never sent: its events are skipped, and next still has to run."""
        run.waiting, run.moving, run.carry = False, False, True
        self.settled(run, "skipped")

    def settled(self, run: ModelRun, outcome: str) -> None:
        """The outcome is known. A stopped run whose mutation failed gives its inputs back."""
        run.advance("mutated")
        run.outcome, run.ledger = outcome, "applied" if outcome == "success" else "failed"
        if outcome == "skipped":
            self._put(run, "skipped")
        if outcome == "failure" and not run.moving:
            run.carry = False
            self._put(run, "pending")
        if outcome != "failure":
            run.leased = False

    def stopped(self, run: ModelRun) -> None:
        """Unknown keeps, after keeps, before gives back; never a change of phase."""
        run.moving, run.leased = False, False
        if run.ledger == "pending":  # approved and never sent: it did not happen
            run.advance("mutated")
            run.ledger, run.outcome = "failed", "failure"
        unknown = run.ledger in ("in_flight", "needs_reconcile")
        after = ORDER.index(run.phase) >= ORDER.index("mutated") and run.outcome != "failure"
        run.carry = unknown or after
        if unknown:
            run.ledger = "needs_reconcile"
        if not run.carry:
            self._put(run, "pending")

    def blamed(self, events: list[int], *, is_narrowed: bool, is_set_aside: bool) -> None:
        """A failure was put down to events. Narrowed down, none is counted; set aside, one has used up its failures."""
        assert not (is_narrowed and len(events) == 1), "one event cannot be narrowed down"
        assert not (is_narrowed and is_set_aside)
        if not is_narrowed:
            self.failures.update(events)
        if is_set_aside:
            assert max(self.failures[event] for event in events) >= FEWEST_FAILURES
            self.events.update(dict.fromkeys(events, "quarantined"))

    def carried(self, old: ModelRun, new_id: UUID) -> ModelRun:
        old.carry = False
        new = ModelRun(new_id, old.offered, phase="emitting", events=old.events, outcome=old.outcome)
        new.ledger, new.mutation_id = old.ledger, old.mutation_id
        self.runs[new_id] = new
        return new

    def committed(self, run: ModelRun) -> None:
        run.advance("committed")
        run.moving, run.leased = False, False
        for event in run.events:
            if self.events[event] == "reserved":
                self.events[event] = "consumed"

    def _put(self, run: ModelRun, status: str) -> None:
        for event in run.events:
            if self.events[event] == "reserved":
                self.events[event] = status
