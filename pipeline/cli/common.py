"""What several commands need: options, the registry, a person, a doorbell and JSON."""

import getpass
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import typer

from pipeline.background.messages import DispatchMessage
from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.workflows.registry import Registry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why; it is kept in the audit. Needed.")]
OptionalReason = Annotated[str, typer.Option("--reason", "-m", help="Why, if you say it; it is kept in the audit.")]
By = Annotated[str, typer.Option("--by", help="Who; by default the user of this shell.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without this, it is only shown what would be done.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")]
Recent = Annotated[int, typer.Option(min=1, help="How many of the newest rows to look through.")]

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def load_registry() -> Registry:
    """What PIPELINE_WORKFLOWS names, found as a worker finds it."""
    return Registry.load(Settings.load(os.environ).workflows)


def registry_or_none() -> Registry | None:
    """The registry, for reads: whoever is on call may not have the code. Then what it would explain is hidden."""
    try:
        return load_registry()
    except PipelineError as error:
        typer.echo(f"{error} Requests are shown without their parameters.", err=True)
        return None


def complete_workflow(incomplete: str) -> list[str]:
    """What a shell offers while the name of a workflow is being typed; nothing when the database is away."""
    try:
        with Database.connect_unpooled(Settings.load(os.environ).database_url).transaction() as tx:
            return [name for name in work.workflow_names(tx) if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - a key press is no place for an error
        return []


WorkflowOption = Annotated[str | None, typer.Option(help="Only of this workflow.", autocompletion=complete_workflow)]


def actor(by: str, reason: str) -> Actor:
    """Who acts, and why."""
    return Actor(name=by or getpass.getuser(), reason=reason)


def single_argument(arguments: Sequence[str] | None) -> str | None:
    """The one thing to show: ``ID`` and ``show ID`` mean the same, nothing and ``list`` mean the list."""
    given = list(arguments or ())
    if len(given) > 1 and given[0] == "show":
        given = given[1:]
    if given == ["list"]:
        return None
    if len(given) > 1:
        raise InvalidInputError(f"{' '.join(given)!r} names several things; expected one, or none for the list.")
    return given[0] if given else None


class WakeUps:
    """Rings for work that an act made due, and remembers whether anybody heard."""

    def __init__(self) -> None:
        self.is_notified: bool | None = None

    def wake_workflow(self, name: str) -> None:
        """Tell a worker that a workflow may have work."""
        from pipeline.tasks import messages as tasks_messages  # Celery is slow to import, and most commands never ring

        self._record(tasks_messages.wake_workflow(name))

    def dispatch_run(self, run_id: UUID) -> None:
        """Tell a worker that a run's request may be sent."""
        from pipeline.tasks import messages as tasks_messages

        self._record(tasks_messages.dispatch(DispatchMessage(task="pipeline.mutate", run_ids=(str(run_id),))))

    def dispatch(self, messages: Iterable[DispatchMessage]) -> None:
        """Tell workers that runs may go on."""
        from pipeline.tasks import messages as tasks_messages

        for message in messages:
            self._record(tasks_messages.dispatch(message))

    def text(self) -> str:
        """What follows from having rung, or from not having been heard."""
        if self.is_notified is None:
            return ""
        return (
            "The broker was told."
            if self.is_notified
            else "The broker cannot be reached; the next tick goes on with it."
        )

    def _record(self, heard: bool) -> None:
        self.is_notified = heard if self.is_notified is None else self.is_notified and heard


def printable(text: object, *, lines: bool = False) -> str:
    """Text from outside as a terminal may see it: what would move its cursor, or pass for a line, is spelt out."""
    spelt = _CONTROL_CHARACTERS.sub(lambda found: f"\\x{ord(found[0]):02x}", str(text))
    return spelt if lines else spelt.replace("\n", "\\n")


def print_lines(*lines: str) -> None:
    """Print sentences, each on a line of its own, never folded; empty ones are left out."""
    for line in lines:
        if line:
            typer.echo(printable(line, lines=True))


def print_more_note(number: int) -> None:
    """Say that an act reached only the first of what was meant."""
    print_lines(f"These were the first {number}; there are more: repeat it.")


def print_json(value: Any) -> None:
    """Print a value for a program to read."""
    typer.echo(json.dumps(value, indent=2, default=_to_json))


def age(since: datetime | None, now: datetime) -> str:
    """How long ago, in one unit: 12s, 5m, 3h, 8d."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def format_time(at: datetime | None) -> str:
    """An instant to the second, as the database has it."""
    return "" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def _to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
