"""How many entries of a stream become events per second, by batch size: `python benchmarks/ingest.py`.

Everything is on one machine, on servers of its own: Postgres, Redis, and one bridge as `pipeline ingest` runs it, from
the first read to the last acknowledgement of a backlog. The sizes take turns, several rounds each, so that a busy
neighbour slows all of them; the best round of each counts. The figures are a floor for a machine like this one, and
the ratios are what carries over. It takes about half a minute.
"""

import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from redis import Redis
from rich.console import Console
from rich.table import Table

from pipeline.domain.values import HandlerSpec, TopicSpec, WorkflowSpec
from pipeline.embedded import servers
from pipeline.ingest import QueueConfig, RedisStreamsQueue, connect_redis
from pipeline.ingest.bridge import Bridge, Route
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.transitions import registration

COUNTS = {1: 300, 10: 2_000, 100: 8_000, 1000: 20_000}  #: entries of one round, by batch size
ROUNDS = 3
DATA = '{"id": "order:%d.%d.%d", "order": "4711", "email": "customer@example.org", "lines": ["a book", "a pen"]}'
SPEC = WorkflowSpec(
    name="bench",
    topics=(TopicSpec(name="orders"),),
    handlers=(HandlerSpec(name="fulfil", subscribes=("orders",)),),  # each event is handed to one consumer, as usual
)


class Bench:
    """One stream after the other, each with a backlog."""

    def __init__(self, urls: servers.Servers, raw: Redis, db: Database) -> None:
        self._urls, self._raw, self._db = urls, raw, db

    def round(self, batch: int, number: int) -> float:
        """Entries per second of one round."""
        stream, count = f"orders-{batch}-{number}", COUNTS[batch]
        for start in range(0, count, 1000):
            with self._raw.pipeline(transaction=False) as many:
                for n in range(start, min(start + 1000, count)):
                    many.xadd(stream, {"data": DATA % (batch, number, n)})
                many.execute()
        client = connect_redis(self._urls.broker_url, longest_block_ms=1_000)
        config = QueueConfig(stream=stream, group="bench", consumer="one", max_read_count=batch, block_ms=1_000)
        route = Route(workflow="bench", topic="orders", message_id_field="id")
        bridge = Bridge(RedisStreamsQueue(client, config), self._db, route)
        began = time.monotonic()
        while bridge.counts.published < count:
            bridge.read_once()
        took = time.monotonic() - began
        client.close()
        self._raw.delete(stream)
        return count / took


def measured(bench: Bench) -> dict[int, float]:
    """The best round of each size, after one that does not count."""
    bench.round(100, -1)
    best = dict.fromkeys(COUNTS, 0.0)
    for number in range(ROUNDS):
        for batch in COUNTS:
            best[batch] = max(best[batch], bench.round(batch, number))
    return best


def main() -> None:
    """Measure and print."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ingest")))
        keep = ("PIPELINE_REDIS_BIN", "PIPELINE_POSTGRES_BIN")
        given = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_") or name in keep}
        urls = stack.enter_context(servers.running(home / "servers", given))
        migrate.upgrade(Database.connect_unpooled(urls.database_url))
        db = Database.connect(urls.database_url, pool_size=1)
        with db.transaction() as tx:
            registration.register(tx, SPEC)
        raw = stack.enter_context(Redis.from_url(urls.broker_url))
        info: Any = raw.info("server")
        found = measured(Bench(urls, raw, db))
        db.dispose()
        servers.remove(home / "servers")
    kind = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    server = f"{kind} {info.get('valkey_version', info['redis_version'])}"
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.platform()}, "
        f"Python {platform.python_version()}, {server}"
    )
    table = Table("--batch", "entries/s", "ratio", title="one process, a backlog")
    for batch, speed in found.items():
        table.add_row(str(batch), f"{speed:,.0f}", f"{speed / found[1]:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
