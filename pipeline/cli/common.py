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

from pipeline.background.messages import Message
from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.values import Person
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.workflows.registry import Registry

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why; it is kept in the audit. Needed.")]
AnyReason = Annotated[str, typer.Option("--reason", "-m", help="Why, if you say it; it is kept in the audit.")]
By = Annotated[str, typer.Option("--by", help="Who; by default the user of this shell.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without this, it is only shown what would be done.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")]
Recent = Annotated[int, typer.Option(min=1, help="How many of the newest rows to look through.")]

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def registry() -> Registry:
    """What PIPELINE_WORKFLOWS names, found as a worker finds it."""
    return Registry.load(Settings.load(os.environ).workflows)


def operations() -> Registry | None:
    """The registry, for reads: whoever is on call may not have the code. Then what it would explain is hidden."""
    try:
        return registry()
    except PipelineError as error:
        typer.echo(f"{error} Requests are shown without their parameters.", err=True)
        return None


def workflow_names(incomplete: str) -> list[str]:
    """What a shell offers while the name of a workflow is being typed; nothing when the database is away."""
    try:
        with Database.unpooled(Settings.load(os.environ).database_url).transaction() as tx:
            return [name for name in work.workflow_names(tx) if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001 - a key press is no place for an error
        return []


Workflow = Annotated[str | None, typer.Option(help="Only of this workflow.", autocompletion=workflow_names)]


def person(by: str, reason: str) -> Person:
    """Who acts, and why."""
    return Person(name=by or getpass.getuser(), reason=reason)


def uuid(value: str, what: str = "mutation") -> UUID:
    """An id as people type it."""
    try:
        return UUID(value)
    except ValueError:
        raise InvalidInputError(f"{value!r} is not the id of a {what}; expected a UUID as the lists show it.") from None


def one(words: Sequence[str] | None) -> str | None:
    """The one thing to show: ``ID`` and ``show ID`` mean the same, nothing and ``list`` mean the list."""
    given = list(words or ())
    if len(given) > 1 and given[0] == "show":
        given = given[1:]
    if given == ["list"]:
        return None
    if len(given) > 1:
        raise InvalidInputError(f"{' '.join(given)!r} names several things; expected one, or none for the list.")
    return given[0] if given else None


class Bell:
    """Rings for work that an act made due, and remembers whether anybody heard."""

    def __init__(self) -> None:
        self.heard: bool | None = None

    def workflow(self, name: str) -> None:
        """Tell a worker that a workflow may have work."""
        from pipeline.tasks import messages as tasks_messages  # Celery is slow to import, and most commands never ring

        self._heard(tasks_messages.poke(name))

    def run(self, run_id: UUID) -> None:
        """Tell a worker that a run's request may be sent."""
        from pipeline.tasks import messages as tasks_messages

        self._heard(tasks_messages.send(Message(task="pipeline.mutate", ids=(str(run_id),))))

    def runs(self, messages: Iterable[Message]) -> None:
        """Tell workers that runs may go on."""
        from pipeline.tasks import messages as tasks_messages

        for message in messages:
            self._heard(tasks_messages.send(message))

    def words(self) -> str:
        """What follows from having rung, or from not having been heard."""
        if self.heard is None:
            return ""
        return "The broker was told." if self.heard else "The broker cannot be reached; the next tick goes on with it."

    def _heard(self, heard: bool) -> None:
        self.heard = heard if self.heard is None else self.heard and heard


def printable(text: object, *, lines: bool = False) -> str:
    """Text from outside as a terminal may see it: what would move its cursor, or pass for a line, is spelt out."""
    spelt = _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", str(text))
    return spelt if lines else spelt.replace("\n", "\\n")


def say(*lines: str) -> None:
    """Print sentences, each on a line of its own, never folded; empty ones are left out."""
    for line in lines:
        if line:
            typer.echo(printable(line, lines=True))


def say_more(number: int) -> None:
    """Say that an act reached only the first of what was meant."""
    say(f"These were the first {number}; there are more: repeat it.")


def as_json(value: Any) -> None:
    """Print a value for a program to read."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def age(since: datetime | None, now: datetime) -> str:
    """How long ago, in one unit: 12s, 5m, 3h, 8d."""
    if since is None:
        return ""
    seconds = max(0, int((now - since).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def moment(at: datetime | None) -> str:
    """An instant to the second, as the database has it."""
    return "" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
