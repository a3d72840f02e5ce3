"""Command ``pipeline dead-letters``: list broker messages that workers refused, send them back or drop them.

No worker reads the queue ``pipeline.dead_letters``. To list it, each message is taken, put back at the end, and only
then acknowledged. This works on every broker and loses nothing. A kill in between leaves a message twice; publishing it
twice changes nothing.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum, auto
from typing import Annotated, Any

import typer

from pipeline.admin.dead_letters import DeadLetter
from pipeline.cli import common, tables
from pipeline.cli.commands import CommandGroup
from pipeline.config import EXIT_ATTENTION, EXIT_RESTART
from pipeline.domain.errors import InvalidInputError, UnavailableError, quantity

EXIT_NOT_ALL_DONE = 1
_MAX_PRINTED = 3  #: message ids in a table
_UNPROCESSABLE_KINDS = ("invalid", "no task")  #: kinds that no worker can ever take, whatever is deployed

app = CommandGroup(
    help="Broker messages that workers refused: list them, send them back, or drop them.",
    no_args_is_help=True,
)

Ids = Annotated[list[str] | None, typer.Argument(help="Ids of messages, as the list shows them.")]
All = Annotated[bool, typer.Option("--all", help="All messages.")]


class DeadLetterAction(Enum):
    """What to do with one message."""

    KEEP = auto()
    SEND_BACK = auto()
    DROP = auto()


@app.command("list")
def list_(
    limit: common.Limit = 100,
    check: Annotated[bool, typer.Option("--check", help=f"Exit with {EXIT_ATTENTION} when there is one.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """List refused messages with the reason of each. Payloads are not shown."""
    found = _process_letters(lambda _: DeadLetterAction.KEEP)
    if as_json:
        common.print_json([asdict(each) for each in found[:limit]])
    elif found:
        _print_letters(f"{len(found)} refused", found[:limit])
    else:
        common.print_lines("Nothing was refused.")
    if check and found:
        raise typer.Exit(EXIT_ATTENTION)


@app.command("send-back")
def send_back(
    ids: Ids = None, everything: All = False, yes: common.Yes = False, as_json: common.AsJson = False
) -> None:
    """Send messages to the workers again, once the reason is gone. Events published before change nothing."""
    _act_on_letters(
        DeadLetterAction.SEND_BACK, "sent back", _selected_ids(ids, everything=everything), yes=yes, as_json=as_json
    )


@app.command()
def drop(ids: Ids = None, everything: All = False, yes: common.Yes = False, as_json: common.AsJson = False) -> None:
    """Delete messages. A message is the only copy of its events."""
    _act_on_letters(
        DeadLetterAction.DROP, "dropped", _selected_ids(ids, everything=everything), yes=yes, as_json=as_json
    )


def _selected_ids(ids: Sequence[str] | None, *, everything: bool) -> set[str] | None:
    """Return the selected ids; None: all."""
    if bool(ids) == everything:
        raise InvalidInputError("Expected ids of messages as `pipeline dead-letters list` shows them, or --all.")
    return None if everything else set(ids or ())


def _act_on_letters(action: DeadLetterAction, done: str, wanted: set[str] | None, *, yes: bool, as_json: bool) -> None:
    def is_selected(each: DeadLetter) -> bool:
        return wanted is None or each.id in wanted

    found = [
        each
        for each in _process_letters(
            lambda each: _effective_action(action, each) if yes and is_selected(each) else DeadLetterAction.KEEP
        )
        if is_selected(each)
    ]
    kept = [each for each in found if _effective_action(action, each) is DeadLetterAction.KEEP]
    missing = sorted((wanted or set()) - {each.id for each in found})
    if as_json:
        moved = [each.id for each in found if each not in kept]
        common.print_json({"is_done": yes, "moved": moved, "kept": [each.id for each in kept], "missing": missing})
    else:
        _print_actions(action, done if yes else f"would be {done}", found, kept)
        common.print_lines(*(f"{id_}: there is no such message" for id_ in missing))
        if not yes and found:
            common.print_lines("Nothing was done. Repeat with --yes to do it.")
    if missing or kept:
        raise typer.Exit(EXIT_NOT_ALL_DONE)


def _print_actions(
    action: DeadLetterAction, verb: str, found: Sequence[DeadLetter], kept: Sequence[DeadLetter]
) -> None:
    for each in found:
        what = "stays" if each in kept else verb
        common.print_lines(f"{each.id}: {what}, {_size_text(each)}{_warning(action, each)}")


def _effective_action(action: DeadLetterAction, each: DeadLetter) -> DeadLetterAction:
    """Keep a message that no worker can ever take: sent back, it would be refused again."""
    is_kept = action is DeadLetterAction.SEND_BACK and each.kind in _UNPROCESSABLE_KINDS
    return DeadLetterAction.KEEP if is_kept else action


def _warning(action: DeadLetterAction, each: DeadLetter) -> str:
    if action is not DeadLetterAction.SEND_BACK:
        return ""
    if each.kind in _UNPROCESSABLE_KINDS:
        return "; no worker can take it: let the service send a corrected one, and drop this one"
    needed = {"unreadable": "accept its content type", "unknown task": "have that task"}
    return f"; it comes back here unless the workers {needed[each.kind]}" if each.kind in needed else ""


def _process_letters(action_of: Callable[[DeadLetter], DeadLetterAction]) -> list[DeadLetter]:
    """Act on every message in the queue, in order, and return them."""
    from pipeline.celery import app as celery  # slow to import
    from pipeline.tasks import dead_letter, messages

    queues = celery.amqp.queues
    found = []
    with _broker_channel(celery) as channel:
        kept, producer = dead_letter.dead_letter_queue()(channel), celery.amqp.Producer(channel)
        for _ in range(kept.queue_declare().message_count):
            message = _receive(kept)
            if message is None:
                break
            found.append(_dead_letter(message))
            action, headers = action_of(found[-1]), dead_letter.headers_of(message)
            if action is DeadLetterAction.KEEP:
                dead_letter.send_copy(producer, message, dead_letter.dead_letter_queue(), headers)
            elif action is DeadLetterAction.SEND_BACK:
                origin = headers.get(dead_letter.FROM_HEADER)
                to = queues[origin] if origin in queues else messages.publish_queue()
                kept_headers = {
                    name: value for name, value in headers.items() if name not in dead_letter.DEAD_LETTER_HEADERS
                }
                dead_letter.send_copy(producer, message, to, kept_headers)
            message.ack()
    return found


class BrokerDeadLetters:
    """Reach the dead letters of the broker, for the HTTP API and the console."""

    def count(self) -> int:
        """Return how many messages were refused; 0 if the broker does not answer."""
        from pipeline.tasks import dead_letter  # slow to import

        return dead_letter.dead_letter_depth() or 0

    def letters(self) -> list[DeadLetter]:
        """List every refused message."""
        return self._act(DeadLetterAction.KEEP, None)

    def send_back(self, ids: Collection[str]) -> list[DeadLetter]:
        """Send messages to the workers again. Return those that were found; one that no worker can take stays."""
        return self._act(DeadLetterAction.SEND_BACK, ids)

    def drop(self, ids: Collection[str]) -> list[DeadLetter]:
        """Delete messages. Return those that were found."""
        return self._act(DeadLetterAction.DROP, ids)

    def _act(self, action: DeadLetterAction, ids: Collection[str] | None) -> list[DeadLetter]:
        def is_selected(each: DeadLetter) -> bool:
            return ids is None or each.id in ids

        try:
            found = _process_letters(
                lambda each: _effective_action(action, each) if is_selected(each) else DeadLetterAction.KEEP
            )
        except typer.Exit:
            raise UnavailableError("The broker failed. No message is lost; expected a running broker.") from None
        return [each for each in found if is_selected(each)]


def _receive(queue: Any) -> Any:
    """Take the next message, also one that cannot be decoded: ``queue.get`` would raise and keep it unacknowledged."""
    message = queue.channel.basic_get(queue=queue.name, no_ack=False)
    to_message = getattr(queue.channel, "message_to_python", None)
    if message is not None:
        message = to_message(message) if to_message else message
        message.accept = {"application/json"}
    return message


@contextmanager
def _broker_channel(celery: Any) -> Iterator[Any]:
    from kombu.exceptions import OperationalError

    from pipeline.tasks import dead_letter, message_limits

    message_limits.accept_raw_entries(dead_letter.dead_letter_queue().name)
    message_limits.bound_decompression()
    with celery.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
            yield connection.default_channel
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
            typer.echo(
                f"The broker failed: {error}. No message is lost. Expected a running broker at PIPELINE_BROKER_URL; "
                "start it, or correct the URL, and repeat the command.",
                err=True,
            )
            raise typer.Exit(EXIT_RESTART) from None


def _dead_letter(message: Any) -> DeadLetter:
    """Describe a message, also one that cannot be decoded."""
    from pipeline.tasks import dead_letter

    headers, given = dead_letter.headers_of(message), _arguments(message)
    events = given.get("events")
    rows = [row for row in events if isinstance(row, dict)] if isinstance(events, list) else []
    return DeadLetter(
        id=str(headers.get("id") or headers.get(dead_letter.ID_HEADER) or message.delivery_tag),
        kind=str(headers.get(dead_letter.KIND_HEADER, dead_letter.DeadLetterKind.UNPUBLISHABLE)),
        reason=str(headers.get(dead_letter.REASON_HEADER, "")),
        workflow=str(given.get("workflow", "")),
        events=len(rows),
        message_ids=tuple(str(row.get("message_id", "")) for row in rows),
        task=dead_letter.task_name(message),
        content_type=str(message.content_type or ""),
        size=len(message.body or b""),
    )


def _arguments(message: Any) -> dict[Any, Any]:
    """Return the arguments of a message by name; empty if they cannot be read."""
    try:
        body = message.payload
        args, kwargs = (body["args"], body["kwargs"]) if isinstance(body, dict) else body[:2]
        return dict(zip(("workflow", "events"), args, strict=False)) | dict(kwargs)
    except Exception:  # noqa: BLE001 - such a message is here because it cannot be read
        return {}


def _print_letters(title: str, found: Sequence[DeadLetter]) -> None:
    tables.print_table(
        title,
        ("id", "kind", "workflow", "events", "message ids"),
        [(each.id, each.kind, each.workflow, each.events, _message_id_list(each)) for each in found],
        [each.reason for each in found],
        note="reason",
    )


def _size_text(each: DeadLetter) -> str:
    if each.kind != "unpublishable":
        return f"{each.kind}, {quantity(each.size, 'byte')} for task {each.task!r}"
    return f"{quantity(each.events, 'event')} for {each.workflow!r}"


def _message_id_list(each: DeadLetter) -> str:
    more = [f"and {each.events - _MAX_PRINTED} more"] if each.events > _MAX_PRINTED else []
    return ", ".join([*each.message_ids[:_MAX_PRINTED], *more])
