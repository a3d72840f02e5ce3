"""``pipeline chaos --soak N``: many orders under every fault together, in segments, resumable.

All segments use the same database. A segment publishes its orders, causes faults until every order is done, and ends
with the gate: each order has one effect, the ledger equals the provider's file, and the doctor finds nothing. A person
is part of it: questions are answered with what the provider's file says. Then its figures are added to the state, and
the next segment begins with what retention does to a past of a month: it prunes every row.

The state and the provider's files are on disk. A soak that is killed goes on in the segment in which it was: published
orders are published once, and the provider reads its files.
"""

import json
import os
import platform
import shutil
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from pipeline.admin.given_results import GivenResult
from pipeline.admin.resolutions import MutationFilter, Resolution, ResolutionKind, Resolutions
from pipeline.background.pruner import prune
from pipeline.chaos import records, run
from pipeline.chaos.faults import RECONCILABLE, RETENTION_VARIABLE
from pipeline.chaos.judge import ChaosRecords, figures, judge, row_problems
from pipeline.chaos.nodes import (
    ChaosMonkey,
    NodeProcess,
    Outages,
    plan_disruptions,
    plan_outages,
)
from pipeline.chaos.provider import EFFECTS, RECONCILES, REQUESTS, records_of
from pipeline.chaos.records import RunTimes
from pipeline.chaos.run import WORKFLOW, ChaosError, Drive
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import Resolver
from pipeline.domain.values import Actor
from pipeline.embedded import servers
from pipeline.embedded.locks import Lock
from pipeline.store import migrate
from pipeline.store.database import Database

STATE, FAULTS = "soak.json", "faults.jsonl"
RETENTION = timedelta(days=30)  #: longer than a soak may stand still in a segment
_FAULT_EVERY = 10.0  #: seconds between two faults of a worker, and between two outages
_REST = 5.0  #: seconds that the workers run before one is disrupted again
_WAVE = 50  #: orders published at once
_WAITING_WAVES = 3  #: waves that may be open before the next is published
_LOOK_EVERY = 1.0
_PERSON = Actor(name="chaos", reason="looked it up in the provider's file")
_MOST_QUESTIONS = 500  #: answered at once
_OPERATORS = frozenset({Resolver.OPERATOR, Resolver.OPERATOR_SKIP})

