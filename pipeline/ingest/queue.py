"""The queue over one Redis stream: read, acknowledge, claim, park.

An entry has exactly one field, ``data``, with a JSON object in UTF-8 whose keys are all different.
Beside it there may be the fields of tracers, ``traceparent`` and ``tracestate``, and nothing else.

Redis keeps the fields of an entry as ordered pairs and allows a name twice. A dictionary would drop one
of the two silently, so here they stay pairs.
"""

import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from opentelemetry.metrics import Meter, get_meter
from redis import Redis
from redis.exceptions import AskError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pipeline.domain.errors import InvalidInputError
from pipeline.domain.payloads import distinct_keys
from pipeline.ingest.errors import NoStreamError, Pairs, PoisonEntry, PoisonError, QueueError, QueueTimeoutError
from pipeline.ingest.redis_client import ONE_SERVER, require_socket_timeout, require_usable_client
from pipeline.telemetry import metrics as table
from pipeline.telemetry import spans
from pipeline.text import printable_text

DATA_FIELD = b"data"
_TRACEPARENT, _TRACESTATE = b"traceparent", b"tracestate"
_KNOWN_FIELDS = frozenset({DATA_FIELD, _TRACEPARENT, _TRACESTATE})
Entry = tuple[bytes, Pairs]
_MOST_NAMES, _LONGEST_NAME = 5, 40
PARKING_SUFFIX = ":parked"
#: The start of Redis's reply when the stream or group does not exist. A read that waits at its deletion gets
#: NOGROUP from Redis 7.2 and Valkey, and UNBLOCKED from older servers.
_STREAM_GONE = ("NOGROUP", "no such key", "UNBLOCKED the stream key no longer exists")


#: Removes what is idle and has nothing pending. One script: an entry that is delivered in between would be lost.
_REMOVE_GONE = """
local gone = {}
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local found = {}
  for i = 1, #row, 2 do found[row[i]] = row[i + 1] end
  if found.pending == 0 and found.idle >= tonumber(ARGV[2]) and found.name ~= ARGV[3] then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], found.name)
    gone[#gone + 1] = found.name
  end
end
return gone
"""


def keep_pairs(client: Redis) -> None:
    """Let the client return entries as pairs. The client belongs to the queue from now on."""
    client.set_response_callback("XREADGROUP", _parse_streams)
    for command in ("XCLAIM", "XRANGE"):
        client.set_response_callback(command, entries_of)


def entries_of(reply: Any, **_: Any) -> list[Entry]:
    """Return entries in order. Redis 6.2 replies with null for a deleted entry."""
    return [(entry[0], _pairs(entry[1])) for entry in reply or () if entry is not None]


def _parse_streams(reply: Any, **_: Any) -> list[tuple[bytes, list[Entry]]]:
    return [(name, entries_of(found)) for name, found in reply or ()]


def _pairs(flat: Sequence[bytes] | None) -> Pairs:
    given = flat or ()
    if len(given) == 2:
        return ((given[0], given[1]),)
    return tuple(zip(given[::2], given[1::2], strict=True))


