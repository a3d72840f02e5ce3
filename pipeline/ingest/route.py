"""Where the entries of a stream go: into which topic, and under which message id."""

from dataclasses import dataclass
from typing import Any

from pipeline.domain.errors import InvalidInputError, PayloadError
from pipeline.domain.limits import DEFAULT_LIMITS, Limits
from pipeline.domain.payloads import checked_name
from pipeline.domain.values import NewEvent
from pipeline.ingest.queue import QueueMessage
from pipeline.telemetry import contexts

_LONGEST_ENTRY_ID = 41  #: two numbers of 64 bits and a dash


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """From the entries of a stream to the events of a workflow. Field names are keys of an entry's JSON object."""

    workflow: str
    topic: str  #: for entries that name no topic themselves
    topic_field: str | None = None
    message_id_field: str | None = None
    key_field: str | None = None
    limits: Limits = DEFAULT_LIMITS

    def event(self, message: QueueMessage) -> NewEvent:
        """The event that a message becomes, or a PayloadError that says what is wrong with it."""
        return NewEvent(
            topic=self._named(message, self.topic_field, "topic") or self.topic,
            message_id=self._named(message, self.message_id_field, "message id") or entry_name(message),
            key=self._named(message, self.key_field, "key"),
            payload=message.payload,
            traceparent=_traceparent(message),
        )

    def _named(self, message: QueueMessage, name: str | None, what: str) -> str | None:
        """What the producer put into this field; a whole number counts as its digits, nothing as nothing."""
        value: Any = None if name is None else message.payload.get(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise PayloadError(f"{what} in field {name!r}", f"it is {_kind(value)}", "text or a whole number")
        return checked_name(value, what=f"{what} in field {name!r}")


def _traceparent(message: QueueMessage) -> str | None:
    """The trace its producer named: in a field of the entry, or else in a key of that name; any other is a payload."""
    if message.traceparent is not None:
        return message.traceparent
    given = message.payload.get("traceparent")
    return given if isinstance(given, str) and contexts.parsed(given) is not None else None


def entry_name(message: QueueMessage) -> str:
    """A message id for an entry that brings none: the ids of two streams may be the same."""
    return f"{message.stream}:{message.id}"


def require_short(stream: str) -> None:
    """Refuse a stream whose name leaves no room for an entry's id in a message id."""
    try:
        checked_name(f"{stream}:{'9' * _LONGEST_ENTRY_ID}", what="stream")
    except PayloadError as error:
        raise InvalidInputError(f"Stream {stream[:60]!r} cannot be part of a message id: {error.problem}.") from None


def _kind(value: Any) -> str:
    return {bool: "a boolean", float: "a fraction", list: "an array", dict: "an object"}.get(type(value), "no name")
