"""``pipeline consume``: run a task of the consumer engine, watch it, and end it cleanly.

Exit codes: 0 the loop ended by itself or was asked to, and everything fetched was settled; 1 it broke:
nothing can be fetched, or its time is up, or items were left, or were settled by nobody since their
exception handler failed too; 2 wrong usage; 4 it ended well but, with ``--strict``, some item did not
succeed; 75 the Redis of a task that connects when it is made cannot be used right now: start it again.
"""

import importlib
import inspect
import logging
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline.cli import common, metrics
from pipeline.config import EXIT_RESTART
from pipeline.consumer_engine import policy_files
from pipeline.consumer_engine.asyncio_driver import BoundedRunner
from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin, stopped_by_signals
from pipeline.consumer_engine.errors import AbandonedCallsException, ConsumerLoopTimeoutException, FetchException
from pipeline.consumer_engine.lifecycle import ItemOutcome, LoopReport
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.domain.errors import InvalidInputError, PipelineError, quantity
from pipeline.ingest.errors import NoStreamError, QueueError
from pipeline.telemetry.tracing import export
from pipeline.workflows.registry import add_current_folder_to_path

EXIT_BROKEN, EXIT_FAILED_ITEMS = 1, 4
_PACKAGE, _STANDARD_LIBRARY = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))

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
    as_json: common.AsJson = False,
) -> None:
    """Fetch items and work on them, as the task and its policy say, until nothing is left or somebody asks to end.

    SIGTERM and Ctrl-C settle what was fetched and end with 0; a second one leaves what is not settled.
    Every field of the policy can be set in the environment: CONSUME_LOOP__STREAMING=true.
    """
    task = find_task(name)
    chosen = _effective_policy(task, policy, limit, concurrency)
    leaving = BoundedRunner()
    report, problem = _run_task(task, chosen, leaving)
    _print_report(report, problem, as_json=as_json)
    code = _exit_code(report, problem, strict=strict)
    if not leaving.is_clean:
        _exit_now(code)
    if code:
        raise typer.Exit(code)


def _exit_code(report: LoopReport, problem: PipelineError | None, *, strict: bool) -> int:
    if problem is not None or report.unfinished or report.handler_failures:
        return EXIT_BROKEN
    return EXIT_FAILED_ITEMS if strict and report.succeeded != report.processed else 0


def _exit_now(code: int) -> NoReturn:
    """End the process though code in it does not end: Python itself would wait for that code."""
    export.stop()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def find_task(name: str) -> Task:
    """The task somebody named, looked for in the current folder too."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise InvalidInputError(f"{name!r} names no task; expected module:Task, such as shop.imports:ImportOrders.")
    add_current_folder_to_path()
    value = _import_task(name, module, attribute)
    task = _instantiate(name, value) if isinstance(value, type) and issubclass(value, Task) else value
    if not isinstance(task, Task):
        kind = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise InvalidInputError(f"{name} is {kind}; expected a ConsumerMixin or an AsyncConsumerMixin.")
    return task


def _import_task(name: str, module: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            problem = f"there is no module {error.name}. Look at its spelling, or change folder"
        else:
            problem = (
                f"{module} needs {error.name}, which is not there{_location(error)}. Install it, or correct the line"
            )
    except SyntaxError as error:
        where = f"{Path(error.filename or module).name}:{error.lineno}"
        problem = f"{error.msg} ({where}). Correct the line"
    except AttributeError as error:
        problem = f"{error}{_location(error)}. Look at its spelling"
    except PipelineError as error:
        raise _own_error(f"{name} cannot be imported", error) from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the module is somebody's own
        problem = f"{module} raised {type(error).__name__}{_location(error)}. Import it in Python to see why"
    raise InvalidInputError(f"{name} cannot be imported: {problem}.")


def _instantiate(name: str, kind: type[Task]) -> Task:
    """An object of a class that needs no arguments. What it raises is not shown: it may have looked at secrets."""
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        problem = f"{name} needs arguments ({error}); expected a class that needs none, or an object that is ready."
        raise InvalidInputError(problem) from None
    try:
        return kind()
    except PipelineError as error:
        raise _own_error(f"{name} cannot be made", error) from error
    except Exception as error:
        problem = f"{name} cannot be made: {type(error).__name__}{_location(error)}. Make it in Python to see why."
        raise InvalidInputError(problem) from error


def _own_error(what: str, error: PipelineError) -> Exception:
    """What we said ourselves holds no secrets, and says what to do. A Redis that is away may be back soon."""
    words = f"{what}{_location(error)}: {error}"
    if isinstance(error, QueueError) and not isinstance(error, NoStreamError):
        typer.echo(words, err=True)
        return typer.Exit(EXIT_RESTART)
    return InvalidInputError(words)


def _location(error: BaseException) -> str:
    """The last line of somebody's own code that an error came through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_user_code(Path(each.filename))]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_user_code(file: Path) -> bool:
    is_standard = file.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in file.parts
    return not (is_standard or file.is_relative_to(_PACKAGE) or str(file).startswith("<frozen"))


def _effective_policy(task: Task, path: Path | None, limit: int | None, concurrency: int | None) -> ConsumerPolicy:
    """What the task says, then the file, then the environment, then the options; the last word counts."""
    values = policy_files.load(path, os.environ, task.policy).model_dump()
    if limit is not None:
        values["loop"]["limit"] = limit
    if concurrency is not None:
        values["loop"]["concurrency"]["value"] = concurrency
    return policy_files.build(values)


def _run_task(task: Task, policy: ConsumerPolicy, leaving: BoundedRunner) -> tuple[LoopReport, PipelineError | None]:
    """How the loop ended, and what broke it."""
    with stopped_by_signals(task), metrics.metrics_endpoint(), _progress() as tell:
        try:
            if isinstance(task, ConsumerMixin):
                return task.consume_transactions(policy=policy, on_outcome=tell), None
            return leaving.run(task.consume_transactions(policy=policy, on_outcome=tell)), None
        except (FetchException, ConsumerLoopTimeoutException, AbandonedCallsException) as error:
            return error.report or LoopReport(), error


@contextmanager
def _progress() -> Iterator[Any]:
    """A line on a terminal that tells how far it got; where there is no terminal, nothing."""
    counts = LoopReport()
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

        def tell(outcome: ItemOutcome) -> None:
            counts.add(outcome)
            if not progress.disable:
                pace = counts.processed / max(0.001, time.monotonic() - begun)
                failed = counts.failed + counts.timed_out
                progress.update(line, completed=counts.processed, failed=failed, pace=f"{pace:.0f}")

        yield tell


def _print_report(report: LoopReport, problem: PipelineError | None, *, as_json: bool) -> None:
    if as_json:
        common.print_json({**report.as_dict(), "problem": None if problem is None else str(problem)})
        return
    typer.echo(_summary(report))
    if problem is not None:
        typer.echo(str(problem), err=True)


def _summary(report: LoopReport) -> str:
    late = f" ({report.step_timeouts} in the timeout of a step)" if report.step_timeouts else ""
    doubt = f" ({report.in_doubt} in doubt: a handler had begun)" if report.in_doubt else ""
    unhandled = (
        f", {report.handler_failures} settled by nobody: the exception handler failed too"
        if report.handler_failures
        else ""
    )
    counts = f"{report.succeeded} succeeded, {report.failed} failed{late}, {report.timed_out} timed out"
    done = f"{report.processed} settled in {quantity(report.batches, 'batch')}"
    return f"{done}: {counts}, {report.unfinished} left{doubt}{unhandled}. Ended: {report.ending or 'broken'}."
