"""Command ``pipeline consume``: run a task of the consumer engine until it ends or is stopped.

Exit codes:

- 0: the loop ended or was stopped, and everything fetched was settled
- 1: nothing can be fetched, the time is up, items were left or are in doubt, or an exception handler failed too
- 2: wrong usage
- 4: with ``--strict``: some item did not succeed
- 75: the Redis of a task that connects in its constructor is unavailable; start it again
"""

import importlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline.cli import common, metrics
from pipeline.config import EXIT_RESTART
from pipeline.consumer_engine.asyncio_driver import BoundedRunner
from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin, stopped_by_signals
from pipeline.consumer_engine.errors import AbandonedCallsException, ConsumerLoopTimeoutException, FetchException
from pipeline.consumer_engine.lifecycle import ItemOutcome, LoopReport
from pipeline.consumer_engine.policies import ConsumerPolicy, build_policy, load_policy
from pipeline.domain.errors import InvalidInputError, PipelineError, quantity
from pipeline.ingest.errors import NoStreamError, QueueError
from pipeline.telemetry import spans_export
from pipeline.worker import liveness
from pipeline.workflows.registry import add_current_folder_to_path, fault_site

EXIT_BROKEN, EXIT_FAILED_ITEMS = 1, 4
_STALLED_AFTER = 300.0  #: seconds

Task = ConsumerMixin | AsyncConsumerMixin


