"""For every scenario, a crash at every commit boundary: nothing is lost, nothing happens twice, no orphan.

The process that dies is replaced by another that acts as every sweep, the scheduler and the operator.
Each boundary is tried with the transaction's writes kept, and with them lost where that is another state: where the
outside system was called, or the clock moved, after the write before it. A transaction that only reads has no boundary
of its own: a crash beside it leaves what a crash after the write before it leaves. In some scenarios the repairing
process dies too, at each of its own boundaries, and a third takes over.
"""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import EventId
from pipeline.store.database import Database
from pipeline.transitions import registration
from tests.factories import IN, NO_PAUSE, OUT, a_workflow, event_status, some_events
from tests.support import databases
from tests.support.crashing_database import Crash, CrashingDatabase
from tests.support.fake_provider import Behaviour, World
from tests.support.table_reads import rows
from tests.support.transition_worker import Walker

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
pytestmark = pytest.mark.timeout(600)  # thousands of small transactions: minutes on a busy machine


@dataclass(frozen=True)
class Scenario:
    """A workflow's options, what the outside system does with the first event, and how the process behaves."""

    world: tuple[Behaviour, ...] = ()
    workflow: dict[str, Any] = field(default_factory=dict)
    events: int = 2
    keys: int = 0  #: events are published with this many keys in turn
    fails: dict[str, tuple[FailureKind, ...]] = field(default_factory=dict)
    walker: dict[str, Any] = field(default_factory=dict)
    provider: dict[str, Any] = field(default_factory=dict)  #: whether it honours keys, and misses what it has done
    poison: bool = False  #: every run of the second event fails for now before it mutates
    rounds: int = 0  #: rounds of sweeps and person that the dying walker gets to
    ends: tuple[str, ...] = ("consumed",)

    @property
    def consumers(self) -> tuple[str, ...]:
        return tuple(self.workflow.get("consumers", ("send",)))


SETS_ASIDE: dict[str, Any] = {"on_logic_error": "quarantine", "on_exhausted": "quarantine"}
SCENARIOS = {
    "applied": Scenario(),
    "refused-then-applied": Scenario(world=(Behaviour.REFUSES,)),
    "refused-then-the-same-plan-again": Scenario(
        world=(Behaviour.REFUSES,), workflow={"after_failed_mutation": "mutate"}
    ),
    "timeout-after-applying": Scenario(world=(Behaviour.TIMES_OUT_AFTER_APPLYING,)),
    "timeout-before-applying": Scenario(world=(Behaviour.TIMES_OUT_BEFORE_APPLYING,)),
    "timeout-contained": Scenario(
        world=(Behaviour.TIMES_OUT_AFTER_APPLYING,), workflow={"on_uncertain": "contain", "concurrency": 4}
    ),
    "prepare-fails-for-now": Scenario(fails={"prepare_fails": (FailureKind.TRANSIENT,)}),
    "prepare-fails-by-logic-in-slices": Scenario(
        fails={"prepare_fails": (FailureKind.LOGIC,)}, workflow={"concurrency": 3}
    ),
    "next-fails-by-logic": Scenario(fails={"next_fails": (FailureKind.LOGIC,)}),
    "next-fails-for-now": Scenario(fails={"next_fails": (FailureKind.TRANSIENT, FailureKind.TRANSIENT)}),
    "next-lacks-permission": Scenario(fails={"next_fails": (FailureKind.AUTH,)}),
    "in-slices": Scenario(workflow={"concurrency": 4, "batch": 2}, events=3, world=(Behaviour.REFUSES,)),
    "ordered": Scenario(workflow={"concurrency": 4, "ordered": True}, events=3, keys=2),
    "ordered-behind-a-doubt": Scenario(
        workflow={"ordered": True, "on_uncertain": "contain"},
        world=(Behaviour.TIMES_OUT_AFTER_APPLYING,),
        keys=1,
        walker={"batch": 1},
    ),
    "two-consumers": Scenario(workflow={"consumers": ("copy", "send")}, world=(Behaviour.REFUSES,), events=1),
    "approved": Scenario(walker={"needs_approval": True}, rounds=1, events=1),
    "skipped-by-a-person": Scenario(
        world=(Behaviour.TIMES_OUT_AFTER_APPLYING,),
        walker={"skips": True},
        rounds=1,
        ends=("skipped", "consumed"),
    ),
    "poison-in-a-slice": Scenario(
        workflow={"concurrency": 4, "batch": 4, **SETS_ASIDE},
        walker={"batch": 4},
        events=4,
        poison=True,
        rounds=2,
        ends=("consumed", "quarantined"),
    ),
    "poison-in-the-batch-of-a-single-run": Scenario(
        workflow=SETS_ASIDE, walker={"batch": 3}, events=3, poison=True, ends=("consumed", "quarantined")
    ),
    "poison-in-an-ordered-key": Scenario(
        workflow={"concurrency": 4, "batch": 3, "ordered": True, **SETS_ASIDE},
        walker={"batch": 3},
        events=3,
        keys=1,
        poison=True,
        ends=("consumed", "quarantined"),
    ),
    "produced": Scenario(walker={"produces": 2, "handlers": ("poll", "send")}, events=0),
    "nothing-to-do": Scenario(events=0),
    "key-kept-after-a-wrong-not-found": Scenario(
        world=(Behaviour.TIMES_OUT_AFTER_APPLYING,), walker={"batch": 1}, provider={"honours_keys": True, "misses": 1}
    ),
    "key-changed-after-a-refusal": Scenario(
        world=(Behaviour.REFUSES,), walker={"batch": 1}, provider={"honours_keys": True}
    ),
}

