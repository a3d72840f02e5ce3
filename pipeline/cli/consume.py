"""``pipeline consume``: run a task of the consumer engine, watch it, and end it cleanly.

Exit codes: 0 the loop ended by itself or was asked to, and everything fetched was settled; 1 it broke:
nothing can be fetched, or its time is up, or items were left; 2 wrong usage; 4 it ended well but, with
``--strict``, some item did not succeed.
"""

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline.cli import metrics, shown
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.engine import loading
from pipeline.engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.engine.errors import ConsumerLoopTimeoutException, FetchException
from pipeline.engine.outcomes import Outcome, Report
from pipeline.engine.policies import ConsumerPolicy
from pipeline.engine.stops import stopped_by_signals

EXIT_BROKEN, EXIT_FAILED_ITEMS = 1, 4

Task = ConsumerMixin | AsyncConsumerMixin


def consume(
    name: Annotated[
        str, typer.Argument(metavar="MODULE:TASK", help="A task: a class that needs no arguments, or one.")
    ],
    policy: Annotated[
        Path | None, typer.Option(help="A policy as TOML, YAML or JSON, on top of the task's own.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Items to take at most.", show_default=False)] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Items at once.", show_default=False)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 if an item did not succeed.")] = False,
    as_json: shown.AsJson = False,
) -> None:
    """Fetch items and work on them, as the task and its policy say, until nothing is left or somebody asks to end.

    SIGTERM and Ctrl-C settle what was fetched and end with 0; a second one leaves what is not settled.
    Every field of the policy can be set in the environment: CONSUME_LOOP__STREAMING=true.
    """
    task = found(name)
    chosen = _chosen(task, policy, limit, concurrency)
    report, problem = _run(task, chosen)
    _say(report, problem, as_json=as_json)
    if problem is not None or report.left:
        raise typer.Exit(EXIT_BROKEN)
    if strict and report.succeeded != report.processed:
        raise typer.Exit(EXIT_FAILED_ITEMS)


def found(name: str) -> Task:
    """The task somebody named, looked for in the current folder too."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise InvalidInputError(f"{name!r} names no task; expected module:Task, such as shop.imports:ImportOrders.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"{name} cannot be imported: {error}. Look at its spelling, or change folder."
        ) from error
    task = value() if isinstance(value, type) else value
    if not isinstance(task, ConsumerMixin | AsyncConsumerMixin):
        kind = type(task).__name__
        raise InvalidInputError(f"{name} is a {kind}; expected a ConsumerMixin or an AsyncConsumerMixin.")
    if not hasattr(task, "source"):
        raise InvalidInputError(f"{name} has no source; expected an attribute `source` that gives out items.")
    return task


def _chosen(task: Task, path: Path | None, limit: int | None, concurrency: int | None) -> ConsumerPolicy:
    """What the task says, then the file, then the environment, then the options; the last word counts."""
    values = loading.load(path, os.environ, task.policy).model_dump()
    if limit is not None:
        values["loop"]["limit"] = limit
    if concurrency is not None:
        values["loop"]["concurrency"]["value"] = concurrency
    return loading.build(values)


def _run(task: Task, policy: ConsumerPolicy) -> tuple[Report, PipelineError | None]:
    """How the loop ended, and what broke it."""
    with stopped_by_signals(task), metrics.served(), _progress() as tell:
        try:
            if isinstance(task, ConsumerMixin):
                return task.consume_transactions(policy=policy, on_outcome=tell), None
            return asyncio.run(task.consume_transactions(policy=policy, on_outcome=tell)), None
        except (FetchException, ConsumerLoopTimeoutException) as error:
            return error.report or Report(), error


@contextmanager
def _progress() -> Iterator[Any]:
    """A line on a terminal that tells how far it got; where there is no terminal, nothing."""
    counts = Report()
    words = TextColumn("{task.completed} settled · {task.fields[failed]} failed · {task.fields[pace]}/s")
    with Progress(
        SpinnerColumn(),
        words,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        line, begun = progress.add_task("", total=None, failed=0, pace=0), time.monotonic()

        def tell(outcome: Outcome) -> None:
            counts.add(outcome)
            if not progress.disable:
                pace = counts.processed / max(0.001, time.monotonic() - begun)
                failed = counts.failed + counts.timed_out
                progress.update(line, completed=counts.processed, failed=failed, pace=f"{pace:.0f}")

        yield tell


def _say(report: Report, problem: PipelineError | None, *, as_json: bool) -> None:
    if as_json:
        shown.as_json({**report.as_dict(), "problem": None if problem is None else str(problem)})
        return
    counts = f"{report.succeeded} succeeded, {report.failed} failed, {report.timed_out} timed out, {report.left} left"
    typer.echo(f"{report.processed} settled in {report.batches} batches: {counts}. Ended: {report.ending or 'broken'}.")
    if problem is not None:
        typer.echo(str(problem), err=True)
