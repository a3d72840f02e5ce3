"""The form of an entry: exactly one field, ``data``, with a JSON object in UTF-8 whose keys are all different.

Beside it there may be what tracers write, ``traceparent`` and ``tracestate``, and nothing else.

Redis keeps the fields of an entry as pairs, in order, and takes a name twice. A client that makes a
dictionary of them drops one without a word, so here they stay pairs.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from opentelemetry.metrics import Meter, get_meter
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from pipeline.domain.payloads import distinct_keys
from pipeline.domain.text import printable_text
from pipeline.ingest.errors import NoStreamError, Pairs, PoisonEntry, PoisonError, QueueError
from pipeline.ingest.redis_client import require_socket_timeout, require_usable_client
from pipeline.telemetry import metrics as table
from pipeline.telemetry.tracing import context

DATA_FIELD = b"data"
_TRACEPARENT, _TRACESTATE = b"traceparent", b"tracestate"
_KNOWN_FIELDS = frozenset({DATA_FIELD, _TRACEPARENT, _TRACESTATE})
Entry = tuple[bytes, Pairs]
_MOST_NAMES, _LONGEST_NAME = 5, 40
#: How Redis begins its answer when there is no such stream or group. A read that was waiting while the stream was
#: deleted gets NOGROUP from Redis 7.2 and Valkey, and UNBLOCKED from older servers.
_STREAM_GONE = ("NOGROUP", "no such key", "UNBLOCKED the stream key no longer exists")


def keep_pairs(client: Redis) -> None:
    """From now on this client answers with entries as they are: it belongs to a queue, and nobody is surprised."""
    client.set_response_callback("XREADGROUP", _parse_streams)
    for command in ("XCLAIM", "XRANGE"):
        client.set_response_callback(command, entries_of)


def entries_of(reply: Any, **_: Any) -> list[Entry]:
    """Entries in their order. Redis 6.2 answers with nothing where an entry is gone."""
    return [(entry[0], _pairs(entry[1])) for entry in reply or () if entry is not None]


def _parse_streams(reply: Any, **_: Any) -> list[tuple[bytes, list[Entry]]]:
    return [(name, entries_of(found)) for name, found in reply or ()]


def _pairs(flat: Sequence[bytes] | None) -> Pairs:
    given = flat or ()
    return tuple(zip(given[::2], given[1::2], strict=True))


def payload_of(fields: Pairs) -> dict[str, Any]:
    """The JSON object of an entry, or a ValueError that says what is wrong with it."""
    found = dict(fields)
    if DATA_FIELD not in found or len(found) != len(fields) or not found.keys() <= _KNOWN_FIELDS:
        raise ValueError(
            f"its fields are {_field_names(fields)}; expected exactly one, data, and beside it at most one traceparent "
            "and one tracestate"
        )
    try:
        payload = json.loads(
            str(found[DATA_FIELD], "utf-8"), parse_constant=_refuse_constant, object_pairs_hook=distinct_keys
        )
    except RecursionError:
        raise ValueError("its data is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"its data is no UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise ValueError(f"its data is no JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ValueError(f"its data is a JSON {type(payload).__name__}; expected an object")
    return payload


def traceparent_of(fields: Pairs) -> str | None:
    """The trace that made an entry; None for nothing, and for what is no trace: it never costs the entry."""
    given = dict(fields).get(_TRACEPARENT, b"").decode(errors="replace")
    return given if context.parse_traceparent(given) is not None else None


def encode_payload(payload: Mapping[str, Any]) -> bytes:
    """A payload as an entry holds it."""
    if not isinstance(payload, dict):
        raise QueueError(f"The payload is a {type(payload).__name__}; expected a dict. Nothing was added.")
    try:
        return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueueError(f"The payload is no JSON: {printable_text(str(error))}. Nothing was added.") from error


def _field_names(fields: Pairs) -> str:
    shown = [printable_text(name.decode(errors="replace"), _LONGEST_NAME) for name, _ in fields[:_MOST_NAMES]]
    more = [f"{len(fields) - _MOST_NAMES} more"] if len(fields) > _MOST_NAMES else []
    return ", ".join(shown + more) or "none"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


logger = logging.getLogger("pipeline.ingest")


class QueueMetrics:
    """Counters and one histogram, by stream. A failure to count never reaches the caller."""

    def __init__(self, stream: str, meter: Meter | None = None) -> None:
        instruments = table.instruments(
            meter or get_meter("pipeline.ingest"), table.metrics_with_prefix("pipeline.queue.")
        )
        self._labels = {"stream": stream}
        self._read, self._acked, self._claimed, self._latency = (
            instruments[f"pipeline.queue.{name}"]
            for name in ("messages_read", "acks", "messages_claimed", "read_latency")
        )

    def count_read(self, count: int, seconds: float) -> None:
        """A read came back with so many entries."""
        if count:
            _count(self._read.add, count, self._labels)
            _count(self._latency.record, seconds, self._labels)

    def count_acked(self, count: int) -> None:
        """Redis took an acknowledgement of so many entries, whether or not they were pending."""
        _count(self._acked.add, count, self._labels)

    def count_claimed(self, count: int) -> None:
        """So many stale entries changed hands."""
        if count:
            _count(self._claimed.add, count, self._labels)


def _count(record: Callable[..., Any], amount: float, labels: dict[str, str]) -> None:
    try:
        record(amount, labels)
    except Exception:  # what was counted has happened; a meter must not undo it
        logger.debug("a metric was not recorded", exc_info=True)


_GONE_PROBLEM = "it is gone from the stream, trimmed or deleted before it was acknowledged"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Which stream, as which group and consumer. Consumer names are unique among living processes."""

    stream: str
    group: str
    consumer: str
    claim_idle_ms: int = 60_000  #: how long a delivered entry may be silent before it counts as stale
    block_ms: int = 5_000  #: how long a read waits for an entry
    max_read_count: int = 1  #: entries of one read at most; a QueueConsumer needs 1

    def __post_init__(self) -> None:
        for name in ("stream", "group", "consumer"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} is {value!r}; expected non-empty text.")
            if _is_unencodable(value):
                raise ValueError(f"{name} is {value!a}; expected text that can be written as UTF-8.")
        for name in ("claim_idle_ms", "block_ms", "max_read_count"):
            require_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMessage:
    """One delivered entry. It stays pending until it is acknowledged."""

    stream: str
    group: str
    id: str
    payload: Mapping[str, Any]
    times_delivered: int = 1  #: at least so often, this time included
    traceparent: str | None = None  #: the trace that made it, if its entry names one
    fields: Pairs = field(default=(), repr=False, compare=False)  #: what it was read from


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogStats:
    """How much there is, as of one look."""

    length: int  #: entries in the stream, acknowledged ones included
    lag: int | None  #: entries not delivered to the group yet; None where Redis cannot tell
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
    """Reads, acknowledges and takes over entries of one stream for one group."""

    def __init__(self, client: Redis, config: QueueConfig, *, meter: Meter | None = None, create: bool = True) -> None:
        """Create the group unless it is there; a new one starts with the oldest entry of the stream.

        The client is the queue's own from now on.
        """
        require_usable_client(client, config.block_ms)
        keep_pairs(client)
        self.client, self.config = client, config
        self._metrics = QueueMetrics(config.stream, meter)
        if create:
            self._create_group()

    def enqueue(self, payload: Mapping[str, Any]) -> str:
        """Add an entry and return its id. Not idempotent: after a failure nobody knows whether it is there."""
        with self.translate_errors("add an entry"):
            added: Any = self.client.xadd(self.config.stream, {DATA_FIELD: encode_payload(payload)})
        return _text(added)

    def read(self, block_ms: int | None = None, count: int | None = None) -> list[QueueMessage]:
        """New entries, waiting for the first at most so long; empty when there was none."""
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
        self._metrics.count_read(len(entries), time.monotonic() - began)
        return self._messages(entries, {})

    def ack(self, *messages: QueueMessage) -> None:
        """Acknowledge messages in one call. Those that are not pending any more are no mistake."""
        for message in messages:
            if (message.stream, message.group) != (self.config.stream, self.config.group):
                raise QueueError(
                    f"Message {message.id} belongs to group {message.group!r} of stream {message.stream!r}; this queue "
                    f"acknowledges for group {self.config.group!r} of {self.config.stream!r}. Nothing was acknowledged."
                )
        if not messages:
            return
        with self.translate_errors("acknowledge"):
            self.client.xack(self.config.stream, self.config.group, *(message.id for message in messages))
        self._metrics.count_acked(len(messages))

    def claim_stale(self, min_idle_ms: int | None = None, count: int = 1) -> list[QueueMessage]:
        """Take over entries that were silent for so long, whoever holds them: this consumer's own too.

        Of several that ask at once, Redis lets one have each entry. An entry whose holder is still at
        work on it is then worked on twice: the idle time must be longer than any work takes. Entries that
        are gone from the stream are lost, and raised as poison; newer servers forget them at this very claim.
        """
        idle = self.config.claim_idle_ms if min_idle_ms is None else require_positive("min_idle_ms", min_idle_ms)
        found = self.pending(require_positive("count", count), min_idle_ms=idle)
        if not found:
            return []
        config = self.config
        with self.translate_errors("claim"):
            reply: Any = self.client.xclaim(
                config.stream, config.group, config.consumer, idle, [entry.id for entry in found]
            )
        entries: list[Entry] = reply
        self._metrics.count_claimed(len(entries))
        held = {_text(id_) for id_, _ in entries}
        gone = [entry.id for entry in found if entry.id not in held and not self._has_entry(entry.id)]
        return self._messages(entries, {entry.id: entry.times_delivered + 1 for entry in found}, gone)

    def pending(self, count: int, *, min_idle_ms: int | None = None) -> list[PendingEntry]:
        """The oldest entries that are delivered and not acknowledged, at most so many. Changes nothing."""
        with self.translate_errors("look at pending entries"):
            reply: Any = self.client.xpending_range(
                self.config.stream, self.config.group, "-", "+", require_positive("count", count), idle=min_idle_ms
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
        """Count what waits. Three looks that change nothing, not one instant; never done unless asked for."""
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
        with self.translate_errors("look for an entry"):
            return bool(self.client.xrange(self.config.stream, entry, entry))

    def _messages(
        self, entries: Sequence[Entry], delivered: Mapping[str, int], gone: Sequence[str] = ()
    ) -> list[QueueMessage]:
        """What can be read. If something cannot, all of it travels with the error: it is delivered already."""
        messages, poison = [], [PoisonEntry(id_, (), _GONE_PROBLEM, is_gone=True) for id_ in gone]
        for raw_id, fields in entries:
            id_ = _text(raw_id)
            try:
                payload = payload_of(fields)
            except ValueError as error:
                poison.append(PoisonEntry(id_, fields, str(error)))
                continue
            messages.append(
                QueueMessage(
                    stream=self.config.stream,
                    group=self.config.group,
                    id=id_,
                    payload=payload,
                    times_delivered=delivered.get(id_, 1),
                    traceparent=traceparent_of(fields),
                    fields=fields,
                )
            )
        if poison:
            raise PoisonError(self.config.stream, poison, messages)
        return messages

    @contextmanager
    def translate_errors(self, action: str) -> Iterator[None]:
        """Redis's failures become the queue's own error, with what was being asked and what to do about it."""
        where = f"(stream {self.config.stream!r}, group {self.config.group!r})"
        try:
            yield
        except ResponseError as error:
            kind = QueueError
            advice = "Nothing was tried again; see to what Redis names."
            if str(error).startswith(_STREAM_GONE):
                kind = NoStreamError
                advice = "Check both names; if somebody removed them, the next start of `pipeline ingest` makes them."
            elif str(error).startswith("WRONGTYPE"):
                kind, advice = NoStreamError, "The key holds something that is no stream; correct the name."
            raise kind(f"Redis refused to {action} {where}: {str(error).rstrip('.')}. {advice}") from error
        except RedisError as error:
            raise QueueError(
                f"Redis failed to {action} {where}: {str(error).rstrip('.')}. "
                "Nothing was tried again; start again once Redis answers."
            ) from error


def require_positive(name: str, value: Any) -> int:
    """A whole number above zero. Redis would take 0 for 'wait for ever' and nothing for 'do not wait'."""
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
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
