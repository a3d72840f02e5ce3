"""A stream as the tests see it: queues over it, and what Redis itself says about it."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from pipeline.ingest.consumer import QueueConsumer
from pipeline.ingest.queue import QueueConfig, RedisStreamsQueue
from pipeline.ingest.redis_client import connect_redis
from tests.support.wait import wait_for

GROUP = "workers"
#: Milliseconds. So long that nothing goes stale while a test runs, however slow the machine is.
STALE = 3_600_000
#: Milliseconds that Redis may be late beyond what its client grants: a machine that stands still is no failure of it.
LATE = 30_000


@dataclass
class Place:
    """One stream on one Redis."""

    url: str
    stream: str
    raw: "redis.Redis"
    clients: "list[redis.Redis]" = field(default_factory=list)

    def queue(
        self, consumer: str = "one", *, group: str = GROUP, meter: Any = None, late_ms: int = LATE, **options: Any
    ) -> RedisStreamsQueue:
        """A queue with a connection of its own."""
        given: dict[str, Any] = {"block_ms": 200, "claim_idle_ms": STALE // 2, **options}
        client = connect_redis(self.url, longest_block_ms=given["block_ms"] + late_ms)
        self.clients.append(client)
        config = QueueConfig(stream=self.stream, group=group, consumer=consumer, **given)
        return RedisStreamsQueue(client, config, meter=meter)

    def consumer(self, name: str = "one", **options: Any) -> QueueConsumer:
        return QueueConsumer(self.queue(name, **options))

    def add(self, *payloads: Any) -> list[str]:
        """Entries as any other program would add them."""
        return [self.add_raw({b"data": json.dumps(payload).encode()}) for payload in payloads]

    def add_raw(self, fields: dict[Any, Any]) -> str:
        added: Any = self.raw.xadd(self.stream, fields)
        return str(added.decode())

    def add_pairs(self, *parts: bytes) -> str:
        """An entry that may have a name twice, as no dictionary can."""
        ask: Any = self.raw.execute_command
        return str(ask("XADD", self.stream, "*", *parts).decode())

    def version(self) -> int:
        """Which Redis this is as far as clients are concerned, in whichever fixture it was made."""
        info: Any = self.raw.info("server")
        return int(info["redis_version"].split(".")[0])

    def pending(self, group: str = GROUP) -> dict[str, str]:
        """Entries delivered and not acknowledged, and who has them."""
        rows: Any = self.raw.xpending_range(self.stream, group, "-", "+", 100_000)
        return {row["message_id"].decode(): row["consumer"].decode() for row in rows}

    def undelivered(self, group: str = GROUP) -> int:
        """Entries that the group was not given yet; counted here, because older servers do not report it.

        A group that does not exist yet was given nothing.
        """
        groups: Any = self.raw.xinfo_groups(self.stream)
        last = {row["name"]: row["last-delivered-id"] for row in groups}.get(group.encode(), b"0-0")
        found: Any = self.raw.xrange(self.stream, min=b"(" + last)
        return len(found)

    def is_done(self, group: str = GROUP) -> bool:
        """Whether every entry was delivered and acknowledged."""
        return self.undelivered(group) == 0 and not self.pending(group)

    def calls(self, *commands: str) -> dict[str, int]:
        """How often each command was sent to this Redis."""
        stats: Any = self.raw.info("commandstats")
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in commands}

    def make_stale(self, *entries: str, group: str = GROUP) -> None:
        """Let Redis believe that these pending entries, or all, were delivered long ago; no more is changed.

        Redis forgets an entry at this that is gone from the stream: delete it afterwards.
        """
        for entry, consumer in self.pending(group).items():
            if not entries or entry in entries:
                self.raw.xclaim(self.stream, group, consumer, 0, [entry], idle=STALE, justid=True)

    def wait_until_blocked(self) -> None:
        """Until a client made here waits in a blocking read; any client, if none was made here."""

        def blocked() -> bool:
            rows: Any = self.raw.client_list()
            own = {self.port(client) for client in self.clients}
            return any("b" in row["flags"] and (not own or row["addr"].rpartition(":")[2] in own) for row in rows)

        wait_for(blocked)

    def kill_client(self) -> None:
        """Redis drops the connection of the first client that was made here."""
        rows: Any = self.raw.client_list()
        (found,) = [row["id"] for row in rows if row["addr"].endswith(f":{self.port(self.clients[0])}")]
        self.raw.client_kill_filter(_id=found)

    def port(self, client: "redis.Redis") -> str:
        """Our end of its connection."""
        connection: Any = client.connection
        return str(connection._sock.getsockname()[1])

    def close(self) -> None:
        for client in self.clients:
            client.close()
        try:
            self.raw.delete(self.stream, f"{self.stream}:parked")
        except redis.RedisError:
            return


class Ledger:
    """A database that records its calls, and fails where the test wants it."""

    def __init__(self, *, fails: str = "", error: BaseException | None = None, undo_fails: bool = False) -> None:
        self.trace: list[str] = []
        self.committed: list[str] = []
        self._fails, self._error, self._undo_fails = fails, error, undo_fails

    def begin(self) -> "Page":
        self.step("begin")
        return Page(self)

    def step(self, name: str) -> None:
        self.trace.append(name)
        if name == self._fails:
            assert self._error is not None
            raise self._error
        if name == "rollback" and self._undo_fails:
            raise OSError("already closed")


class Page:
    """One of its transactions."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.written: list[str] = []

    def commit(self) -> None:
        self.ledger.step("commit")
        self.ledger.committed += self.written

    def rollback(self) -> None:
        self.ledger.step("rollback")


def in_thread(work: Callable[[], Any]) -> "Background":
    """Start it, and ask for its outcome later."""
    return Background(work)


class Background:
    """Work in a thread, whose value or error is wanted."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self.value = work, None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by outcome
            self.error = error

    def outcome(self, within: float = 30.0) -> Any:
        self._thread.join(within)
        assert not self._thread.is_alive(), "it has not ended"
        if self.error is not None:
            raise self.error
        return self.value
