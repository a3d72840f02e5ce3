"""``pipeline refused``: messages that came over the broker and that no worker could work on, kept for a person.

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

from pipeline.admin import lookup
from pipeline.cli import common, tables
from pipeline.config import EXIT_AGAIN, EXIT_WAITING
from pipeline.domain.errors import InvalidInputError

EXIT_MISSING = 1
_MOST_SHOWN = 3  #: message ids in a table
_IN_VAIN = ("invalid", "no task")  #: kinds that no worker will ever take, whatever is deployed

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
    kind: str  #: unpublishable, unreadable, invalid, unknown task or no task
    reason: str
    workflow: str
    events: int
    message_ids: tuple[str, ...]
    task: str
    content_type: str
    size: int  #: bytes


@app.command("list")
def list_(
    limit: common.Limit = 100,
    check: Annotated[bool, typer.Option("--check", help=f"Exit with {EXIT_WAITING} when there is one.")] = False,
    as_json: common.AsJson = False,
) -> None:
    """List refused messages with the reason of each. Payloads are not shown."""
    found = _walked(lambda _: Fate.KEEP)
    if as_json:
        common.as_json([asdict(each) for each in found[:limit]])
    elif found:
        _table(f"{len(found)} refused", found[:limit])
    else:
        common.say("Nothing was refused.")
    if check and found:
        raise typer.Exit(EXIT_WAITING)


@app.command("send-back")
def send_back(
    ids: Ids = None, everything: All = False, yes: common.Yes = False, as_json: common.AsJson = False
) -> None:
    """Give messages to the workers again, once the reason is gone. Events that are there already change nothing."""
    _act(Fate.SEND_BACK, "sent back", _chosen(ids, everything=everything), yes=yes, as_json=as_json)


@app.command()
def drop(ids: Ids = None, everything: All = False, yes: common.Yes = False, as_json: common.AsJson = False) -> None:
    """Throw messages away. The message is the only copy of its events."""
    _act(Fate.DROP, "dropped", _chosen(ids, everything=everything), yes=yes, as_json=as_json)


def _chosen(ids: Sequence[str] | None, *, everything: bool) -> set[str] | None:
    """Ids of the messages that are meant; None: all."""
    if bool(ids) == everything:
        raise InvalidInputError("Say which: ids of messages as `pipeline refused list` shows them, or --all.")
    return None if everything else set(ids or ())


def _act(fate: Fate, done: str, wanted: set[str] | None, *, yes: bool, as_json: bool) -> None:
    def is_meant(each: Refused) -> bool:
        return wanted is None or each.id in wanted

    found = [
        each
        for each in _walked(lambda each: _fate(fate, each) if yes and is_meant(each) else Fate.KEEP)
        if is_meant(each)
    ]
    kept = [each for each in found if _fate(fate, each) is Fate.KEEP]
    missing = sorted((wanted or set()) - {each.id for each in found})
    if as_json:
        moved = [each.id for each in found if each not in kept]
        common.as_json({"done": yes, "messages": moved, "kept": [each.id for each in kept], "missing": missing})
    else:
        _say(fate, done if yes else f"would be {done}", found, kept)
        common.say(*(f"{id_}: there is no such message" for id_ in missing))
        if not yes and found:
            common.say("Nothing was done; add --yes.")
    if missing or kept:
        raise typer.Exit(EXIT_MISSING)


def _say(fate: Fate, verb: str, found: Sequence[Refused], kept: Sequence[Refused]) -> None:
    for each in found:
        common.say(f"{each.id}: {'stays' if each in kept else verb}, {_counted(each)}{_caution(fate, each)}")


def _fate(fate: Fate, each: Refused) -> Fate:
    """Sending back what nobody can ever take would only bring it here again."""
    return Fate.KEEP if fate is Fate.SEND_BACK and each.kind in _IN_VAIN else fate


def _caution(fate: Fate, each: Refused) -> str:
    if fate is not Fate.SEND_BACK:
        return ""
    if each.kind in _IN_VAIN:
        return "; no worker can take it: let the service send it again, corrected, and drop this one"
    coming = {"unreadable": "accept its content type", "unknown task": "have that task"}
    return f"; it comes back here unless the workers {coming[each.kind]}" if each.kind in coming else ""


def _walked(fate_of: Callable[[Refused], Fate]) -> list[Refused]:
    """Every message that is there now, in order, after its fate was done."""
    from pipeline.celery import app as celery  # it is slow to import, and most commands never need it
    from pipeline.tasks import dead_letter

    queues = celery.amqp.queues
    found = []
    with _connected(celery) as channel:
        kept, producer = queues[dead_letter.REFUSED](channel), celery.amqp.Producer(channel)
        for _ in range(kept.queue_declare().message_count):
            message = _next(kept)
            if message is None:
                break
            found.append(_read(message))
            fate, headers = fate_of(found[-1]), dead_letter.given(message)
            if fate is Fate.KEEP:
                dead_letter.send(producer, message, queues[dead_letter.REFUSED], headers)
            elif fate is Fate.SEND_BACK:
                came = headers.get(dead_letter.FROM)
                to = queues[came if came in queues else celery.conf.task_default_queue]
                theirs = {name: value for name, value in headers.items() if name not in dead_letter.OURS}
                dead_letter.send(producer, message, to, theirs)
            message.ack()
    return found


def _next(queue: Any) -> Any:
    """The next message, also one that cannot be unpacked: ``queue.get`` would raise, and leave it in our hands."""
    message = queue.channel.basic_get(queue=queue.name, no_ack=False)
    made = getattr(queue.channel, "message_to_python", None)
    if message is not None:
        message = made(message) if made else message
        message.accept = {"application/json"}
    return message


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


def _read(message: Any) -> Refused:
    """What can be said of a message, whatever is in it."""
    from pipeline.tasks import dead_letter

    headers, given = dead_letter.given(message), _given(message)
    events = given.get("events")
    rows = [row for row in events if isinstance(row, dict)] if isinstance(events, list) else []
    return Refused(
        id=str(headers.get("id") or headers.get(dead_letter.ID) or message.delivery_tag),
        kind=str(headers.get(dead_letter.KIND, dead_letter.Kind.UNPUBLISHABLE)),
        reason=str(headers.get(dead_letter.REASON, "")),
        workflow=str(given.get("workflow", "")),
        events=len(rows),
        message_ids=tuple(str(row.get("message_id", "")) for row in rows),
        task=dead_letter.named(message),
        content_type=str(message.content_type or ""),
        size=len(message.body or b""),
    )


def _given(message: Any) -> dict[Any, Any]:
    """The arguments of a message by their names; nothing if they cannot be read."""
    try:
        body = message.payload
        args, kwargs = (body["args"], body["kwargs"]) if isinstance(body, dict) else body[:2]
        return dict(zip(("workflow", "events"), args, strict=False)) | dict(kwargs)
    except Exception:  # noqa: BLE001 - such a message is here because it cannot be read
        return {}


def _table(title: str, found: Sequence[Refused]) -> None:
    tables.listed(
        title,
        ("id", "kind", "workflow", "events", "message ids"),
        [(each.id, each.kind, each.workflow, each.events, _named(each)) for each in found],
        [each.reason for each in found],
        note="reason",
    )


def _counted(each: Refused) -> str:
    if each.kind != "unpublishable":
        return f"{each.kind}, {lookup.many(each.size, 'byte')} for task {each.task!r}"
    return f"{lookup.many(each.events, 'event')} for {each.workflow!r}"


def _named(each: Refused) -> str:
    more = [f"and {each.events - _MOST_SHOWN} more"] if each.events > _MOST_SHOWN else []
    return ", ".join([*each.message_ids[:_MOST_SHOWN], *more])
