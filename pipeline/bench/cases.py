"""The table of cases: what is measured, on how many workers, and compared with which other case."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.bench import gate, loads
from pipeline.bench.figures import Figures, Sample, sample_of
from pipeline.bench.installation import Fleet, FleetOptions, Installation
from pipeline.domain.errors import InvalidInputError

_ONE, _TWO = FleetOptions(), FleetOptions(workers=2)
_WIDE = FleetOptions(workers=2, settings={"PIPELINE_MUTATION_CONCURRENCY": "250"})
_NONE = FleetOptions(workers=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to measure."""

    name: str
    title: str
    load: Callable[[Fleet, int], Figures] | None = None  #: puts a load on running processes, and returns its figures
    figures: Callable[[], Figures] | None = None  #: returns figures without any server
    runs: int = 1  #: how many, unless the caller names another number
    fleet: FleetOptions = _ONE
    against: str = ""  #: the case that it is compared with
    figure: str = "runs_per_second"  #: by which it is compared
    is_default: bool = False  #: measured unless cases are named

    def measure(self, site: Installation, repeat: int, runs: int | None) -> Sample:
        """Measure the case once, and let the gate decide whether its figures count."""
        return sample_of(self.name, repeat, lambda: self._measured(site, runs or self.runs))

    def _measured(self, site: Installation, runs: int) -> tuple[Figures, list[str]]:
        if self.load is None:
            assert self.figures is not None
            return self.figures(), []
        with site.fleet(self.fleet) as fleet:
            found = self.load(fleet, runs)
            fleet.stop()
            return found, gate.check(fleet)


def _light(fleet: Fleet, runs: int) -> Figures:
    loads.warm_up(fleet, "many")
    return {**loads.pace(fleet, "many", runs), **loads.count_paced(fleet, "many", min(runs, 60))}


def _backlog(fleet: Fleet, runs: int) -> Figures:
    loads.warm_up(fleet, "many")
    return {**loads.drain(fleet, "many", runs), **loads.count_drained(fleet, "many", min(runs, 1000))}


def _slow_calls(fleet: Fleet, runs: int) -> Figures:
    loads.warm_up(fleet, "many")
    return loads.drain(fleet, "many", runs, {"ms": 20})


def _one_place(fleet: Fleet, runs: int) -> Figures:
    loads.warm_up(fleet, "one", runs=10)
    return loads.drain(fleet, "one", runs)


def _batches(fleet: Fleet, runs: int) -> Figures:
    loads.warm_up(fleet, "batched")
    return loads.drain(fleet, "batched", runs * 100, per_run=100)


def _idle_case(workflows: int, text: str) -> Case:
    return Case(
        name=f"idle-{workflows}",
        title=f"no work, {text}",
        load=lambda fleet, _: loads.rest(fleet, workflows),
        fleet=loads.idle_fleet(workflows),
        figure="statements_per_second",
    )


#: Cases that take longer than half a minute are measured when they are named.
_CASES = (
    Case(name="light", title="light load, 20 orders a second", load=_light, runs=160, figure="p50_ms", is_default=True),
    Case(name="backlog", title="backlog, calls that take no time", load=_backlog, runs=5000, is_default=True),
    Case(
        name="backlog-again",
        title="the same again (A/A)",
        load=_backlog,
        runs=5000,
        against="backlog",
        is_default=True,
    ),
    Case(name="two-workers", title="backlog, two workers", load=_backlog, runs=5000, fleet=_TWO, against="backlog"),
    Case(name="call-20ms", title="backlog, calls of 20 ms", load=_slow_calls, runs=3000, against="backlog"),
    Case(
        name="concurrency-1",
        title="backlog, Workflow(concurrency=1)",
        load=_one_place,
        runs=100,
        against="backlog",
        is_default=True,
    ),
    Case(
        name="batch-100",
        title="backlog, 100 events per run",
        load=_batches,
        runs=400,
        against="backlog",
        figure="events_per_second",
    ),
    Case(
        name="no-hanging",
        title="two workers, no call hangs",
        load=partial(loads.drain_hanging, share=False),
        runs=12_000,
        fleet=_WIDE,
    ),
    Case(
        name="hanging",
        title="two workers, one call in twenty hangs until its timeout",
        load=partial(loads.drain_hanging, share=True),
        runs=9500,  # about 20 s of work: several timeouts, one after the other
        fleet=_WIDE,
        against="no-hanging",
    ),
    Case(
        name="process-killed",
        title="a pool process killed in mid-call",
        load=lambda fleet, _: loads.kill_process(fleet),
        fleet=_TWO,
        figure="seconds",
    ),
    Case(
        name="machine-killed",
        title="a worker killed in mid-call",
        load=lambda fleet, _: loads.kill_machine(fleet),
        fleet=_TWO,
        figure="seconds",
    ),
    Case(
        name="zone-lost",
        title="a zone lost with 5,000 calls",
        load=loads.lose_zone,
        runs=5000,
        fleet=loads.ZONE,
        figure="seconds",
    ),
    _idle_case(1, "1 workflow"),
    _idle_case(1000, "1,000 workflows"),
    _idle_case(10_000, "10,000 workflows"),
    Case(
        name="finished-10k",
        title="backlog beside 10,000 finished runs",
        load=partial(loads.drain_after, finished=10_000),
        runs=5000,
    ),
    Case(
        name="finished-1m",
        title="backlog beside 1,000,000 finished runs",
        load=partial(loads.drain_after, finished=1_000_000),
        runs=5000,
        against="finished-10k",
    ),
    Case(
        name="pending-10k",
        title="the first of 10,000 pending orders",
        load=partial(loads.drain_before, pending=10_000),
        runs=3000,
    ),
    Case(
        name="pending-500k",
        title="the first of 500,000 pending orders",
        load=partial(loads.drain_before, pending=500_000),
        runs=3000,
        against="pending-10k",
    ),
    Case(
        name="publish-100k",
        title="100,000 events published in one transaction",
        load=loads.publish_at_once,
        runs=100_000,
        fleet=_NONE,
        figure="seconds",
    ),
    Case(
        name="help", title="pipeline --help, processor time", figures=loads.help_cpu, figure="seconds", is_default=True
    ),
)
CASES: Mapping[str, Case] = {case.name: case for case in _CASES}
AA_PAIR = ("backlog", "backlog-again")  #: one case twice: what they differ by is noise


def selected_cases(names: Sequence[str]) -> list[Case]:
    """Return the named cases with the A/A pair, in the order of the table; without names the default ones."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise InvalidInputError(f"There is no case {unknown[0]!r}; expected some of {', '.join(CASES)}.")
    wanted = {*names, *AA_PAIR} if names else {case.name for case in CASES.values() if case.is_default}
    return [case for case in CASES.values() if case.name in wanted]
