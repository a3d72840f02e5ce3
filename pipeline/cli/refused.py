"""``pipeline refused``: events that came over the broker and could not be published, kept for a person.

No worker reads the queue ``pipeline.refused``. To look through it, each message is taken, put back at the
end, and only then acknowledged: that works on every broker and loses nothing. Killed in between, a message
is there twice, and publishing it twice changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Annotated, Any

import typer

from pipeline.cli import lists, shown
from pipeline.client import names
from pipeline.config import EXIT_AGAIN, EXIT_WAITING
from pipeline.domain.errors import InvalidInputError

EXIT_MISSING = 1
_MOST_SHOWN = 3  #: message ids in a table
_REASON = "refused"  #: the header in which a worker says why
_KEPT = ("correlation_id", "reply_to", "delivery_mode")  #: properties that travel with a message

app = typer.Typer(
    help="Events that came over the broker and could not be published: look, send them back, or drop them.",
    no_args_is_help=True,
)

Ids = Annotated[list[str] | None, typer.Argument(help="Which messages, by id, as the list shows them.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]


class Fate(Enum):
    """What becomes of one message."""

    KEEP = auto()
    SEND_BACK = auto()
    DROP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """One message, without its payloads."""

    id: str
    reason: str
    workflow: str
    events: int
    message_ids: tuple[str, ...]


@app.command("list")
def list_(
    limit: shown.Limit = 100,
    check: Annotated[bool, typer.Option("--check", help=f"Exit with {EXIT_WAITING} when there is one.")] = False,
    as_json: shown.AsJson = False,
) -> None:
    """List refused messages with the reason of each. Payloads are not shown."""
    found = _walked(lambda _: Fate.KEEP)
    if as_json:
        shown.as_json([asdict(each) for each in found[:limit]])
    elif found:
        _table(f"{len(found)} refused", found[:limit])
    else:
        shown.say("Nothing was refused.")
    if check and found:
        raise typer.Exit(EXIT_WAITING)


@app.command("send-back")
def send_back(ids: Ids = None, everything: All = False, yes: shown.Yes = False) -> None:
    """Give messages to the workers again, once the reason is gone. Events that are there already change nothing."""
    _act(Fate.SEND_BACK, "sent back", ids, everything=everything, yes=yes)


@app.command()
def drop(ids: Ids = None, everything: All = False, yes: shown.Yes = False) -> None:
    """Throw messages away. The message is the only copy of its events."""
    _act(Fate.DROP, "dropped", ids, everything=everything, yes=yes)


def _act(fate: Fate, done: str, ids: Sequence[str] | None, *, everything: bool, yes: bool) -> None:
    wanted = set(ids or ())
    if bool(wanted) == everything:
        raise InvalidInputError("Say which: ids of messages as `pipeline refused list` shows them, or --all.")
    found = [
        each
        for each in _walked(lambda each: fate if yes and (everything or each.id in wanted) else Fate.KEEP)
        if everything or each.id in wanted
    ]
    for each in found:
        shown.say(f"{each.id}: {done if yes else f'would be {done}'}, {_counted(each)}")
    missing = sorted(wanted - {each.id for each in found})
    shown.say(*(f"{id_}: there is no such message" for id_ in missing))
    if not yes and found:
        shown.say("Nothing was done; add --yes.")
    if missing:
        raise typer.Exit(EXIT_MISSING)


def _walked(fate_of: Callable[[Refused], Fate]) -> list[Refused]:
    """Every message that is there now, in order, after its fate was done."""
    from pipeline.celery import app as celery  # it is slow to import, and most commands never need it
    from pipeline.tasks.publish import REFUSED

    queues = celery.amqp.queues
    found = []
    with _connected(celery) as channel:
        kept, producer = queues[REFUSED](channel), celery.amqp.Producer(channel)
        for _ in range(kept.queue_declare().message_count):
            message = kept.get()
            if message is None:
                break
            found.append(_read(message))
            fate = fate_of(found[-1])
            if fate is Fate.KEEP:
                _sent(producer, message, queues[REFUSED], message.headers)
            elif fate is Fate.SEND_BACK:
                headers = {name: value for name, value in message.headers.items() if name != _REASON}
                _sent(producer, message, queues[celery.conf.task_default_queue], headers)
            message.ack()
    return found


@contextmanager
def _connected(celery: Any) -> Iterator[Any]:
    from kombu.exceptions import OperationalError

    with celery.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
            yield connection.default_channel
        except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
            typer.echo(
                f"The broker failed: {error}. No message is lost: what was not done yet is still there. Expected a "
                "running broker at PIPELINE_BROKER_URL; start it, or correct the URL, and do it again.",
                err=True,
            )
            raise typer.Exit(EXIT_AGAIN) from None


def _sent(producer: Any, message: Any, to: Any, headers: dict[str, Any]) -> None:
    """The same message into a queue. When this returns, the broker has it."""
    producer.publish(
        message.body,
        exchange=to.exchange,
        routing_key=to.routing_key,
        declare=[to],
        headers=headers,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        retry=False,
        **{name: message.properties[name] for name in _KEPT if message.properties.get(name)},
    )


def _read(message: Any) -> Refused:
    """What can be said of a message, whatever is in it."""
    try:
        args, kwargs, *_ = message.payload
        given = dict(zip(("workflow", "events"), args, strict=False)) | dict(kwargs)
    except (TypeError, ValueError):
        given = {}
    events = given.get("events")
    rows = [row for row in events if isinstance(row, dict)] if isinstance(events, list) else []
    return Refused(
        id=str(message.headers.get("id") or message.delivery_tag),
        reason=str(message.headers.get(_REASON, "")),
        workflow=str(given.get("workflow", "")),
        events=len(rows),
        message_ids=tuple(str(row.get("message_id", "")) for row in rows),
    )


def _table(title: str, found: Sequence[Refused]) -> None:
    lists.listed(
        title,
        ("id", "workflow", "events", "message ids"),
        [(each.id, each.workflow, each.events, _named(each)) for each in found],
        [each.reason for each in found],
        note="reason",
    )


def _counted(each: Refused) -> str:
    return f"{names.many(each.events, 'event')} for {each.workflow!r}"


def _named(each: Refused) -> str:
    more = [f"and {each.events - _MOST_SHOWN} more"] if each.events > _MOST_SHOWN else []
    return ", ".join([*each.message_ids[:_MOST_SHOWN], *more])
