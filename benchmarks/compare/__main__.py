"""Measure ours and the peers in turns: `python -m benchmarks.compare`, with the peers of the extra `compare` installed.

Every repeat measures each engine once, in another order. The same servers serve all of them; only one works at a time.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.compare.page import write_part
from benchmarks.compare.peers import PEERS, drain_pgbench
from pipeline.bench import figures, installation
from pipeline.bench.cases import CASES
from pipeline.bench.figures import Sample, svg
from pipeline.bench.installation import Installation
from pipeline.bench.run import describe_machine, measuring_order

OURS, AGAIN, LIGHT, SLOW, ONE, CHAIN = "ours", "ours-again", "light ours", "ours-20ms", "ours-one", "chain"
LIGHT_RUNS, ONE_RUNS = 160, 300


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something that is measured beside others."""

    name: str
    title: str
    measure: Callable[[Installation, int, int], Sample]
    against: str  #: which of ours it is compared with
    figure: str = "runs_per_second"
    peer: str = ""  #: for one of ours that has a peer of its own

    def sample(self, site: Installation, repeat: int, runs: int) -> Sample:
        """Measure once. An error is the problem of this sample."""

        def measured() -> tuple[figures.Figures, Sequence[str]]:
            found = self.measure(site, repeat, runs)
            return found.figures, found.problems

        return figures.sample_of(self.name, repeat, measured)


def _ours(case: str) -> Callable[[Installation, int, int], Sample]:
    return lambda site, repeat, runs: CASES[case].measure(site, repeat, runs)


def _few(measure: Callable[[Installation, int, int], Sample]) -> Callable[[Installation, int, int], Sample]:
    """Measure fewer runs: one at a time takes long."""
    return lambda site, repeat, runs: measure(site, repeat, min(runs, ONE_RUNS))


