"""Bound what a message from outside may cost before a worker has read it.

- A compressed body is unpacked up to a limit: a few hundred kilobytes can hold a gigabyte of zeros.
- A message that is nested too deeply is refused: Celery pickles it for the pool, which overflows Python's stack.
- A message whose arguments no task can take is refused: Celery would log it and drop it.
- An entry of a Redis list that is no message of Celery's becomes one: kombu's error would end the worker.
"""

import base64
import bz2
import json
import lzma
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from kombu import compression
from kombu.transport import virtual
from kombu.utils import json as kombu_json

MAX_BODY = 64 * 2**20  #: bytes of an unpacked body
MAX_DEPTH = 128  #: lists and objects inside each other; a payload may have half of that
_FOLLOWING = ("callbacks", "errbacks", "chain")  #: what a message tells Celery to send after its task


def accept_raw_entries(dead_letters: str) -> None:
    """Let entries of a Redis list that are no messages of Celery's be read as messages.

    ``dead_letters`` is the queue where such a message is restored if its worker dies.
    """
    from kombu.transport import redis  # its client loads the SDK of OpenTelemetry if that is installed

    EntryMessage.dead_letters = dead_letters
    transport: Any = redis  # kombu has no types here
    transport.loads = _parsed_entry
    transport.Channel.Message = EntryMessage
    transport.Channel.QoS = type("EntryQoS", (RawEntries, transport.QoS), {})


def bound_decompression() -> None:
    """Replace the decoders of kombu by ones that stop at the limit. A method without such a decoder is refused."""
    registry: Any = compression  # kombu has no types here
    for content_type in registry.encoders():
        encoder, _ = registry.get_encoder(content_type)
        registry.register(encoder, _DECODERS.get(content_type, _refuse), content_type)


def is_too_deep(body: Any) -> bool:
    """Return whether lists and objects are nested deeper than a worker can pass on."""
    level = [body]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level if isinstance(item, list | dict) for inner in _members(item)]
        if not level:
            return False
    return True


def problem_of(message: Any) -> str | None:
    """Return why no worker can take a message that can be read; None if a worker can."""
    body = message.payload
    if any(is_too_deep(part) for part in (body, message.headers, message.properties)):
        return f"it is nested deeper than {MAX_DEPTH} levels"
    match body:
        case {"args": args, "kwargs": kwargs} as embedded:
            pass
        case [args, kwargs, embedded]:
            pass
        case _:
            return None  # Celery refuses a body of another form
    if not isinstance(args, list) or not isinstance(kwargs, dict) or "self" in kwargs:
        return "its arguments are not a list, and an object with names that a task takes"
    if not isinstance(embedded, dict) or not all(_are_signatures(embedded.get(name)) for name in _FOLLOWING):
        return "the tasks that are to follow it are no signatures of Celery's"
    return None


def _are_signatures(given: Any) -> bool:
    each = given if isinstance(given, list) else [] if given is None else [None]
    return all(isinstance(one, dict) and one.keys() >= {"task", "args", "kwargs", "options"} for one in each)


def forget_time_limits(message: Any) -> None:
    """Remove the time limits that the sender chose: a task that Celery ends by them is acknowledged, and so lost."""
    for part in (message.headers, message.payload):
        if isinstance(part, dict):
            part.pop("timelimit", None)


class EntryMessage(virtual.Message):
    """A message of a Redis list. An entry that no Celery wrote is its body, of a type that no worker accepts."""

    dead_letters = ""

    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        try:
            _require_message(payload)
            super().__init__(payload, channel=channel, **options)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - kombu raises errors of any kind, and each would end the worker
            super().__init__(_wrapped(payload, self.dead_letters), channel=channel, **options)  # type: ignore[no-untyped-call]


class RawEntries:
    """Restores messages that no worker acknowledged. What is no message goes to a queue as it is, and is read there.

    It is mixed into the class of kombu's Redis transport.
    """

    channel: Any
    unacked_key: str
    _remove_from_indices: Callable[[Any, Any], Any]

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """Restore the message of this delivery tag. kombu's error about anything else would end the worker."""
        with self.channel.conn_or_acquire(client) as connected:
            entry = connected.hget(self.unacked_key, tag)
            if entry is None or _is_restorable(entry) or not self.channel.active_queues:
                super().restore_by_tag(tag, connected, leftmost)  # type: ignore[misc]
                return
            pipe = connected.pipeline()
            self._remove_from_indices(tag, pipe)
            pipe.lpush(min(self.channel.active_queues), entry)
            pipe.execute()


def _is_restorable(entry: bytes) -> bool:
    """Return whether kombu can restore this: a message, its exchange and its routing key."""
    try:
        message, exchange, routing_key = kombu_json.loads(entry)  # type: ignore[no-untyped-call]
        _require_message(message)
        return isinstance(exchange, str) and isinstance(routing_key, str) and not is_too_deep(message)
    except Exception:  # noqa: BLE001 - whatever it was, kombu's own code raises it again
        return False


def _parsed_entry(text: str) -> Any:
    """Return an entry of a Redis list; its text if it is no JSON, or too deep to be written again."""
    try:
        found = kombu_json.loads(text)  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - RecursionError, ValueError and what kombu's own types raise
        return text
    return text if is_too_deep(found) else found


def _require_message(payload: Any) -> None:
    """Raise unless kombu and Celery can handle this message without an error that ends the worker."""
    properties = payload["properties"]
    where = properties["delivery_info"]
    texts = (payload["body"], properties["delivery_tag"], where["exchange"], where["routing_key"])
    options = (payload.get("content-type"), payload.get("content-encoding"))
    if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, str | None) for each in options):
        raise TypeError("expected text")
    if not isinstance(payload.get("headers"), dict | None):
        raise TypeError("expected headers")


def _wrapped(entry: Any, queue: str) -> dict[str, Any]:
    """Return a message that carries an entry, as if it came from this queue."""
    # kombu reads dates and ids as their types
    text = entry if isinstance(entry, str) else json.dumps(entry, default=str)
    return {
        "body": base64.b64encode(text.encode(errors="surrogatepass")).decode(),
        "content-type": "application/data",
        "content-encoding": "binary",
        "headers": {},
        "properties": {
            "delivery_tag": str(uuid4()),
            "delivery_info": {"exchange": "", "routing_key": queue},
            "body_encoding": "base64",
        },
    }


def _members(item: list[Any] | dict[str, Any]) -> list[Any]:
    return [inner for inner in (item.values() if isinstance(item, dict) else item) if isinstance(inner, list | dict)]


def _refuse(_: bytes) -> bytes:
    raise ValueError("this compression is not accepted; expected gzip, bzip2 or lzma")


def _unpack(unpacker: Any, body: bytes) -> bytes:
    unpacked: bytes = unpacker.decompress(body, MAX_BODY + 1)
    if len(unpacked) > MAX_BODY:
        raise ValueError(f"the body has more than {MAX_BODY} bytes when it is unpacked")
    if not unpacker.eof:
        raise ValueError("the compressed body is incomplete")
    return unpacked


_DECODERS: Mapping[str, Callable[[bytes], bytes]] = {
    "application/x-gzip": lambda body: _unpack(zlib.decompressobj(), body),
    "application/x-bz2": lambda body: _unpack(bz2.BZ2Decompressor(), body),
    "application/x-lzma": lambda body: _unpack(lzma.LZMADecompressor(), body),
}