def payload_of(fields: Pairs) -> dict[str, Any]:
    """Return the JSON object of an entry, or raise a ValueError with the problem."""
    data = _data_of(fields)
    try:
        payload = _parse(str(data, "utf-8"))
    except RecursionError:
        raise ValueError("its data is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"its data is not UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise ValueError(f"its data is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ValueError(f"its data is a JSON {type(payload).__name__}; expected an object")
    return payload


def _data_of(fields: Pairs) -> bytes:
    if len(fields) == 1 and fields[0][0] == DATA_FIELD:
        return fields[0][1]
    found = dict(fields)
    if DATA_FIELD not in found or len(found) != len(fields) or not found.keys() <= _KNOWN_FIELDS:
        raise ValueError(
            f"its fields are {_field_names(fields)}; expected exactly one, data, and beside it at most one traceparent "
            "and one tracestate"
        )
    return found[DATA_FIELD]


def _parse(text: str) -> Any:
    """Parse JSON. For an object without white space around it, ``raw_decode`` does the same for less."""
    if text[:1] == "{":
        payload, end = _DECODER.raw_decode(text)
        if end == len(text):
            return payload
    return _DECODER.decode(text)


def traceparent_of(fields: Pairs) -> str | None:
    """Return the trace that made an entry, or None. An invalid one is ignored."""
    if len(fields) == 1:
        return None
    given = dict(fields).get(_TRACEPARENT, b"").decode(errors="replace")
    return given if spans.parse_traceparent(given) is not None else None


def encode_payload(payload: Mapping[str, Any]) -> bytes:
    """Return a payload as the bytes of an entry."""
    if not isinstance(payload, dict):
        raise QueueError(f"The payload is a {type(payload).__name__}; expected a dict. Nothing was added.")
    try:
        return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueueError(f"The payload is not JSON: {printable_text(str(error))}. Nothing was added.") from error


def _field_names(fields: Pairs) -> str:
    shown = [printable_text(name.decode(errors="replace"), _LONGEST_NAME) for name, _ in fields[:_MOST_NAMES]]
    more = [f"{len(fields) - _MOST_NAMES} more"] if len(fields) > _MOST_NAMES else []
    return ", ".join(shown + more) or "none"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=distinct_keys)
logger = logging.getLogger("pipeline.ingest")


class QueueMetrics:
    """Metrics of a queue, by stream. A failure to record never reaches the caller."""

    def __init__(self, stream: str, meter: Meter | None = None) -> None:
        metrics = table.metrics_with_prefix("pipeline.queue.")
        self._recorders = table.recorders(meter or get_meter("pipeline.ingest"), metrics)
        self._labels = {"stream": stream}

    def count(self, name: str, amount: float) -> None:
        """Add to a metric of the queue, or record a value of it."""
        try:
            self._recorders[f"pipeline.queue.{name}"](amount, self._labels)
        except Exception:  # the counted work is done; a meter must not undo it
            logger.debug("a metric was not recorded", exc_info=True)


_GONE_PROBLEM = "it is gone from the stream, trimmed or deleted before it was acknowledged"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """The stream, group and consumer name. Consumer names are unique among living processes."""

    stream: str
    group: str
    consumer: str
    claim_idle_ms: int = 60_000  #: how long an entry may be pending before it counts as stale
    block_ms: int = 5_000  #: how long a read waits for the first entry
    max_read_count: int = 1  #: entries in one read, at most; a QueueConsumer needs 1

    def __post_init__(self) -> None:
        for name in ("stream", "group", "consumer"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} is {value!r}; expected non-empty text.")
            if _is_unencodable(value):
                raise ValueError(f"{name} is {value!a}; expected text that can be written as UTF-8.")
        for name in ("claim_idle_ms", "block_ms", "max_read_count"):
            require_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class QueueMessage:
    """One delivered entry. It stays pending until it is acknowledged."""

    stream: str
    group: str
    id: str
    payload: Mapping[str, Any]
    times_delivered: int = 1  #: a lower bound, this delivery included
    traceparent: str | None = None  #: the trace that made it, if its entry names one
    fields: Pairs = field(default=(), repr=False, compare=False)  #: the fields of its entry

    @classmethod
    def of_entry(
        cls,
        config: QueueConfig,
        entry: str,
        payload: Mapping[str, Any],
        times_delivered: int,
        traceparent: str | None,
        fields: Pairs,
    ) -> "QueueMessage":
        """Build a message for less than ``__init__``, which sets each field of a frozen class with a call."""
        made = cls.__new__(cls)
        made.__dict__.update(
            stream=config.stream,
            group=config.group,
            id=entry,
            payload=payload,
            times_delivered=times_delivered,
            traceparent=traceparent,
            fields=fields,
        )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogStats:
    """Counts of a stream and its group."""

    length: int  #: entries in the stream, acknowledged ones included
    lag: int | None  #: entries not yet delivered to the group; None if Redis does not know
    pending: int  #: entries delivered and not acknowledged
    by_consumer: Mapping[str, int]  #: pending entries of each consumer that has any
    oldest_pending_id: str | None
    oldest_pending_idle_ms: int | None  #: since its last delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingEntry:
    """One entry that was delivered and not acknowledged."""

    id: str
    consumer: str
    idle_ms: int
    times_delivered: int


class RedisStreamsQueue:
    """Reads, acknowledges and claims entries of one stream for one group."""

    def __init__(self, client: Redis, config: QueueConfig, *, meter: Meter | None = None, create: bool = True) -> None:
        """Create the group if needed; a new one starts with the oldest entry.

        The client belongs to the queue from now on.
        """
        require_usable_client(client, config.block_ms)
        keep_pairs(client)
        self.client, self.config = client, config
        self._metrics = QueueMetrics(config.stream, meter)
        self._claimed_to: str | None = None  #: the entry at which the next claim goes on
        if create:
            self._create_group()

    def enqueue(self, payload: Mapping[str, Any]) -> str:
        """Add an entry and return its id.

        Not idempotent: after a failure the caller cannot know whether the entry was added.
        """
        with self.translate_errors("add an entry"):
            added: Any = self.client.xadd(self.config.stream, {DATA_FIELD: encode_payload(payload)})
        return _text(added)

    def read(self, block_ms: int | None = None, count: int | None = None) -> list[QueueMessage]:
        """Return new entries, or none; wait for the first at most ``block_ms``."""
        block = self.config.block_ms if block_ms is None else require_positive("block_ms", block_ms)
        most = self.config.max_read_count if count is None else require_positive("count", count)
        if most > self.config.max_read_count:
            raise ValueError(
                f"count is {most}; expected at most max_read_count, which is {self.config.max_read_count}."
            )
        require_socket_timeout(self.client, block)
        began = time.monotonic()
        with self.translate_errors("read"):
            reply: Any = self.client.xreadgroup(
                self.config.group, self.config.consumer, {self.config.stream: ">"}, count=most, block=block
            )
        entries: list[Entry] = [entry for _, found in reply or () for entry in found]
        if entries:
            self._metrics.count("messages_read", len(entries))
            self._metrics.count("read_latency", time.monotonic() - began)
        return self._messages(entries, {})

    def ack(self, *messages: QueueMessage) -> None:
        """Acknowledge messages in one call. A message that is no longer pending is not an error."""
        for message in messages:
            if (message.stream, message.group) != (self.config.stream, self.config.group):
                raise QueueError(
                    f"Message {message.id} belongs to group {message.group!r} of stream {message.stream!r}; this queue "
                    f"acknowledges for group {self.config.group!r} of {self.config.stream!r}. Nothing was acknowledged."
                )
        self.ack_entries([message.id for message in messages])

    def ack_entries(self, ids: Sequence[str]) -> None:
        """Acknowledge entries of this stream and group in one call."""
        if not ids:
            return
        with self.translate_errors("acknowledge"):
            self.client.xack(self.config.stream, self.config.group, *ids)
        self._metrics.count("acks", len(ids))

    def claim_stale(self, min_idle_ms: int | None = None, count: int = 1) -> list[QueueMessage]:
        """Claim entries that were pending for ``min_idle_ms``, of any consumer, this one included.

        Redis gives each entry to one of several claimers. If the former consumer still works on an entry, it
        is processed twice: the idle time must be longer than any work takes. Entries that are gone from the
        stream are lost, and raised as poison. Newer servers forget them during this claim.

        A claim goes on behind the one before, and starts again at the oldest entry when it reaches the end. Redis
        therefore walks through fresh entries once for all claims, not once for each.
        """
        idle = self.config.claim_idle_ms if min_idle_ms is None else require_positive("min_idle_ms", min_idle_ms)
        found = self._stale(require_positive("count", count), idle)
        if not found:
            return []
        config = self.config
        with self.translate_errors("claim"):
            reply: Any = self.client.xclaim(
                config.stream, config.group, config.consumer, idle, [entry.id for entry in found]
            )
        entries: list[Entry] = reply
        if entries:
            self._metrics.count("messages_claimed", len(entries))
        held = {_text(id_) for id_, _ in entries}
        gone = [entry.id for entry in found if entry.id not in held and not self._has_entry(entry.id)]
        return self._messages(entries, {entry.id: entry.times_delivered + 1 for entry in found}, gone)

    def remove_gone_consumers(self, min_idle_ms: int | None = None) -> list[str]:
        """Remove the idle consumers of the group that have no pending entry; return their names.

        This consumer stays. A removed one that lives after all is made again by its next read.
        """
        config = self.config
        idle = config.claim_idle_ms if min_idle_ms is None else require_positive("min_idle_ms", min_idle_ms)
        with self.translate_errors("remove consumers"):
            gone: Any = self.client.eval(_REMOVE_GONE, 1, config.stream, config.group, idle, config.consumer)
        return [_text(name) for name in gone]

    def _stale(self, count: int, idle: int) -> list[PendingEntry]:
        """Return stale entries behind those of the last claim; from the oldest again when there are too few."""
        last = self._claimed_to
        found = self.pending(count, min_idle_ms=idle, first="-" if last is None else f"({last}")
        if last is not None and len(found) < count:
            found += self.pending(count - len(found), min_idle_ms=idle, last=last)
        self._claimed_to = found[-1].id if len(found) == count else None
        return found

    def pending(
        self, count: int, *, min_idle_ms: int | None = None, first: str = "-", last: str = "+"
    ) -> list[PendingEntry]:
        """Return the oldest pending entries from ``first`` to ``last``, at most ``count``. Changes nothing."""
        with self.translate_errors("list pending entries"):
            reply: Any = self.client.xpending_range(
                self.config.stream, self.config.group, first, last, require_positive("count", count), idle=min_idle_ms
            )
        return [
            PendingEntry(
                id=_text(row["message_id"]),
                consumer=_text(row["consumer"]),
                idle_ms=row["time_since_delivered"],
                times_delivered=row["times_delivered"],
            )
            for row in reply
        ]

    def backlog_stats(self) -> BacklogStats:
        """Count the backlog with three reads, which are not one instant. Changes nothing."""
        with self.translate_errors("count the backlog"):
            length: Any = self.client.xlen(self.config.stream)
            groups: Any = self.client.xinfo_groups(self.config.stream)
            summary: Any = self.client.xpending(self.config.stream, self.config.group)
        oldest = self.pending(1)
        lag = next((group.get("lag") for group in groups if _text(group["name"]) == self.config.group), None)
        return BacklogStats(
            length=length,
            lag=lag,
            pending=summary["pending"],
            by_consumer={_text(row["name"]): row["pending"] for row in summary["consumers"]},
            oldest_pending_id=oldest[0].id if oldest else None,
            oldest_pending_idle_ms=oldest[0].idle_ms if oldest else None,
        )

    def _create_group(self) -> None:
        with self.translate_errors("create the group"):
            try:
                self.client.xgroup_create(self.config.stream, self.config.group, id="0-0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def _has_entry(self, entry: str) -> bool:
        with self.translate_errors("find an entry"):
            return bool(self.client.xrange(self.config.stream, entry, entry))

    def _messages(
        self, entries: Sequence[Entry], delivered: Mapping[str, int], gone: Sequence[str] = ()
    ) -> list[QueueMessage]:
        """Return the readable messages. If an entry is unreadable, the error carries all of them.

        They are already delivered to this consumer.
        """
        messages, poison = [], [PoisonEntry(id_, (), _GONE_PROBLEM, is_gone=True) for id_ in gone]
        for raw_id, fields in entries:
            id_ = _text(raw_id)
            try:
                payload = payload_of(fields)
            except ValueError as error:
                poison.append(PoisonEntry(id_, fields, str(error)))
                continue
            messages.append(
                QueueMessage.of_entry(
                    self.config, id_, payload, delivered.get(id_, 1) if delivered else 1, traceparent_of(fields), fields
                )
            )
        if poison:
            raise PoisonError(self.config.stream, poison, messages)
        return messages

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Turn errors of Redis into QueueErrors with the action and advice."""
        where = f"(stream {self.config.stream!r}, group {self.config.group!r})"
        try:
            yield
        except ResponseError as error:
            kind = QueueError
            advice = "Nothing was retried; correct the cause that Redis names."
            if str(error).startswith(_STREAM_GONE):
                kind = NoStreamError
                advice = "Check both names. If they were removed, the next start of `pipeline ingest` creates them."
            elif isinstance(error, AskError):
                advice = f"This server belongs to a Redis Cluster. {ONE_SERVER}"
            elif str(error).startswith("WRONGTYPE"):
                kind, advice = NoStreamError, "The key does not hold a stream; correct the name."
            raise kind(f"Redis refused to {action} {where}: {str(error).rstrip('.')}. {advice}") from error
        except RedisError as error:
            kind = QueueTimeoutError if isinstance(error, RedisTimeoutError) else QueueError
            raise kind(
                f"Redis failed to {action} {where}: {str(error).rstrip('.')}. "
                "Nothing was retried; start again when Redis responds."
            ) from error


def park_entry(queue: RedisStreamsQueue, entry_id: str, *, to: str | None = None, reason: str = "") -> str:
    """Copy a pending entry to the parking stream, acknowledge it, return the copy's id.

    After a failure in between, the copy exists and the entry is still pending. Parking it again makes a
    second copy; nothing is lost. The copy has the entry's fields, in order, and three more: where it came
    from, its group, and the reason. An entry that was trimmed is parked without its fields: they are gone.
    """
    config = queue.config
    target = to or f"{config.stream}{PARKING_SUFFIX}"
    _check_parking(entry_id, target, config.stream)
    with queue.translate_errors("park an entry"):
        found: Any = queue.client.xpending_range(config.stream, config.group, entry_id, entry_id, 1)
        if not found:
            raise InvalidInputError(
                f"Entry {entry_id} is not pending for group {config.group!r} of stream {config.stream!r}; expected one "
                "that `pipeline ingest backlog` lists. It was not parked."
            )
        entries: Any = queue.client.xrange(config.stream, entry_id, entry_id)
        fields: Pairs = entries[0][1] if entries else ()
        fields += _origin_fields(fields, f"{config.stream} {entry_id}", config.group, reason)
        execute: Any = queue.client.execute_command  # xadd takes a dict, which has each name once
        copy = execute("XADD", target, "*", *(part for pair in fields for part in pair))
        queue.client.xack(config.stream, config.group, entry_id)
    return str(copy.decode())


def _check_parking(entry_id: str, target: str, stream: str) -> None:
    if target == stream:
        raise InvalidInputError(f"Stream {target!r} cannot be its own parking stream. {entry_id} was not parked.")
    if not re.fullmatch(r"[0-9]+-[0-9]+", entry_id):
        raise InvalidInputError(f"{entry_id!a} is not the id of an entry; expected one such as 1700000000000-0.")


def _origin_fields(fields: Pairs, *values: str) -> Pairs:
    """Return three fields with names that the entry lacks. A parked entry has the plain names already."""
    taken, number = {name for name, _ in fields}, 1
    while True:
        prefix = "parked" if number == 1 else f"parked{number}"
        names = [f"{prefix}_{suffix}".encode() for suffix in ("from", "for", "reason")]
        if taken.isdisjoint(names):
            return tuple(zip(names, (value.encode(errors="replace") for value in values), strict=True))
        number += 1


def default_consumer() -> str:
    """Return a consumer name that no other living process uses: host and process."""
    return f"{socket.gethostname()}-{os.getpid()}"


def require_positive(name: str, value: Any) -> int:
    """Return a whole number above zero, or raise. Redis takes 0 for "wait for ever"."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} is {value!r}; expected a whole number above 0.")
    return value


def _is_unencodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def _text(value: Any) -> str:
    return str(value, "utf-8", "replace") if type(value) is bytes else str(value)
