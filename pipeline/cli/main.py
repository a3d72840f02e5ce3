"""Define the ``pipeline`` command. Exit codes are stable: scripts and probes rely on them.

Help is printed from the table below. Only the command that is called is imported, with what it needs (``setup.py``), so
that it starts fast.
"""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from platform import python_version
from typing import Annotated, Any, NamedTuple, TextIO, cast

import typer

from pipeline.cli.commands import CommandGroup, PlainGroup
from pipeline.config import (
    EXIT_ATTENTION,
    EXIT_DATABASE,
    EXIT_NOT_FOUND,
    EXIT_REFUSED,
    EXIT_UNSAFE,
    EXIT_USAGE,
    package_version,
)

EXIT_BROKEN, EXIT_INTERRUPTED = 1, 130
EXIT_BROKEN_PIPE = 141  #: what a shell reports of a program that SIGPIPE ended
#: What each exit code means.
EXIT_CODES = {
    0: "done",
    EXIT_BROKEN: "the doctor found a broken invariant, chaos or bench found a disagreement, some of many acts were "
    "refused, or there was more to act on than fits into one command",
    EXIT_USAGE: "wrong usage: an option or a value that cannot be accepted",
    EXIT_DATABASE: "the database is unreachable, or not at the version this code needs",
    EXIT_ATTENTION: "`pipeline attention --check`: something waits for an operator",
    EXIT_NOT_FOUND: "an unknown name or id",
    EXIT_REFUSED: "a refused act, or one that was formed on a state that has changed",
    EXIT_UNSAFE: "wrong settings",
    EXIT_INTERRUPTED: "interrupted with Ctrl-C",
    EXIT_BROKEN_PIPE: "the reader of the output left, as `head` does; what the command did is done",
}


class Command(NamedTuple):
    """A subcommand: its group in the help, its module and attribute, and the first paragraph of its help."""

    group: str
    target: str
    summary: str


#: Groups of the help, in its order.
LOOK, DECIDE, SWITCH, PUT_IN, RUN, LOOK_AFTER = "Look", "Decide", "Switch", "Put in", "Run", "Look after"

COMMANDS = {
    "attention": Command(
        LOOK,
        "attention:attention",
        "List everything that waits for an operator, alike questions as one, each with the commands to type.",
    ),
    "top": Command(
        LOOK, "top:top", "Show workflows, backlog, rates and what waits for an operator, live. q or Ctrl-C ends it."
    ),
    "workflows": Command(
        LOOK,
        "workflows:workflows",
        "List workflows with status, reason and backlog. With a name: everything about that one.",
    ),
    "events": Command(
        LOOK, "runs:events", "List events, newest first. With an id: its deliveries, and what each caused."
    ),
    "runs": Command(
        LOOK,
        "runs:runs",
        "List runs, newest first. With an id: its timeline, inputs, outputs, mutation, and what to do next.",
    ),
    "mutations": Command(
        LOOK,
        "mutations:mutations",
        "List mutations that wait for an operator, or of another status. With an id: its timeline and what to do.",
    ),
    "trace": Command(
        LOOK, "attention:trace", "Show everything that led to a thing, and everything that followed from it."
    ),
    "audit": Command(
        LOOK, "audit:audit", "List what operators and sweeps did, newest first, with who, why and to what."
    ),
    "connectors": Command(
        LOOK,
        "connectors:connectors",
        "List the operations that workers have registered, with the grade of each.",
    ),
    "breakers": Command(
        LOOK, "connectors:breakers", "List operations whose circuit breaker is open: they start no new mutation."
    ),
    "plan": Command(
        LOOK,
        "connectors:plan",
        "Show what a workflow would send now, and what its code renames. Nothing is reserved, sent or moved.",
    ),
    "open": Command(
        LOOK, "system:open_", "Print the address of the console at a thing, and open it in a browser if there is one."
    ),
    "resolve": Command(DECIDE, "mutations:resolve", "Resolve an indeterminate mutation, or many at once."),
    "resolve-from": Command(
        DECIDE,
        "mutations:resolve_from",
        "Resolve mutations by an export of the provider: a mutation in the file happened.",
    ),
    "approve": Command(
        DECIDE,
        "mutations:approve",
        "Approve exactly the request that `pipeline mutations ID` shows. A changed request is not sent.",
    ),
    "reject": Command(
        DECIDE,
        "mutations:reject",
        "Reject a request that was not sent yet, also an approved one. Its events are skipped.",
    ),
    "acknowledge": Command(
        DECIDE, "mutations:acknowledge", "Record that a late effect was dealt with; it is no longer reported."
    ),
    "quarantine": Command(
        DECIDE, "quarantine:app", "Quarantined events: list them, release them to their consumers, or skip them."
    ),
    "pause": Command(
        SWITCH, "workflows:pause", "Start no run of a workflow until it is resumed. Active runs continue."
    ),
    "resume": Command(
        SWITCH, "workflows:resume", "Resume a workflow. Lifts its pause and the blocks that wait for an operator."
    ),
    "maintenance": Command(
        SWITCH, "workflows:maintenance", "Start no run of a workflow until new code is deployed, or end that."
    ),
    "breaker": Command(SWITCH, "connectors:breaker", "Open the circuit breaker of an operation, or close it."),
    "publish": Command(
        PUT_IN, "publish:publish", "Publish events. A message id that was published before changes nothing."
    ),
    "ingest": Command(PUT_IN, "ingest:app", "Publish the entries of a Redis stream as events."),
    "init": Command(
        RUN,
        "init:init",
        "Write a new package with a workflow, a connector, their test and settings into this folder.",
    ),
    "dev": Command(
        RUN,
        "dev:dev",
        "Run Postgres, Redis, a worker, beat, the console and Flower in this terminal. Ctrl-C stops all of them.",
    ),
    "api": Command(RUN, "api:api", "Serve the HTTP API and the operator console, until SIGTERM or Ctrl-C."),
    "consume": Command(
        RUN,
        "consume:consume",
        "Fetch and process items as the task's policy says, until nothing is left or a signal comes.",
    ),
    "metrics": Command(
        RUN, "metrics:metrics", "Serve the gauges of the database to Prometheus at /metrics, until SIGTERM or Ctrl-C."
    ),
    "doctor": Command(LOOK_AFTER, "database:doctor", "Check every invariant, and that commits are durable."),
    "db": Command(LOOK_AFTER, "database:app", "Migrate the schema of the database."),
    "workers": Command(
        LOOK_AFTER,
        "system:workers",
        "List the workers that run, and those that were killed within the last day.",
    ),
    "settings": Command(
        LOOK_AFTER,
        "system:settings",
        "List every setting with its value, its default and its meaning. Passwords and secrets are masked.",
    ),
    "tokens": Command(LOOK_AFTER, "tokens:app", "API tokens: list them, create one, or revoke one."),
    "dead-letters": Command(
        LOOK_AFTER, "dead_letters:app", "Broker messages that workers refused: list them, send them back, or drop them."
    ),
    "chaos": Command(
        LOOK_AFTER,
        "chaos:chaos",
        "Send mutations to a faulty provider while workers and servers are killed; compare its records with the "
        "ledger.",
    ),
    "bench": Command(
        LOOK_AFTER,
        "bench:bench",
        "Measure runs per second, latency, statements, processor time and recovery; check the promise after each case.",
    ),
}

DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="PIPELINE_DATABASE_URL", help="URL of the database.", show_envvar=True)
]


class _MainGroup(PlainGroup):
    """The subcommands in the order of the table; Typer would put groups of commands last."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature of click
        return [name for name in COMMANDS if name in self.commands]


def build_app(names: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """Build the ``pipeline`` command. Only these subcommands can be called; the others are in its help alone."""
    app = CommandGroup(
        cls=_MainGroup,
        name="pipeline",
        help="Durable side effects on Celery: operate the database and the runs in it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(set_up)
    for name, command in COMMANDS.items():
        found = _load(command) if name in names else _refuse_call
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, rich_help_panel=command.group)
        else:
            help_text = command.summary if name not in names else None
            app.command(name, help=help_text, rich_help_panel=command.group)(found)
    return app


def _load(command: Command) -> Any:
    module, _, attribute = command.target.partition(":")
    return getattr(import_module(f"pipeline.cli.{module}"), attribute)


def _refuse_call() -> None:
    raise AssertionError("this command was built for its help only")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version  # slow to import: it loads `email`

        typer.echo(f"pipeline {package_version()}, Celery {version('celery')}, Python {python_version()}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
]


def set_up(context: typer.Context, database_url: DatabaseUrl = None, _: Version = False) -> None:
    """Put the database into the context; it connects on first use."""
    from pipeline.cli import setup

    setup.prepare_context(context, database_url)


class BrokenPipeGuard:
    """Wrap standard output, and exit quietly when its reader leaves, as `head` does.

    SIGPIPE stays ignored: it would also end a process whose server closed the connection.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._exit_on_broken_pipe():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._exit_on_broken_pipe():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _exit_on_broken_pipe(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())  # Python flushes the rest of the buffer there at exit
            os.close(devnull)
            raise SystemExit(EXIT_BROKEN_PIPE) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; turn an expected error into a sentence and an exit code, without traceback."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    is_completion = "_PIPELINE_COMPLETE" in os.environ
    names = [name for name in COMMANDS if name in given or is_completion]
    with redirect_stdout(cast(TextIO, BrokenPipeGuard(sys.stdout))):
        if names:
            from pipeline.cli import setup

            setup.run(build_app(names), given)
        else:
            build_app(names)(args=given, prog_name="pipeline")
