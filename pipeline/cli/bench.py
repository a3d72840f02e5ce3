"""Command ``pipeline bench``: measure what runs cost, on servers of its own or on the configured ones."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.bench import figures, installation
from pipeline.bench import run as runs_
from pipeline.bench.cases import AA_PAIR, CASES, selected_cases
from pipeline.bench.run import BenchResult, write_plot
from pipeline.cli import tables


def bench(
    cases: Annotated[
        str, typer.Option(help=f"Cases to measure, separated by commas: {', '.join(CASES)}.", show_default=False)
    ] = "",
    runs: Annotated[
        int | None, typer.Option(min=1, help="Runs per case; by default as many as the case has.", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each case is measured.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every sample to this file.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the medians into this SVG file.", show_default=False)] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Measure on the configured servers. Their database must have no workflows.")
    ] = False,
) -> None:
    """Measure runs per second, latency, statements, processor time and recovery; check the promise after each case.

    Uses servers of its own, unless --here names the configured ones. Exit code 1 when a check after a case failed.
    """
    selected = selected_cases([name.strip() for name in cases.split(",") if name.strip()])
    with (
        installation.configured() if here else installation.embedded() as site,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        ) as progress,
    ):
        task = progress.add_task("start", total=len(selected) * repeats)
        result = runs_.run(
            site,
            selected,
            repeats=repeats,
            runs=runs,
            report=lambda text, done: progress.update(task, description=text, completed=done),
        )
        progress.update(task, description="done", completed=len(result.samples))
    if json_file is not None:
        json_file.write_text(json.dumps(runs_.as_dict(result), indent=2) + "\n")
    if plot is not None:
        write_plot(plot, result)
    _print_result(result)
    if result.problems:
        raise typer.Exit(1)


def _print_result(result: BenchResult) -> None:
    noise = result.spread
    for case in result.cases:
        rows = [
            (kind.title, found.text(kind.digits))
            for name, kind in figures.FIGURES.items()
            if (found := result.ranges(case.name).get(name))
        ]
        if (ratio := result.ratio(case)) is not None:
            rows.append((f"{case.figure} against {case.against}", figures.ratio_text(ratio, noise)))
        if (least := result.least_ratio(case)) is not None:
            rows.append(("the same in the worst repeat", f"{least:.2f}"))
        tables.print_table(case.title, ("per run", "median (least to largest)"), rows)
    lines = [result.machine]
    if noise is not None:
        lines.append(
            f"Spread of the A/A pair {' and '.join(AA_PAIR)}: {noise:.2f}. A ratio within it is {figures.NOT_RESOLVED}."
        )
    lines += [f"NO FIGURE, the gate is closed: {problem}" for problem in result.problems]
    typer.echo("\n".join(lines))
