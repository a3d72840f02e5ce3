"""Command ``pipeline dev``: run the whole system in one terminal."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from pipeline.cli import api, common
from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError
from pipeline.embedded import development
from pipeline.embedded.processes import ServersError

_COLOURS = {"worker": "cyan", "beat": "magenta", "console": "blue", "flower": "green"}
_WIDEST = max(len(name) for name in _COLOURS)


def dev(  # noqa: PLR0913 - options of a command
    modules: Annotated[
        list[str] | None, typer.Argument(help="Modules with workflows; by default those of PIPELINE_WORKFLOWS.")
    ] = None,
    *,
    concurrency: Annotated[int, typer.Option(min=1, help="Processes of the worker.")] = 2,
    flower_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of Flower; the next free one if taken.")
    ] = 5555,
    flower: Annotated[bool, typer.Option(help="Run Flower too.")] = True,
    console_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the console; the next free one if taken.")
    ] = 8080,
    console: Annotated[bool, typer.Option(help="Run the operator console and the HTTP API too.")] = True,
    home: Annotated[Path | None, typer.Option(help="Data directory of the servers.", show_default=False)] = None,
) -> None:
    """Run Postgres, Redis, a worker, beat, the console and Flower in this terminal. Ctrl-C stops all of them.

    It prints one line per outcome: workflow, input, operation, what happened, how long. PIPELINE_LOG_FORMAT=pretty
    prints every step and task. A server whose URL is in the environment is used as it is. A crashed process is
    restarted, up to 5 times a minute. The process id of the worker is in worker.pid of the data directory.
    """
    settings = Settings.load(os.environ)
    named = ",".join(modules) if modules else ",".join(settings.workflows)
    os.environ["PIPELINE_WORKFLOWS"] = named
    if not common.load_registry().workflows:
        raise InvalidInputError(
            "No workflow is known; expected modules that declare one, such as `pipeline dev examples.receipts`, or "
            "PIPELINE_WORKFLOWS."
        )
    options = development.DevOptions(
        home=home or settings.home,
        workflows=named,
        concurrency=concurrency,
        flower_port=flower_port if flower else None,
        console_port=console_port if console and _can_serve_console() else None,
    )
    try:
        code = development.run(options, os.environ, _print_line)
    except ServersError as error:
        raise InvalidInputError(str(error)) from error
    sys.stdout.flush()
    if code:
        raise typer.Exit(code)


def _can_serve_console() -> bool:
    missing = api.missing_packages()
    if missing:
        common.print_lines(
            f"No console: {missing} missing; `pip install 'celery-durable-effects[console]'` installs all."
        )
    return not missing


def _print_line(name: str, line: str) -> None:
    """Print one line of a process after its name, and flush it at once."""
    prefix = Text(f"{name.ljust(_WIDEST)} │ " if name else "", style=_COLOURS.get(name, ""))
    console = Console(highlight=False, soft_wrap=True)
    console.print(prefix + Text.from_ansi(line) if name else Text(line))
    sys.stdout.flush()
