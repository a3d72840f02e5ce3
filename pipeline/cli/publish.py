"""Command ``pipeline publish``: publish events from an argument, a file or standard input."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from pipeline.cli import common
from pipeline.client.publishing import EventInput, Receipt, parse_event, parse_events
from pipeline.client.publishing import publish as publish_in
from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.payloads import parsed_json
from pipeline.domain.values import Limits
from pipeline.store.database import Database
from pipeline.telemetry import spans

_BATCH, _CHUNK = 500, 65_536
Batches = Iterator[list[EventInput]]  #: an empty batch means that the next may take long


def publish(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    workflow: Annotated[str, typer.Argument(help="Name of the workflow.")],
    topic: Annotated[str, typer.Argument(help="Name of the topic.")],
    payload: Annotated[
        str | None, typer.Argument(help="One payload as JSON. Without it, events come from --file.")
    ] = None,
    *,
    message_id: Annotated[str | None, typer.Option(help="Unique name of this event; required with a payload.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, each with message_id, payload and optionally topic, key, title, traceparent; - for "
            "standard input. Events published before an error stay; repeating the file changes nothing."
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace payloads that no run has read.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Publish events. A message id that was published before changes nothing."""
    if (payload is None) == (file is None):
        raise InvalidInputError("Expected either one payload or --file; --file - reads standard input.")
    if payload is None and message_id is not None:
        raise InvalidInputError("--message-id names one payload; in a file each line has its own.")
    if payload is not None and message_id is None:
        raise InvalidInputError("A payload needs --message-id: a unique name, the same whenever it is repeated.")
    tally = PublishTally()
    try:
        with _open_input(payload, file) as stream:
            if stream is None:
                batches = _single_event(topic, str(message_id), str(payload))
            else:
                batches = _batches(_lines_at_once(stream), topic)
            _publish_batches(context.obj, workflow, batches, tally, replace=replace, quiet=stream is None)
    except BaseException:
        if tally.size:
            typer.echo(f"{tally.text()} before this error; they stay. Repeating them changes nothing.", err=True)
        raise
    _print_tally(tally, workflow, as_json=as_json)


@dataclass
class PublishTally:
    """Message ids that were new, published before, or replaced."""

    new: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    wake_ups: common.WakeUps = field(default_factory=common.WakeUps)
    is_due: bool = False  #: something was published since workers were last notified

    @property
    def size(self) -> int:
        return len(self.new) + len(self.repeated) + len(self.replaced)

    def add(self, receipt: Receipt) -> None:
        self.new += receipt.new
        self.repeated += receipt.repeated
        self.replaced += receipt.replaced
        self.is_due = self.is_due or bool(receipt.new or receipt.replaced)

    def notify(self, workflow: str) -> None:
        """Notify a worker, if something was published."""
        if self.is_due:
            self.wake_ups.wake_workflow(workflow)
            self.is_due = False

    def text(self) -> str:
        return f"{len(self.new)} new, {len(self.repeated)} repeated, {len(self.replaced)} replaced"


def _open_input(payload: str | None, file: Path | None) -> AbstractContextManager[BufferedReader | None]:
    if payload is not None:
        return nullcontext(None)
    if str(file) == "-":
        return nullcontext(cast(BufferedReader, sys.stdin.buffer))
    assert file is not None
    try:
        return file.open("rb")
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be read: {error.strerror}. Expected a file of JSON lines.") from None


def _publish_batches(
    database: Database, workflow: str, batches: Batches, tally: PublishTally, *, replace: bool, quiet: bool
) -> None:
    """Publish each batch in its own transaction; batches before an error stay."""
    limits = Limits(payload=Settings.load(os.environ).max_payload_bytes)
    columns = (SpinnerColumn(), TextColumn("{task.completed} events"))
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("publishing", total=None)
        for batch in batches:
            if not batch:
                tally.notify(workflow)
                continue
            with spans.join_trace(os.environ.get("TRACEPARENT")), database.transaction() as tx:
                receipt = publish_in(tx, workflow, batch, replace=replace, limits=limits)
            tally.add(receipt)
            progress.advance(task, len(batch))


def _single_event(topic: str, message_id: str, payload: str) -> Batches:
    yield list(
        parse_events([{"topic": topic, "message_id": message_id, "payload": parsed_json(payload, what="The payload")}])
    )


def _batches(reads: Iterable[tuple[list[bytes], bool]], topic: str) -> Batches:
    """Group lines into batches of events; do not wait for a full batch when the input pauses."""
    number, batch = 0, list[EventInput]()
    for lines, is_last_for_now in reads:
        for line in lines:
            number += 1
            batch += _events(line, number, topic)
            if len(batch) == _BATCH:
                yield batch
                batch = []
        if is_last_for_now:
            yield from filter(None, [batch])
            yield []
            batch = []
    yield from filter(None, [batch])


def _lines_at_once(stream: BufferedReader) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the whole lines of each read. A read that was not full means that the next may take long."""
    rest = bytearray()
    while data := stream.read1(_CHUNK):
        whole, end, begun = data.rpartition(b"\n")  # at line feeds only: a carriage return may be part of a line
        rest += whole
        if end:
            yield bytes(rest).split(b"\n"), len(data) < _CHUNK
            rest = bytearray()
        rest += begun
    if rest:
        yield [bytes(rest)], False


def _events(line: bytes, number: int, topic: str) -> list[EventInput]:
    """Parse the event of a line; none if the line is empty."""
    text = _decode(line, number)
    if not text.strip():
        return []
    row = parsed_json(text, what=f"Line {number}")
    if not isinstance(row, dict):
        raise InvalidInputError(f"Line {number} is a {type(row).__name__}; expected an object with message_id.")
    return [parse_event({"topic": topic, **row}, f"Line {number}")]


def _decode(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"Line {number} is no UTF-8 text: {error.reason} at byte {error.start}.") from None


def _print_tally(tally: PublishTally, workflow: str, *, as_json: bool) -> None:
    """Notify workers and print the counts; a missing broker is a note on standard error."""
    tally.notify(workflow)
    wake_ups = tally.wake_ups
    if as_json:
        common.print_json(
            {
                "new": tally.new,
                "repeated": tally.repeated,
                "replaced": tally.replaced,
                "is_notified": wake_ups.is_notified,
            }
        )
        return
    typer.echo(tally.text())
    if wake_ups.is_notified is False:
        typer.echo(wake_ups.text(), err=True)