#: Where the one who mends dies as well, and at which boundary the first one died before.
MENDING = {
    "timeout-after-applying": "after-5",
    "skipped-by-a-person": "after-5",
    "approved": "after-5",
    "poison-in-a-slice": "after-5",
}

#: After which the names change: before and after the effect, in slices, with a key that must be kept.
RENAMED = ("applied", "in-slices", "timeout-after-applying", "key-kept-after-a-wrong-not-found")


@pytest.mark.timeout(300)  # a play for each boundary, and a poison event has many
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_crash_at_any_commit_boundary_loses_nothing_and_repeats_nothing(db: Database, name: str) -> None:
    play = Play(db, SCENARIOS[name], "dry")
    assert not play.dies(play.never_crashing())
    play.settles()
    assert play.boundaries >= 4, "the scenario must have boundaries to crash at"
    for side, number in play.crashes:
        crashed = Play(db, SCENARIOS[name], f"{side}-{number}")
        assert crashed.dies(_crashing(db, side, number)), "every boundary up to the last must be reached"
        crashed.settles()


@pytest.mark.parametrize("name", list(MENDING))
def test_a_second_crash_at_any_boundary_of_the_mending_loses_nothing_and_repeats_nothing(
    db: Database, name: str
) -> None:
    side, _, number = MENDING[name].partition("-")
    first = Play(db, SCENARIOS[name], "first")
    assert first.dies(_crashing(db, side, int(number)))
    assert not first.mends(first.never_crashing())
    first.settles()
    assert len(first.crashes) >= 8, "mending must have boundaries to crash at"
    for second in first.crashes:
        play = Play(db, SCENARIOS[name], "-".join(map(str, second)))
        assert play.dies(_crashing(db, side, int(number)))
        assert play.mends(_crashing(db, *second)), "every boundary up to the last must be reached"
        play.settles()


@pytest.mark.parametrize("name", RENAMED)
def test_a_rename_after_a_crash_at_any_commit_boundary_loses_nothing_and_repeats_nothing(
    db: Database, name: str
) -> None:
    """The process that takes over has the next release, with new names for the workflow, the topic and the handler."""
    play = Play(db, SCENARIOS[name], "dry")
    assert not play.dies(play.never_crashing())
    play.renames()
    play.settles()
    for side, number in play.crashes:
        crashed = Play(db, SCENARIOS[name], f"{side}-{number}")
        assert crashed.dies(_crashing(db, side, number))
        crashed.renames()
        crashed.settles()


