"""``pipeline bench``: measure cases in turns, compare them, and draw their medians."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline.bench import figures
from pipeline.bench.cases import AA_PAIR, Case
from pipeline.bench.figures import FIGURES, Range, Sample
from pipeline.bench.installation import Installation

N = TypeVar("N", bound="_Named")
_SETTINGS = "SELECT name, setting FROM pg_settings WHERE name IN ('server_version', 'fsync', 'synchronous_commit')"


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All samples of a run, and the machine that they were taken on."""

    cases: Sequence[Case]
    samples: Sequence[Sample]
    machine: str

    @property
    def problems(self) -> list[str]:
        """What the gates found, with the case and the repeat."""
        return [
            f"{sample.case}, repeat {sample.repeat + 1}: {problem}"
            for sample in self.samples
            for problem in sample.problems
        ]

    @property
    def spread(self) -> float | None:
        """The spread of the A/A pair."""
        first, second = ([sample.figures.get("runs_per_second", 0.0) for sample in self.of(name)] for name in AA_PAIR)
        return figures.spread(first, second)

    def of(self, case: str) -> list[Sample]:
        """Return the samples of a case, in the order of the repeats."""
        return sorted((sample for sample in self.samples if sample.case == case), key=lambda sample: sample.repeat)

    def ranges(self, case: str) -> dict[str, Range]:
        """Return the figures of a case over its repeats; none if a gate was closed."""
        return figures.ranges(self.of(case))

    def ratio(self, case: Case) -> float | None:
        """Return how a case compares with the one it is compared with; None if one of them has no figure."""
        own, other = self.ranges(case.name).get(case.figure), self.ranges(case.against).get(case.figure)
        return own.median / other.median if own and other and other.median else None

    def least_ratio(self, case: Case) -> float | None:
        """Return the least ratio within one repeat, which a median hides; None if one of the cases has no figure."""
        if self.ratio(case) is None:
            return None
        pairs = zip(self.of(case.name), self.of(case.against), strict=False)
        return figures.least_ratio(
            (own.figures.get(case.figure), other.figures.get(case.figure)) for own, other in pairs
        )


def run(
    site: Installation,
    cases: Sequence[Case],
    *,
    repeats: int,
    runs: int | None,
    report: Callable[[str, int], object] = lambda _text, _done: None,
) -> BenchResult:
    """Measure every case in each repeat. The order is rotated, so that no case is always first."""
    samples: list[Sample] = []
    loads: list[float] = []
    for repeat in range(repeats):
        for case in measuring_order(cases, AA_PAIR, repeat):
            report(f"{case.title}, repeat {repeat + 1} of {repeats}", len(samples))
            loads.append(os.getloadavg()[0])
            samples.append(case.measure(site, repeat, runs))
    return BenchResult(cases=cases, samples=samples, machine=describe_machine(site, loads))


def measuring_order(cases: Sequence[N], pair: tuple[str, str], by: int) -> list[N]:
    """Return the cases in another order for each repeat, the two of the A/A pair half a round apart.

    Side by side the two would meet the same load of the machine, and their spread would hide how it changes.
    """
    first = by % len(cases)
    order = [*cases[first:], *cases[:first]]
    for twin in [case for case in order if case.name == pair[1]]:
        order.remove(twin)
        place = next((n for n, case in enumerate(order) if case.name == pair[0]), 0)
        order.insert((place + 1 + len(order) // 2) % (len(order) + 1), twin)
    return order


def describe_machine(site: Installation, loads: Sequence[float]) -> str:
    """Describe the machine, its load when each sample began, and the settings of Postgres that matter."""
    found = dict(site.query(_SETTINGS))
    return (
        f"{os.cpu_count()} cores, load {min(loads):.1f} to {max(loads):.1f}, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, Postgres {found['server_version']}, fsync {found['fsync']}, "
        f"synchronous_commit {found['synchronous_commit']}"
    )


def as_dict(result: BenchResult) -> dict[str, Any]:
    """Return a result as JSON."""
    noise = result.spread
    return {
        "machine": result.machine,
        "spread": noise,
        "problems": result.problems,
        "cases": [
            {
                "name": case.name,
                "title": case.title,
                "figures": {name: asdict(found) for name, found in result.ranges(case.name).items()},
                "against": case.against or None,
                "ratio": (ratio := result.ratio(case)),
                "least_ratio": result.least_ratio(case),
                "is_resolved": None if ratio is None else figures.is_resolved(ratio, noise),
            }
            for case in result.cases
        ],
        "samples": [asdict(sample) for sample in result.samples],
    }


def write_plot(file: Path, result: BenchResult) -> None:
    """Write a chart for each figure by which cases are compared."""
    charts = []
    for figure in dict.fromkeys(case.figure for case in result.cases):
        bars = [
            (case.title, found)
            for case in result.cases
            if case.figure == figure and (found := result.ranges(case.name).get(figure))
        ]
        charts.append((FIGURES[figure].title, bars))
    file.write_text(figures.svg([chart for chart in charts if chart[1]], result.machine), encoding="utf-8")
