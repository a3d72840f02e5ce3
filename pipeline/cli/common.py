"""Share options, the registry, the actor, wake-up messages and output between commands."""

import getpass
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import PhaseTask
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.text import visible_text

if TYPE_CHECKING:
    from pipeline.background.messages import DispatchMessage
    from pipeline.workflows.registry import Registry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why. Kept in the audit. Required.")]
OptionalReason = Annotated[str, typer.Option("--reason", "-m", help="Why (optional). Kept in the audit.")]
By = Annotated[str, typer.Option("--by", help="Who acts; by default the user of this shell.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without this option the command only shows what it would do.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")]
Recent = Annotated[int, typer.Option(min=1, help="How many of the newest rows to search.")]


def load_settings() -> Settings:
    """Read the settings; with PIPELINE_APP, or an app that this process has loaded, as they are for its workers."""
    settings = Settings.load(os.environ)
    celery = sys.modules.get("pipeline.celery")  # as `manage.py pipeline` in a Django project has loaded it
    if settings.app or (celery is not None and celery.found_installation() is not None):
        from pipeline.celery import installed  # Celery is slow to import

        settings = installed().load_settings()
    return settings


def load_registry() -> "Registry":
    """Load the workflows of PIPELINE_WORKFLOWS or of PIPELINE_APP, as a worker does."""
    from pipeline.workflows.registry import Registry  # with all that authors use; few commands need it

    return Registry.load(load_settings().workflows)


def complete_workflow(incomplete: str) -> list[str]:
    """Complete the name of a workflow in a shell; offer nothing when the database is down."""
    try:
        with Database.connect_unpooled(Settings.load(os.environ).database_url).transaction() as tx:
            return [name for name in work.workflow_names(tx) if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - completion must not print errors
        return []


WorkflowOption = Annotated[str | None, typer.Option(help="Only of this workflow.", autocompletion=complete_workflow)]


def actor(by: str, reason: str) -> Actor:
    """Return who acts, and why. The name is only claimed: who can use the database can give any."""
    return Actor(name=by or getpass.getuser(), reason=reason, is_claimed=True)


def single_argument(arguments: Sequence[str] | None) -> str | None:
    """Return the id to show: ``ID`` and ``show ID`` are the same; nothing or ``list`` is None."""
    given = list(arguments or ())
    if len(given) > 1 and given[0] == "show":
        given = given[1:]
    if given == ["list"]:
        return None
    if len(given) > 1:
        raise InvalidInputError(f"{' '.join(given)!r} names several things; expected one, or none for the list.")
    return given[0] if given else None


class WakeUps:
    """Send wake-up messages for work that an act made due; remember whether the broker took them."""

    def __init__(self) -> None:
        self.is_notified: bool | None = None

    def wake_workflow(self, name: str) -> None:
        """Notify a worker that a workflow may have work."""
        from pipeline.tasks import messages as tasks_messages  # Celery is slow to import, and few commands need it

        self._record(tasks_messages.wake_workflow(name))

    def dispatch_run(self, run_id: UUID) -> None:
        """Notify a worker that a run's request may be sent."""
        self.dispatch_runs([run_id])

    def dispatch_runs(self, run_ids: Sequence[UUID]) -> None:
        """Notify a worker that the requests of these runs may be sent."""
        from pipeline.background.messages import DispatchMessage

        self.dispatch([DispatchMessage(task=PhaseTask.MUTATE, run_ids=tuple(map(str, run_ids)))])

    def dispatch(self, messages: "Iterable[DispatchMessage]") -> None:
        """Notify workers that runs may continue."""
        from pipeline.tasks import messages as tasks_messages

        for message in messages:
            self._record(tasks_messages.dispatch(message))

    def text(self) -> str:
        """Describe whether workers were notified; empty if there was nothing to send."""
        if self.is_notified is None:
            return ""
        return "Workers were notified." if self.is_notified else "The broker is unreachable; the next tick continues."

    def _record(self, is_sent: bool) -> None:
        self.is_notified = is_sent if self.is_notified is None else self.is_notified and is_sent


def printable(text: object, *, lines: bool = False) -> str:
    """Escape characters that could move a terminal's cursor, reorder text or fake a line."""
    return visible_text(str(text), keep="\n\t" if lines else "\t")


def print_lines(*lines: str) -> None:
    """Print each sentence on its own line, unwrapped; skip empty ones."""
    for line in lines:
        if line:
            typer.echo(printable(line, lines=True))


def print_more_note(number: int) -> None:
    """Print that an act was limited to the first items."""
    print_lines(f"These were the first {number}. There are more: repeat the command.")


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, default=_to_json))


def age(since: datetime | None, now: datetime) -> str:
    """Format how long ago, in one unit: 12s, 5m, 3h, 8d."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def format_time(at: datetime | None) -> str:
    """Format an instant to the second, in the database's zone."""
    return "" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def _to_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