class Play:
    """One scenario in a workflow of its own: one process dies, perhaps another too, and the last one finishes."""

    def __init__(self, db: Database, scenario: Scenario, label: str) -> None:
        self.db, self.scenario, self.workflow = db, scenario, f"billing-{label}"
        self.world, self.boundaries = World(**scenario.provider), 0
        self.crashes: list[tuple[str, int]] = []  #: sides and boundaries of transactions that write
        self.topic, self.consumers = IN, scenario.consumers
        self.spec = spec = a_workflow(db, self.workflow, failures=_policy(scenario), **scenario.workflow)
        if "poll" in scenario.walker.get("handlers", ()):
            poll = replace(spec.handlers[-1], first_run_at=LONG_AGO)
            with db.transaction() as tx:
                registration.register(tx, replace(spec, handlers=(*spec.handlers[:-1], poll)))
        self.published = [self._publish(number) for number in range(scenario.events)]
        if self.published:
            self.world.will(self.published[0], *scenario.world)

    def _publish(self, number: int) -> EventId:
        key = f"k{number % self.scenario.keys}" if self.scenario.keys else None
        return some_events(self.db, f"m{number}", workflow=self.workflow, key=key)[0]

    def renames(self) -> None:
        """A worker of the next release starts, with another name for everything."""
        former, self.workflow = self.workflow, f"{self.workflow}-renamed"
        self.topic, self.consumers = f"{IN}-renamed", tuple(f"{each}-renamed" for each in self.consumers)
        (topic, *topics), handlers = self.spec.topics, self.spec.handlers
        consumers = [
            replace(handler, name=name, renamed_from=handler.name, subscribes=(self.topic,))
            for handler, name in zip(handlers, self.consumers, strict=False)
        ]
        release = replace(
            self.spec,
            name=self.workflow,
            renamed_from=former,
            fingerprint="renamed",
            topics=(replace(topic, name=self.topic, renamed_from=IN), *topics),
            handlers=(*consumers, *handlers[len(consumers) :]),
        )
        with self.db.transaction() as tx:
            registration.register(tx, release)

    def never_crashing(self) -> CrashingDatabase:
        """Return a database that lists its boundaries and passes them all."""
        return CrashingDatabase(self.db, outside=lambda: self.world.calls)

    def dies(self, crashing: CrashingDatabase) -> bool:
        """Walk until the crash; False if there was none. Kinds of failure are used up by this walker alone."""
        fails = {name: list(kinds) for name, kinds in self.scenario.fails.items()}
        walker = self._walker(crashing, **fails)

        def act() -> None:
            walker.walk_new(count=8)
            walker.settle(self.scenario.rounds, must_end=False)

        died = self._until_the_crash(crashing, act)
        self.boundaries = crashing.transactions
        return died

    def mends(self, crashing: CrashingDatabase) -> bool:
        """Run until idle or until the crash; False if there was none."""
        return self._until_the_crash(crashing, self._walker(crashing).settle)

    def settles(self) -> None:
        """The last one dies nowhere, and then everything is as it should be."""
        self._walker(self.db).settle()
        self._check()

    def _until_the_crash(self, crashing: CrashingDatabase, act: Any) -> bool:
        crashing.clock_offset = self.db.clock_offset
        try:
            act()
        except Crash:
            return True
        finally:
            self.db.clock_offset, self.crashes = crashing.clock_offset, crashing.crashes
        return False

    def _walker(self, db: Database, **fails: Any) -> Walker:
        options = {"batch": 2, "handlers": self.consumers, "topic": self.topic, **self.scenario.walker, **fails}
        if self.scenario.poison:
            options["poison"] = self.published[1]
        return Walker(db, self.world, self.workflow, **options)

    def _check(self) -> None:
        found = rows(self.db, _EVENTS, workflow=self.workflow, topic=self.topic)
        assert len(found) == max(self.scenario.events, self.scenario.walker.get("produces", 0))
        expected_out = []
        for given in found:
            for consumer in self.consumers:
                status = event_status(self.db, given.id, consumer, self.workflow)
                assert status in self.scenario.ends
                assert (status == "quarantined") == self._is_poison(given.id)
                expected_out += [] if self._is_poison(given.id) else [f"{consumer}:{given.id}"]
            effects = self.world.effects[given.id]
            if self._is_poison(given.id):
                assert effects == 0
                continue
            assert effects == len(self.scenario.consumers) or ("skipped" in self.scenario.ends and effects <= 1)
        out = rows(self.db, _EVENTS, workflow=self.workflow, topic=OUT)
        named = [row.message_id.replace("-renamed", "") for row in out]
        assert sorted(named) == sorted(each.replace("-renamed", "") for each in expected_out)
        with self.db.transaction() as tx:
            assert databases.invariant_findings(tx) == []
        for table in ("runs", "sessions"):
            left = f"SELECT * FROM pipeline.{table} WHERE workflow = :w AND finished_at IS NULL"
            assert rows(self.db, left, w=self.workflow) == []

    def _is_poison(self, event: int) -> bool:
        return self.scenario.poison and event == self.published[1]


_EVENTS = "SELECT id, message_id FROM pipeline.events WHERE workflow = :workflow AND topic = :topic ORDER BY id"


def _crashing(db: Database, side: str, number: int) -> CrashingDatabase:
    return CrashingDatabase(db, before_commit=number * (side == "before"), after_commit=number * (side == "after"))


def _policy(scenario: Scenario) -> FailurePolicy:
    return NO_PAUSE.model_copy(update={"max_failures": 3 if scenario.poison else 50})
