"""The table of cases: what is measured, on how many workers, and compared with which other case."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.bench import gate, loads
from pipeline.bench.figures import Figures, Sample
from pipeline.bench.installation import BenchError, Fleet, FleetOptions, Installation
from pipeline.domain.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to measure."""

    name: str
    title: str
    load: Callable[[Fleet, int], Figures]  #: puts a load on running workers, and returns its figures
    runs: int  #: how many, unless the caller names another number
    fleet: FleetOptions = field(default_factory=FleetOptions)
    against: str = ""  #: the case that it is compared with
    figure: str = "runs_per_second"  #: by which it is compared
    is_default: bool = True  #: measured unless cases are named

    def measure(self, site: Installation, repeat: int, runs: int | None) -> Sample:
        """Measure the case once, and let the gate decide whether its figures count."""
        try:
            with site.fleet(self.fleet) as fleet:
                figures = self.load(fleet, runs or self.runs)
                fleet.stop()
                return Sample(
                    case=self.name, repeat=repeat, figures=figures, problems=gate.problems(gate.evidence(fleet))
                )
        except BenchError as error:
            return Sample(case=self.name, repeat=repeat, problems=[str(error)])


def _light(fleet: Fleet, runs: int) -> Figures:
    loads.warm_up(fleet, "many")
    return {**loads.pace(fleet, "many", runs), **loads.count_paced(fleet, "many", min(runs, 60))}


def _backlog(fleet: Fleet, runs: int) -> Figures:
    loads.warm_up(fleet, "many")
    return {**loads.drain(fleet, "many", runs), **loads.count_drained(fleet, "many", min(runs, 1000))}


_CASES = (
    Case(name="light", title="light load, 20 orders a second", load=_light, runs=160, figure="p50_ms"),
    Case(name="backlog", title="backlog, calls that take no time", load=_backlog, runs=5000),
    Case(name="backlog-again", title="the same again (A/A)", load=_backlog, runs=5000, against="backlog"),
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