def contenders() -> list[Contender]:
    """Return all of them: a backlog first, then light load."""
    backlog = [
        Contender(name=OURS, title="ours, 1 worker with 2 processes", measure=_ours("backlog"), against=OURS),
        Contender(name=AGAIN, title="the same again (A/A)", measure=_ours("backlog"), against=OURS),
        Contender(name=SLOW, title="ours, 20 ms call", measure=_ours("call-20ms"), against=SLOW),
        Contender(
            name=ONE,
            title="ours, Workflow(concurrency=1)",
            measure=_few(_ours("concurrency-1")),
            against=ONE,
            peer=CHAIN,
        ),
        Contender(name="pgbench", title="pgbench, 4 commits, 8 clients", measure=drain_pgbench, against=OURS),
    ]
    backlog += [
        Contender(
            name=peer.name,
            title=peer.title,
            measure=_few(peer.drain) if peer.is_serial else peer.drain,
            against=ONE if peer.is_serial else SLOW if peer.call_ms else OURS,
        )
        for peer in PEERS.values()
    ]
    light = partial(Contender, figure="p50_ms", against=LIGHT)
    return [
        *backlog,
        light(name=LIGHT, title="ours", measure=_ours("light")),
        *(
            light(name=f"light {name}", title=PEERS[name].title, measure=PEERS[name].pace)
            for name in ("chain-ledger", "pgqueuer", "procrastinate")
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All samples, and what they say."""

    contenders: Sequence[Contender]
    samples: dict[str, list[Sample]]
    machine: str
    day: str
    runs: int
    repeats: int

    @property
    def spread(self) -> float | None:
        first, second = (
            [sample.figures.get("runs_per_second", 0.0) for sample in self.samples.get(name, ())]
            for name in (OURS, AGAIN)
        )
        return figures.spread(first, second)

    @property
    def problems(self) -> list[str]:
        return [
            f"{name}: {problem}" for name, found in self.samples.items() for one in found for problem in one.problems
        ]

    def ranges(self, name: str) -> dict[str, figures.Range]:
        return figures.ranges(self.samples.get(name, ()))

    def ratio(self, contender: Contender, figure: str = "") -> str:
        """Return ours divided by the other: above one, ours has more."""
        compared = contender.peer or contender.name
        own, other = (self.ranges(name).get(figure or contender.figure) for name in (contender.against, compared))
        if own is None or other is None or compared == contender.against:
            return ""
        text = figures.ratio_text(own.median / other.median, self.spread)
        return f"{text} (of {compared})" if contender.peer else text

    def rows(self, figure: str) -> list[tuple[str, ...]]:
        """Return the rows of the table of a backlog or of light load."""
        shown = ("runs_per_second", "worker_cpu_ms") if figure == "runs_per_second" else ("p50_ms", "p95_ms", "p99_ms")
        found = []
        for contender in self.contenders:
            if contender.figure == figure:
                ranges = self.ranges(contender.name)
                texts = [
                    ranges[name].text(figures.FIGURES[name].digits) if name in ranges else "none" for name in shown
                ]
                ratios = [self.ratio(contender, name) for name in RATIOS[figure]]
                found.append((contender.title, *texts, *ratios))
        return found


HEADS = {
    "runs_per_second": ("backlog, one order per run", "runs/s", "worker CPU ms per run", "ours / it"),
    "p50_ms": ("20 orders a second", "p50 ms", "p95 ms", "p99 ms", "ours / it, p50", "ours / it, p99"),
}
RATIOS = {"runs_per_second": ("runs_per_second",), "p50_ms": ("p50_ms", "p99_ms")}


def compare(site: Installation, chosen: Sequence[Contender], runs: int, repeats: int) -> Comparison:
    """Measure all contenders in every repeat, in rotated order."""
    loads: list[float] = []
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in chosen}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("start", total=len(chosen) * repeats)
        for repeat in range(repeats):
            for contender in measuring_order(chosen, (OURS, AGAIN), repeat):
                loads.append(os.getloadavg()[0])
                progress.update(task, description=f"{contender.title}, repeat {repeat + 1} of {repeats}")
                number = LIGHT_RUNS if contender.figure == "p50_ms" else runs
                samples[contender.name].append(contender.sample(site, repeat, number))
                progress.advance(task)
    ((day,),) = site.query("SELECT current_date::text")
    return Comparison(
        contenders=chosen, samples=samples, machine=describe_machine(site, loads), day=day, runs=runs, repeats=repeats
    )


def markdown(result: Comparison) -> str:
    """Return the generated part of the page about a comparison."""
    lines = [f"{result.machine}; {result.runs:,} runs, medians of {result.repeats}, measured on {result.day}.", ""]
    for figure, head in HEADS.items():
        if rows := result.rows(figure):
            lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
            lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    noise = result.spread
    lines.append(f"Spread of the A/A pair: {'unknown' if noise is None else f'{noise:.2f}'}.")
    return "\n".join(lines)


def as_dict(result: Comparison) -> dict[str, object]:
    """Return a comparison as JSON."""
    return {
        "machine": result.machine,
        "day": result.day,
        "runs": result.runs,
        "spread": result.spread,
        "problems": result.problems,
        "samples": {
            name: [{"figures": dict(one.figures), "problems": [*one.problems]} for one in found]
            for name, found in result.samples.items()
        },
    }


def from_dict(known: Sequence[Contender], found: dict[str, Any]) -> Comparison:
    """Return a comparison that was written as JSON."""
    samples = {
        name: [Sample(case=name, repeat=n, **one) for n, one in enumerate(of)] for name, of in found["samples"].items()
    }
    return Comparison(
        contenders=[one for one in known if one.name in samples],
        samples=samples,
        machine=found["machine"],
        day=found.get("day", "an earlier day"),
        runs=found["runs"],
        repeats=max(map(len, samples.values())),
    )


def print_result(result: Comparison) -> None:
    """Print both tables."""
    console = Console(highlight=False)
    for figure, head in HEADS.items():
        if rows := result.rows(figure):
            table = Table(*head)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    console.print(result.machine)
    console.print(f"Spread of the A/A pair: {result.spread}")
    for problem in result.problems:
        console.print(f"NO FIGURE, the gate is closed: {problem}")


def write_plot(file: Path, result: Comparison) -> None:
    """Draw a chart for a backlog and one for light load."""
    charts = [
        (
            head[1] if figure == "runs_per_second" else f"{head[0]}, {head[1]}",
            [
                (one.title, found)
                for one in result.contenders
                if one.figure == figure and (found := result.ranges(one.name).get(figure))
            ],
        )
        for figure, head in HEADS.items()
    ]
    file.write_text(svg([chart for chart in charts if chart[1]], result.machine), encoding="utf-8")


def main() -> int:
    """Measure, print and write."""
    known = contenders()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help=f"of {', '.join(one.name for one in known)}; separated by commas")
    parser.add_argument("--json", type=Path, dest="json_file")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--write", type=Path, help="a page whose generated part is replaced")
    parser.add_argument("--read", type=Path, help="measure nothing: show the samples of this JSON file")
    options = parser.parse_args()
    names = {name.strip() for name in options.only.split(",") if name.strip()}
    wanted = names | {OURS, AGAIN} | {one.peer for one in known if one.name in names}
    chosen = [one for one in known if not names or one.name in wanted]
    if options.read:
        result = from_dict(known, json.loads(options.read.read_text()))
    else:
        with installation.embedded() as site:
            result = compare(site, chosen, options.runs, options.repeats)
    if options.json_file:
        options.json_file.write_text(json.dumps(as_dict(result), indent=2) + "\n")
    if options.plot:
        write_plot(options.plot, result)
    if options.write:
        write_part(options.write, "python -m benchmarks.compare", markdown(result))
    print_result(result)
    return 1 if result.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