Seconds = Mapping[str, int]  #: seconds with one decimal -> how often


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """The options of a soak. All but the first two hold for its whole life."""

    orders: int  #: to reach, with those of earlier calls
    state: Path
    seed: int
    segment: int = 2000  #: orders
    workers: int = 2
    pool: int = 4  #: processes of each worker
    faults: int | None = None
    report_progress: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFigures:
    """What one segment counted. Segments can be added."""

    orders: int = 0
    seconds: float = 0.0
    runs: int = 0
    mutations: int = 0
    effects: int = 0
    doubled: int = 0  #: orders with more than one effect
    lost: int = 0  #: orders without an effect
    wrong_verdicts: int = 0  #: ledger rows against what happened
    wrong_absences: int = 0  #: "not found" although it had happened; each was repeated under its honoured key
    late_effects: int = 0  #: found after their row was resolved as failed; a person acknowledged each
    lost_runs: int = 0  #: runs that lost their worker
    interruptions: int = 0  #: how often the soak itself was killed and resumed
    faults: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)  #: by the provider's fault
    reconciles: Mapping[str, int] = field(default_factory=dict)
    settled_by: Mapping[str, int] = field(default_factory=dict)  #: unknown outcomes, by who settled them
    reconcilable_settled_by: Mapping[str, int] = field(default_factory=dict)  #: those of operations with a search
    certainty: Seconds = field(default_factory=dict)  #: from the doubt to the verdict, without a person
    recoveries: Mapping[str, Seconds] = field(default_factory=dict)  #: by fault
    database_mb: float = 0.0  #: at the end, the largest

    @property
    def unknown(self) -> int:
        """The mutations whose outcome was unknown for a while."""
        return sum(self.settled_by.values())

    @property
    def share_without_a_person(self) -> float | None:
        """The share of unknown outcomes that were settled without a person; None if there was none."""
        return _share_without_a_person(self.settled_by)

    @property
    def reconcilable_share_without_a_person(self) -> float | None:
        """The same share of the operations that have a search."""
        return _share_without_a_person(self.reconcilable_settled_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """How far a soak has come."""

    options: SoakOptions
    segments: int
    total: SoakFigures
    machine: str
    problems: Sequence[str] = ()  #: of the segment in which it stopped

    @property
    def is_successful(self) -> bool:
        return not self.problems


def soak(options: SoakOptions) -> SoakResult:
    """Make segments until the state has enough orders. Stop at a segment whose gate is closed."""
    _check_options(options)
    options.state.mkdir(parents=True, exist_ok=True)
    with Lock(options.state / "soak.lock") as lock, ExitStack() as stack:
        if not lock.try_exclusive():
            raise ChaosError(f"another soak uses {options.state}; wait for its end, or name another folder")
        state = SoakState.open(options)
        urls = stack.enter_context(servers.running(options.state / "servers", run.environ_without_urls()))
        db = Database.connect(urls.database_url, pool_size=2)
        stack.callback(db.dispose)
        migrate.upgrade(db)
        problems: Sequence[str] = ()
        while not problems and state.total.orders < options.orders:
            problems = _Segment(state, db, urls).finish()
        machine = _machine(records.server(db)[0])
    return SoakResult(
        options=state.options,
        segments=len(state.segments),
        total=state.total,
        machine=machine,
        problems=problems,
    )


class SoakState:
    """The figures of the finished segments, in a file that is replaced as a whole."""

    def __init__(self, options: SoakOptions, segments: list[SoakFigures]) -> None:
        self.options, self.segments = options, segments

    @classmethod
    def open(cls, options: SoakOptions) -> "SoakState":
        """Read the state of this folder, or begin one."""
        file = options.state / STATE
        if not file.exists():
            state = cls(options, [])
            state._save()
            return state
        found = json.loads(file.read_text())
        for name in _FIXED:
            if found[name] != getattr(options, name):
                raise InvalidInputError(
                    f"The soak in {options.state} has {name} {found[name]}, and {getattr(options, name)} was given; "
                    f"expected the same. Leave it out, or begin another soak in another folder."
                )
        return cls(options, [SoakFigures(**each) for each in found["segments"]])

    @property
    def total(self) -> SoakFigures:
        """The sum of all finished segments."""
        return total(self.segments)

    def add(self, figures: SoakFigures) -> None:
        """Add a finished segment; it is on disk when this returns."""
        self.segments.append(figures)
        self._save()

    def _save(self) -> None:
        fixed = {name: getattr(self.options, name) for name in _FIXED}
        text = json.dumps({**fixed, "segments": [asdict(each) for each in self.segments]}, indent=1)
        draft = self.options.state / f"{STATE}.new"
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.options.state / STATE)


_FIXED = ("seed", "segment", "workers", "pool", "faults")


def saved_options(folder: Path) -> dict[str, Any]:
    """Return the options that the soak in a folder began with; none if there is no soak."""
    file = folder / STATE
    found = json.loads(file.read_text()) if file.exists() else {}
    return {name: found[name] for name in _FIXED if name in found}


