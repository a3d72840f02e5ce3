"""Where the entries of a stream go: which topic, under which message id, and what they must look like."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.domain.errors import InvalidInputError, PayloadError
from pipeline.domain.limits import DEFAULT_LIMITS, Limits
from pipeline.domain.payloads import checked_json, checked_name
from pipeline.domain.values import NewEvent
from pipeline.ingest.queue import QueueMessage

_LONGEST_ENTRY_ID = 41  #: two numbers of 64 bits and a dash
_MOST_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """From the entries of a stream to the events of a workflow. Field names are keys of an entry's JSON object."""

    workflow: str
    topic: str  #: for entries that name no topic themselves
    topic_field: str | None = None
    message_id_field: str | None = None
    key_field: str | None = None
    schemas: Mapping[str, type[BaseModel]] = field(default_factory=dict)  #: models by topic
    limits: Limits = DEFAULT_LIMITS

    def event(self, message: QueueMessage) -> NewEvent:
        """The event that a message becomes, or a PayloadError that says what is wrong with it."""
        topic = self._named(message, self.topic_field, "topic") or self.topic
        event = NewEvent(
            topic=topic,
            message_id=self._named(message, self.message_id_field, "message id") or entry_name(message),
            key=self._named(message, self.key_field, "key"),
            payload=message.payload,
        )
        self._require_fit(event)
        return event

    def require_storable(self, event: NewEvent) -> None:
        """Say what keeps an event from being published, by the same rules as the publish itself."""
        checked_name(event.topic, what="topic")
        checked_name(event.message_id, what="message id")
        if event.key is not None:
            checked_name(event.key, what="key")
        checked_json(event.payload, what=f"payload of {event.message_id!r}", limit=self.limits.payload)

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

    def _require_fit(self, event: NewEvent) -> None:
        model = self.schemas.get(event.topic)
        if model is None:
            return
        try:
            model.model_validate(event.payload)
        except ValidationError as error:  # its own words would quote the payload
            wrong = error.errors(include_input=False, include_url=False, include_context=False)
            shown = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or '$'}: {each['msg']}" for each in wrong[:_MOST_SHOWN]
            )
            more = f"; and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
            raise PayloadError(
                f"payload of {event.message_id!r}", f"{shown}{more}", f"what {model.__name__} describes"
            ) from None


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
