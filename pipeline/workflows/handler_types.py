"""The values that handlers receive and return, light to import."""

import hashlib
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from pipeline.domain.states import EventId
from pipeline.domain.values import EventHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(EventHeader):
    """An event as a handler sees it. ``payload`` is the topic's model where the topic has one."""

    id: EventId
    payload: Any
    created_at: datetime | None = None
    raw_payload: Any = field(default=None, repr=False, compare=False)  #: the payload as it was published


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """The result of a prepare: the events to consume, and the data for mutate and next.

    At ``wake_at`` the handler is called again even if no new event arrives. ``approval`` overrides the consumer's
    ``requires_approval`` for this run.
    """

    reserve: Sequence[Event] = ()
    data: Any = None
    ui: Any = None
    wake_at: datetime | None = None
    approval: bool | None = None

    @classmethod
    def nothing(cls, *, wake_at: datetime | None = None, data: Any = None) -> "PrepareResult":
        """Return a result that reserves no event. ``next`` still runs."""
        return cls(wake_at=wake_at, data=data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The saved plan, as mutate and next receive it."""

    data: Any = None
    ui: Any = None
    event_ids: tuple[EventId, ...] = ()


class ResultStatus(StrEnum):
    """The outcome of the mutation, as ``next`` receives it."""

    APPLIED = "applied"
    NONE = "none"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class MutationResult:
    """The outcome and the result of the mutation, for ``next``."""

    status: ResultStatus
    value: Any = None

    @property
    def applied(self) -> bool:
        return self.status is ResultStatus.APPLIED

    @property
    def skipped(self) -> bool:
        return self.status is ResultStatus.SKIPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedMutation:
    """The one mutation that a mutate handler requested. An ``async def mutate`` may await it."""

    connector: str
    operation: str
    params: dict[str, Any] = field(default_factory=dict)

    def __await__(self) -> "Generator[None, None, RequestedMutation]":
        yield from ()
        return self


def request_hash(connector: str, operation: str, params: Any) -> str:
    """Return the hash of a request; an approval is for exactly this hash."""
    written = json.dumps([connector, operation, _as_stored(params)], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()


def _as_stored(value: Any) -> Any:
    """Return JSON as the ledger returns it: Postgres writes a large float as an integer, and no negative zero."""
    match value:
        case dict():
            return {key: _as_stored(item) for key, item in value.items()}
        case list() | tuple():
            return [_as_stored(item) for item in value]
        case float():
            written = repr(value)
            return int(Decimal(written)) if "e+" in written else value or 0.0
        case _:
            return value