class _Segment:
    """One segment, from the prune before it to its gate."""

    def __init__(self, state: SoakState, db: Database, urls: servers.Servers) -> None:
        self.state, self.options, self.db, self.urls = state, state.options, db, urls
        number = len(state.segments)
        self.home = self.options.state / f"segment-{number:05}"
        size = min(self.options.segment, self.options.orders - state.total.orders)
        self.first = state.total.orders
        self.orders = [f"order {self.first + n}" for n in range(size)]
        self.title = f"segment {number + 1}"
        self.desk = Resolutions(db)
        self.effects = _EffectCounts(self.home / EFFECTS)
        self.looked_at = float("-inf")
        self.progress: records.Progress | None = None
        self.begun_times = 1
        self.refusals: Mapping[UUID, str] = {}  #: of the last answers

    def finish(self) -> Sequence[str]:
        """Run it to its end and add its figures; return what is wrong. Nothing is added then."""
        self._begin()
        begun = time.monotonic()
        with ExitStack() as stack:
            provider = stack.enter_context(run.provider_process(self.home, self.options.seed, self.options.faults))
            nodes = run.start_nodes(
                self.home,
                self.urls,
                provider,
                stack,
                workers=self.options.workers,
                pool=self.options.pool,
                more={RETENTION_VARIABLE: str(RETENTION.days)},
            )
            run.wait_for_nodes(nodes, lambda: run.is_registered(self.db), "the workers to start")
            drive = self._drive(nodes, provider)
            drive.run(lambda orders: run.publish(self.db, self.options.seed, orders), self._is_over)
            unfinished = records.unfinished_orders(self.db, WORKFLOW)
            run.stop_nodes(nodes)
            run.wait_until_idle(provider)
        late = records.late_effects(self.db, WORKFLOW)
        for mutation in late:
            self.desk.acknowledge(mutation, _PERSON)
        found = records.load_records(self.db, WORKFLOW, self.home, self.orders, with_late_effects=True)
        problems = [*unfinished, *(str(problem) for problem in judge(found)), *_open_orders(found)]
        if not problems:
            self.state.add(self._figures(found, len(late), time.monotonic() - begun))
            self.options.report_progress(f"{self.title}: {len(self.orders)} orders, the gate is open")
            shutil.rmtree(self.home)
        return problems

    def _begin(self) -> None:
        """Prune what the last segment left, or go on with this one; count how often it was begun."""
        file = self.home / "begun.jsonl"
        if not file.exists():
            _prune_everything(self.db, self.urls.database_url)
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir()
        with file.open("a") as lines:
            lines.write(json.dumps({"orders": len(self.orders)}) + "\n")
        begun = records_of(file)
        self.begun_times = len(begun)
        self.orders = [f"order {self.first + n}" for n in range(begun[0]["orders"])]

    def _drive(self, nodes: Sequence[NodeProcess], provider: str) -> Drive:
        """Plan faults for the whole time that the segment may take. A resumed segment has a plan of its own."""
        options, limit = self.options, 900.0 + 2.0 * len(self.orders)
        seed = options.seed + 1000 * (len(self.state.segments) + 1) + self.begun_times
        count = int(limit / _FAULT_EVERY)
        return Drive(
            waves=[self.orders[start : start + _WAVE] for start in range(0, len(self.orders), _WAVE)],
            gap=0.0,
            monkey=ChaosMonkey(
                nodes[:-1],
                plan_disruptions(seed, waves=count, gap=_FAULT_EVERY, workers=options.workers),
                lambda: run.requests_in_progress(provider) > run.BUSY_REQUESTS,
                freeze_for=run.FREEZE,
                rest=_REST,
                record=self._record,
            ),
            outages=Outages(
                options.state / "servers",
                nodes[-1],
                self.urls.broker_url,
                plan_outages(seed, waves=count, gap=_FAULT_EVERY),
                record=self._record,
            ),
            time_limit=limit,
            report_progress=lambda text: options.report_progress(f"{self.title}, {text}"),
            is_crowded=self._is_crowded,
        )

    def _record(self, fault: str, pids: Sequence[int]) -> None:
        """Write a fault down at once: the soak may be killed."""
        at = time.time()  # noqa: TID251 - compared with the database's clock, which is that of this machine
        with (self.home / FAULTS).open("a") as lines:
            lines.write(json.dumps({"at": at, "fault": fault, "pids": list(pids)}) + "\n")

    def _is_crowded(self) -> bool:
        """Return whether so many orders are open that the next wave should wait."""
        found = self._look()
        return found.delivered - found.done >= _WAITING_WAVES * _WAVE

    def _is_over(self, drive: Drive) -> bool:
        """Answer the questions. Return whether every order is done and nothing is reconciled or monitored."""
        if self._is_look_due():
            self._answer_questions()
        found = self._look()
        refusals = (
            f", {len(self.refusals)} answers refused: {next(iter(self.refusals.values()))}" if self.refusals else ""
        )
        drive.report(f"{found.done} of {len(self.orders)} done, {found.open_mutations} mutations open{refusals}")
        return not drive.waves and found.is_over(len(self.orders)) and not found.unresolved

    def _is_look_due(self) -> bool:
        return time.monotonic() - self.looked_at >= _LOOK_EVERY

    def _look(self) -> records.Progress:
        """Return the progress, at most a second old: it is counted over all orders of the segment."""
        if self.progress is None or self._is_look_due():
            self.progress = records.progress(self.db, WORKFLOW)
            self.looked_at = time.monotonic()
        return self.progress

    def _answer_questions(self) -> None:
        """Answer as a person does who looks at the provider's page, once no request can arrive any more."""
        now = datetime.now(UTC)  # noqa: TID251 - the database's clock is that of this machine
        asked = self.desk.unresolved_mutations(MutationFilter(workflow=WORKFLOW), limit=_MOST_QUESTIONS)
        due = [each for each in asked if each.quiet_until is None or each.quiet_until < now]
        counts = self.effects.by_key() if due else {}
        answers = [
            Resolution(mutation=each, kind=ResolutionKind.HAPPENED, result=_answer(each.idempotency_key))
            if counts.get(each.idempotency_key)
            else Resolution(mutation=each, kind=ResolutionKind.DID_NOT_HAPPEN)
            for each in due
        ]
        self.refusals = self.desk.resolve_many(answers, _PERSON).refused

    def _figures(self, found: ChaosRecords, late: int, seconds: float) -> SoakFigures:
        """Count what the segment did."""
        doubts, times = records.doubts(self.db, WORKFLOW), records.run_times(self.db, WORKFLOW)
        without_person = [each for each in doubts if each.settled_by not in _OPERATORS]
        return SoakFigures(
            orders=len(self.orders),
            seconds=round(seconds, 1),
            runs=len(times),
            mutations=len(found.ledger),
            effects=len(found.effects),
            doubled=sum(row.doubled for row in figures(found)),
            lost=len(set(found.orders) - {effect.order for effect in found.effects}),
            wrong_verdicts=len(list(row_problems(found))),
            wrong_absences=len(found.wrong_absences),
            late_effects=late,
            lost_runs=sum(each.is_lost for each in times),
            interruptions=self.begun_times - 1,
            faults=_fault_counts(self.home / FAULTS),
            requests=_fault_counts(self.home / REQUESTS),
            reconciles=_fault_counts(self.home / RECONCILES),
            settled_by=dict(Counter(each.settled_by for each in doubts)),
            reconcilable_settled_by=dict(Counter(each.settled_by for each in doubts if each.operation in RECONCILABLE)),
            certainty=_tenths(each.seconds for each in without_person),
            recoveries={
                fault: _tenths(seconds)
                for fault, seconds in recovery_times(records_of(self.home / FAULTS), times).items()
            },
            database_mb=round(records.server(self.db)[1], 1),
        )


