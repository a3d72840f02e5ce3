"""``pipeline publish``: events from an argument, a file or standard input."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from pipeline.cli import shown
from pipeline.client.publishing import Event, Receipt, checked, event
from pipeline.client.publishing import publish as publish_in
from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.limits import Limits
from pipeline.store.database import Database
from pipeline.telemetry import contexts

_BATCH = 500
_LONGEST_NAME = 40  #: of a key that is quoted


def publish(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    workflow: Annotated[str, typer.Argument(help="Which workflow.")],
    topic: Annotated[str, typer.Argument(help="Which topic.")],
    payload: Annotated[
        str | None, typer.Argument(help="One payload as JSON. Without it, events come from --file.")
    ] = None,
    *,
    message_id: Annotated[str | None, typer.Option(help="What names this fact; needed with a payload.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, each with message_id, payload and perhaps topic, key, title, traceparent; - for standard "
            "input. What was published before an error stays; repeating it changes nothing."
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Rewrite payloads that no run has seen.")] = False,
    as_json: shown.AsJson = False,
) -> None:
    """Publish events. A message id that is there already changes nothing."""
    if (payload is None) == (file is None):
        raise InvalidInputError("Give either one payload or --file; --file - reads standard input.")
    if payload is None and message_id is not None:
        raise InvalidInputError("--message-id names one payload; in a file each line has its own.")
    if payload is not None and message_id is None:
        raise InvalidInputError("A payload needs --message-id: the name of the fact, the same whenever it is repeated.")
    tally = Tally()
    try:
        with _opened(payload, file) as lines:
            events = _lines(lines, topic) if payload is None else _one(topic, str(message_id), payload)
            _all(context.obj, workflow, events, tally, replace=replace, quiet=payload is not None)
    except BaseException:
        if tally.size:
            typer.echo(f"{tally.words()} before this; they stay. Repeating them changes nothing.", err=True)
        raise
    _say(tally, workflow, as_json=as_json)


@dataclass
class Tally:
    """Which message ids were new, which were there before and which were rewritten."""

    new: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.new) + len(self.repeated) + len(self.replaced)

    def add(self, receipt: Receipt) -> None:
        self.new += receipt.new
        self.repeated += receipt.repeated
        self.replaced += receipt.replaced

    def words(self) -> str:
        return f"{len(self.new)} new, {len(self.repeated)} repeated, {len(self.replaced)} replaced"


def _opened(payload: str | None, file: Path | None) -> AbstractContextManager[Iterable[bytes]]:
    if payload is not None:
        return nullcontext(())
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    assert file is not None
    try:
        return file.open("rb")
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be read: {error.strerror}. Expected a file of JSON lines.") from None


def _all(
    database: Database, workflow: str, events: Iterator[Event], tally: Tally, *, replace: bool, quiet: bool
) -> None:
    """Publish in batches, each in a transaction of its own; what was published before an error stays."""
    limits = Limits(payload=Settings.load(os.environ).max_payload_bytes)
    columns = (SpinnerColumn(), TextColumn("{task.completed} events"))
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        shown = progress.add_task("publishing", total=None)
        while batch := list(islice(events, _BATCH)):
            with contexts.joined(os.environ.get("TRACEPARENT")), database.transaction() as tx:
                receipt = publish_in(tx, workflow, batch, replace=replace, limits=limits)
            tally.add(receipt)
            progress.advance(shown, len(batch))


def _one(topic: str, message_id: str, payload: str) -> Iterator[Event]:
    yield from checked([{"topic": topic, "message_id": message_id, "payload": _json(payload, "the payload")}])


def _lines(lines: Iterable[bytes], topic: str) -> Iterator[Event]:
    for number, line in enumerate(lines, start=1):
        text = _decoded(line, number)
        if not text.strip():
            continue
        row = _json(text, f"line {number}")
        if not isinstance(row, dict):
            raise InvalidInputError(f"Line {number} is a {type(row).__name__}; expected an object with message_id.")
        yield event({"topic": topic, **row}, f"Line {number}")


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"Line {number} is no UTF-8 text: {error.reason} at byte {error.start}.") from None


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise InvalidInputError(f"{what.capitalize()} is nested too deeply to be read.") from None
    except ValueError as error:
        raise InvalidInputError(f"{what.capitalize()} is no JSON: {error}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different: of two values for one key, parsers disagree which counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the key '{shown.printable(twice[:_LONGEST_NAME])}' is there twice")
    return found


def _say(tally: Tally, workflow: str, *, as_json: bool) -> None:
    """Ring for what is new, and say what became of it; that nobody heard is no part of the answer."""
    bell = shown.Bell()
    if tally.new or tally.replaced:
        bell.workflow(workflow)
    if as_json:
        shown.as_json({**asdict(tally), "is_rung": bell.heard})
        return
    typer.echo(tally.words())
    if bell.heard is False:
        typer.echo(bell.words(), err=True)