def consume(  # noqa: PLR0913 - options of a command
    name: Annotated[
        str, typer.Argument(metavar="MODULE:TASK", help="A task: an object, or a class that needs no arguments.")
    ],
    *,
    policy: Annotated[
        Path | None, typer.Option(help="A policy as TOML, YAML or JSON; overrides the task's own.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Items to take at most.", show_default=False)] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Items at once.", show_default=False)] = None,
    stalled_after: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds after which a fetch or an item counts as stalled, so that the liveness file gets old; by "
            "default 300, or more if the timeouts of the policy are longer.",
            show_default=False,
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 4 if an item did not succeed.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Fetch and process items as the task's policy says, until nothing is left or a signal comes.

    SIGTERM and Ctrl-C finish the fetched items and exit with 0; a second signal leaves unfinished items.
    Every field of the policy can be set in the environment: CONSUME_LOOP__STREAMING=true.
    """
    task = find_task(name)
    chosen = _effective_policy(task, policy, limit, concurrency)
    _show_liveness(task, chosen, stalled_after)
    leaving = BoundedRunner()
    report, problem = _run_task(task, chosen, leaving)
    _print_report(report, problem, as_json=as_json)
    code = _exit_code(report, problem, strict=strict)
    if not leaving.is_clean:
        _exit_now(code)
    if code:
        raise typer.Exit(code)


def _show_liveness(task: Task, policy: ConsumerPolicy, stalled_after: float | None) -> None:
    """Touch the liveness file in a thread while no fetch and no item is stalled."""
    file = common.load_settings().liveness_file
    if file is None:
        return
    after = stalled_after or longest_regular(policy)
    watch = partial(liveness.touch_forever, file, stalled=partial(task.stalled, after))
    threading.Thread(target=watch, name="pipeline-liveness", daemon=True).start()


def longest_regular(policy: ConsumerPolicy) -> float:
    """Return after how many seconds a fetch or an item is stalled: no policy of its steps lets it take longer."""
    steps = policy.steps
    item = sum(step.retry.longest() for step in (steps.process, steps.success, steps.exception))
    if policy.loop.transaction_timeout is not None:
        item = 2 * policy.loop.transaction_timeout
    return max(_STALLED_AFTER, *(bound + _STALLED_AFTER / 10 for bound in (steps.fetch.retry.longest(), item)))


def _exit_code(report: LoopReport, problem: PipelineError | None, *, strict: bool) -> int:
    if problem is not None or report.unfinished or report.handler_failures or report.in_doubt:
        return EXIT_BROKEN
    return EXIT_FAILED_ITEMS if strict and report.succeeded != report.processed else 0


def _exit_now(code: int) -> NoReturn:
    """Exit although abandoned calls still run; Python itself would wait for them."""
    spans_export.stop()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def find_task(name: str) -> Task:
    """Import a task by its name, also from the current folder."""
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
            problem = f"there is no module {error.name}. Check its spelling, or change folder"
        else:
            problem = (
                f"{module} needs {error.name}, which is not there{_location(error)}. Install it, or correct the line"
            )
    except SyntaxError as error:
        problem = f"{error.msg}{_location(error)}. Correct the line"
    except AttributeError as error:
        problem = f"{error}{_location(error)}. Check its spelling"
    except PipelineError as error:
        raise _own_error(f"{name} cannot be imported", error) from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        problem = f"{module} raised {type(error).__name__}{_location(error)}. Import it in Python to see why"
    raise InvalidInputError(f"{name} cannot be imported: {problem}.")


def _instantiate(name: str, kind: type[Task]) -> Task:
    """Create the task. The text of an error is not shown: user code may have put secrets into it."""
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
    """Show an error of our own, which holds no secrets. An unavailable Redis exits with 75, to be restarted."""
    message = f"{what}{_location(error)}: {error}"
    if isinstance(error, QueueError) and not isinstance(error, NoStreamError):
        typer.echo(message, err=True)
        return typer.Exit(EXIT_RESTART)
    return InvalidInputError(message)


def _location(error: BaseException) -> str:
    site = fault_site(error)
    return f" ({site})" if site else ""


def _effective_policy(task: Task, path: Path | None, limit: int | None, concurrency: int | None) -> ConsumerPolicy:
    """Merge the policy: task, then file, then environment, then options; the last one wins."""
    values = load_policy(path, os.environ, task.policy).model_dump()
    if limit is not None:
        values["loop"]["limit"] = limit
    if concurrency is not None:
        values["loop"]["concurrency"]["value"] = concurrency
    return build_policy(values)


def _run_task(task: Task, policy: ConsumerPolicy, leaving: BoundedRunner) -> tuple[LoopReport, PipelineError | None]:
    """Run the loop; return its report and the error that broke it."""
    with stopped_by_signals(task), metrics.metrics_endpoint(), _progress() as report_outcome:
        try:
            if isinstance(task, ConsumerMixin):
                return task.consume_transactions(policy=policy, on_outcome=report_outcome), None
            return leaving.run(task.consume_transactions(policy=policy, on_outcome=report_outcome)), None
        except (FetchException, ConsumerLoopTimeoutException, AbandonedCallsException) as error:
            return error.report or LoopReport(), error


@contextmanager
def _progress() -> Iterator[Any]:
    """Show a line of progress on a terminal; elsewhere nothing."""
    counts = LoopReport()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.completed} settled · {task.fields[failed]} failed · {task.fields[rate]}/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        line, started_at = progress.add_task("", total=None, failed=0, rate=0), time.monotonic()

        def report_outcome(outcome: ItemOutcome) -> None:
            counts.add(outcome)
            if not progress.disable:
                rate = counts.processed / max(0.001, time.monotonic() - started_at)
                failed = counts.failed + counts.timed_out
                progress.update(line, completed=counts.processed, failed=failed, rate=f"{rate:.0f}")

        yield report_outcome


def _print_report(report: LoopReport, problem: PipelineError | None, *, as_json: bool) -> None:
    if as_json:
        common.print_json({**report.as_dict(), "problem": None if problem is None else str(problem)})
        return
    typer.echo(_summary(report))
    if problem is not None:
        typer.echo(str(problem), err=True)


def _summary(report: LoopReport) -> str:
    late = f" ({report.step_timeouts} in the timeout of a step)" if report.step_timeouts else ""
    doubt = f", {report.in_doubt} in doubt: a handler had begun and was cut" if report.in_doubt else ""
    unhandled = (
        f", {report.handler_failures} not settled: the exception handler failed too" if report.handler_failures else ""
    )
    counts = f"{report.succeeded} succeeded, {report.failed} failed{late}, {report.timed_out} timed out"
    done = f"{report.processed} settled in {quantity(report.batches, 'batch')}"
    return f"{done}: {counts}, {report.unfinished} left{unhandled}{doubt}. Ended: {report.ending or 'broken'}."