class _EffectCounts:
    """Counts the effects of each key in the provider's file, which only grows."""

    def __init__(self, file: Path) -> None:
        self.file, self._position = file, 0
        self._counts: Counter[str] = Counter()

    def by_key(self) -> Mapping[str, int]:
        """Read what is new in the file, and return the effects of every key."""
        if self.file.exists():
            with self.file.open("rb") as lines:
                lines.seek(self._position)
                for line in lines:
                    if line.endswith(b"\n"):
                        self._position += len(line)
                        self._counts[json.loads(line)["key"]] += 1
        return self._counts


def recovery_times(faults: Sequence[Mapping[str, Any]], times: Sequence[RunTimes]) -> dict[str, list[float]]:
    """Return the seconds that each fault took to be repaired, by the fault.

    Of a worker: until the last run that one of its processes held was taken from it. Of beat, of a server and of
    messages: until the next run started.
    """
    found: dict[str, list[float]] = {}
    starts = sorted(each.started_at for each in times if each.started_at is not None)
    ends: dict[str, list[float]] = {}
    for each in times:
        if each.is_lost and each.finished_at is not None:
            ends.setdefault(each.worker.rpartition(":")[2], []).append(each.finished_at)
    for line in faults:
        after: Iterable[float]
        if line["pids"]:
            after = [end for pid in line["pids"] for end in ends.get(str(pid), ()) if end >= line["at"]]
            until = max(after, default=None)
        else:
            place = bisect_left(starts, line["at"])
            until = starts[place] if place < len(starts) else None
        if until is not None:
            found.setdefault(str(line["fault"]), []).append(until - line["at"])
    return found


