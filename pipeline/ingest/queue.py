"""A Redis stream as a queue: one call here is one thing asked of Redis, and its failure is the caller's to see.

No loops, no retries, no buffer, no signals. An entry has exactly one field, ``data``, with a JSON
object. Needs Redis 6.2 or later.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from opentelemetry.metrics import Meter
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from pipeline.ingest.client import require_honest, require_room
from pipeline.ingest.errors import PoisonEntry, PoisonError, QueueError
from pipeline.ingest.metrics import QueueMetrics

FIELD = b"data"
Entry = tuple[bytes | None, Mapping[bytes, bytes] | None]


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
        for name in ("claim_idle_ms", "block_ms", "max_read_count"):
            positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMessage:
    """One delivered entry. It stays pending until it is acknowledged."""

    stream: str
    group: str
    id: str
    payload: Mapping[str, Any]
    times_delivered: int = 1  #: at least so often, this time included


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogStats:
    """How much there is, as of one look."""

    length: int  #: entries in the stream, acknowledged ones included
    waiting: int | None  #: entries not delivered to the group yet; None where Redis cannot tell
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
        """Create the group unless it is there; a new one starts with the oldest entry of the stream."""
        require_honest(client, config.block_ms)
        self.client, self.config = client, config
        self._metrics = QueueMetrics(config.stream, meter)
        if create:
            self._create_group()

    def enqueue(self, payload: Mapping[str, Any]) -> str:
        """Add an entry and return its id. Not idempotent: after a failure nobody knows whether it is there."""
        with self.asking("add an entry"):
            added: Any = self.client.xadd(self.config.stream, {FIELD: _written(payload)})
        return _text(added)

    def read(self, block_ms: int | None = None, count: int | None = None) -> list[QueueMessage]:
        """New entries, waiting for the first at most so long; empty when there was none."""
        block = self.config.block_ms if block_ms is None else positive("block_ms", block_ms)
        most = self.config.max_read_count if count is None else positive("count", count)
        if most > self.config.max_read_count:
            raise ValueError(
                f"count is {most}; expected at most max_read_count, which is {self.config.max_read_count}."
            )
        require_room(self.client, block)
        began = time.monotonic()
        with self.asking("read"):
            reply: Any = self.client.xreadgroup(
                self.config.group, self.config.consumer, {self.config.stream: ">"}, count=most, block=block
            )
        entries: list[Entry] = [entry for _, found in reply or () for entry in found]
        self._metrics.read(len(entries), time.monotonic() - began)
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
        with self.asking("acknowledge"):
            self.client.xack(self.config.stream, self.config.group, *(message.id for message in messages))
        self._metrics.acked(len(messages))

    def claim_stale(self, min_idle_ms: int | None = None, count: int = 1) -> list[QueueMessage]:
        """Take over entries that were silent for so long, whoever holds them: this consumer's own too.

        Of several that ask at once, Redis lets one have each entry. An entry whose holder is still at
        work on it is then worked on twice: the idle time must be longer than any work takes.
        """
        idle = self.config.claim_idle_ms if min_idle_ms is None else positive("min_idle_ms", min_idle_ms)
        found = self.pending(positive("count", count), min_idle_ms=idle)
        if not found:
            return []
        config = self.config
        with self.asking("claim"):
            reply: Any = self.client.xclaim(
                config.stream, config.group, config.consumer, idle, [entry.id for entry in found]
            )
        entries: list[Entry] = [entry for entry in reply if entry[0] is not None]  # None: gone from the stream
        self._metrics.claimed(len(entries))
        return self._messages(entries, {entry.id: entry.times_delivered + 1 for entry in found})

    def pending(self, count: int, *, min_idle_ms: int | None = None) -> list[PendingEntry]:
        """The oldest entries that are delivered and not acknowledged, at most so many. Changes nothing."""
        with self.asking("look at pending entries"):
            reply: Any = self.client.xpending_range(
                self.config.stream, self.config.group, "-", "+", positive("count", count), idle=min_idle_ms
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
        with self.asking("count the backlog"):
            length: Any = self.client.xlen(self.config.stream)
            groups: Any = self.client.xinfo_groups(self.config.stream)
            summary: Any = self.client.xpending(self.config.stream, self.config.group)
        oldest = self.pending(1)
        lag = next((group.get("lag") for group in groups if _text(group["name"]) == self.config.group), None)
        return BacklogStats(
            length=length,
            waiting=lag,
            pending=summary["pending"],
            by_consumer={_text(row["name"]): row["pending"] for row in summary["consumers"]},
            oldest_pending_id=oldest[0].id if oldest else None,
            oldest_pending_idle_ms=oldest[0].idle_ms if oldest else None,
        )

    def _create_group(self) -> None:
        with self.asking("create the group"):
            try:
                self.client.xgroup_create(self.config.stream, self.config.group, id="0-0", mkstream=True)
            except ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

    def _messages(self, entries: Sequence[Entry], delivered: Mapping[str, int]) -> list[QueueMessage]:
        """What can be read. If something cannot, all of it travels with the error: it is delivered already."""
        messages, poison = [], []
        for raw_id, raw in entries:
            id_, fields = _text(raw_id), dict(raw or {})
            try:
                payload = _payload(fields)
            except (ValueError, RecursionError) as error:
                poison.append(PoisonEntry(id_, fields, str(error)))
                continue
            messages.append(
                QueueMessage(
                    stream=self.config.stream,
                    group=self.config.group,
                    id=id_,
                    payload=payload,
                    times_delivered=delivered.get(id_, 1),
                )
            )
        if poison:
            raise PoisonError(self.config.stream, poison, messages)
        return messages

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """Redis's failures become the queue's own error, with what was being asked."""
        try:
            yield
        except RedisError as error:
            raise QueueError(
                f"Redis failed to {what} (stream {self.config.stream!r}, group {self.config.group!r}): {error}. "
                "Nothing was tried again; start again once Redis answers."
            ) from error


def positive(name: str, value: Any) -> int:
    """A whole number above zero. Redis would take 0 for 'wait for ever' and nothing for 'do not wait'."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} is {value!r}; expected a whole number above 0.")
    return value


def _payload(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    if list(fields) != [FIELD]:
        names = ", ".join(sorted(name.decode(errors="replace") for name in fields)) or "none"
        raise ValueError(f"its fields are {names}; expected exactly one, data")
    try:
        payload = json.loads(fields[FIELD], parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("its data is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its data is no JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ValueError(f"its data is a JSON {type(payload).__name__}; expected an object")
    return payload


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _written(payload: Mapping[str, Any]) -> bytes:
    if not isinstance(payload, dict):
        raise QueueError(f"The payload is a {type(payload).__name__}; expected a dict. Nothing was added.")
    try:
        return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise QueueError(f"The payload is no JSON: {error}. Nothing was added.") from error


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