def total(segments: Sequence[SoakFigures]) -> SoakFigures:
    """Add segments. The size of the database is the largest."""
    names = [each.name for each in fields(SoakFigures)]
    added = {name: _sum([getattr(each, name) for each in segments], getattr(SoakFigures(), name)) for name in names}
    largest = max((each.database_mb for each in segments), default=0.0)
    return SoakFigures(**{**added, "database_mb": largest})


def _sum(values: Sequence[Any], nothing: Any) -> Any:
    """Add numbers, or tables of numbers, or tables of tables."""
    if not isinstance(nothing, Mapping):
        return sum(values, nothing)
    names = dict.fromkeys(name for value in values for name in value)
    return {
        name: _sum(found, {} if isinstance(found[0], Mapping) else 0)
        for name in names
        if (found := [value[name] for value in values if name in value])
    }


def percentile(seconds: Seconds, percent: float) -> float | None:
    """Return the number of seconds that this percentage does not exceed, by the nearest rank; None without any."""
    left = -(-sum(seconds.values()) * percent // 100)
    for value in sorted(seconds, key=float):
        left -= seconds[value]
        if left <= 0:
            return float(value)
    return None


def _answer(key: str) -> GivenResult:
    """Return the response that the provider would have given."""
    return GivenResult(value={"status": 201, "headers": {}, "body": {"receipt": key}})


def _tenths(seconds: Iterable[float]) -> Seconds:
    return dict(Counter(f"{each:.1f}" for each in seconds))


def _fault_counts(file: Path) -> dict[str, int]:
    return dict(Counter(str(line["fault"]) for line in records_of(file)))


def _share_without_a_person(settled_by: Mapping[str, int]) -> float | None:
    asked = sum(count for who, count in settled_by.items() if who in _OPERATORS)
    counted = sum(settled_by.values())
    return (counted - asked) / counted if counted else None


def _open_orders(found: ChaosRecords) -> list[str]:
    """Describe orders that are not done. A soak answers every question, so none may be left."""
    done = {each.order for each in found.deliveries if each.status == "consumed"}
    without = set(found.orders) - {effect.order for effect in found.effects}
    return [
        *(f"{order} is not done" for order in found.orders if order not in done),
        *(f"{order} has no effect" for order in sorted(without)),
    ]


def _prune_everything(db: Database, url: str) -> None:
    """Let retention prune all rows, on a clock that is a month ahead. Nothing of a finished segment may be left."""
    ahead = Database.connect(url, pool_size=1)
    ahead.advance_clock(RETENTION + timedelta(days=1))
    try:
        while prune(ahead).counts:
            pass
    finally:
        ahead.dispose()
    left = records.remaining_rows(db)
    if left:
        raise ChaosError(f"retention left {left} events and runs of finished segments; expected none")


def _machine(postgres: str) -> str:
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, Postgres {postgres}"
    )


def _check_options(options: SoakOptions) -> None:
    run.check_options(
        run.ChaosOptions(mutations=options.orders, seed=options.seed, workers=options.workers, faults=options.faults)
    )
    if options.segment < 1:
        raise InvalidInputError(f"segment is {options.segment}; expected at least 1.")


def as_dict(result: SoakResult) -> dict[str, Any]:
    """Return how far a soak came, as JSON."""
    found = result.total
    return {
        "is_successful": result.is_successful,
        "problems": list(result.problems),
        "target": result.options.orders,
        **{name: getattr(result.options, name) for name in _FIXED},
        "segments": result.segments,
        "machine": result.machine,
        "total": asdict(found),
        "unknown": found.unknown,
        "share_without_a_person": found.share_without_a_person,
        "reconcilable_share_without_a_person": found.reconcilable_share_without_a_person,
        "certainty_p50": percentile(found.certainty, 50),
        "certainty_p95": percentile(found.certainty, 95),
        "recoveries": {
            fault: {"p50": percentile(seconds, 50), "p95": percentile(seconds, 95)}
            for fault, seconds in found.recoveries.items()
        },
    }
