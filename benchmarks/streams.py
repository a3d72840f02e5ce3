"""Processor time per item of a Redis stream: ours, a bare loop and peers, in one run: `python benchmarks/streams.py`.

Each contender consumes the same number of items that wait in its stream, each alone, in a process of its own, in turns. The
work is next to nothing: every item is decoded, counted and acknowledged. Processor time of that process from the first
fetch to the last acknowledgement, divided by the items; the least of the repeats, because other load only adds to it.
Peers that are not installed (extra `compare`) are left out. With `--flat` it consumes many items once and prints the memory.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import redis
from rich.console import Console
from rich.table import Table

from pipeline.consumer_engine import (
    AsyncConsumerMixin,
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerMixin,
    ConsumerPolicy,
    Transaction,
)
from pipeline.ingest import (
    AsyncStreamSource,
    QueueConfig,
    QueueConsumer,
    RedisStreamsQueue,
    StreamSource,
    connect_redis,
)

STREAM, GROUP = "numbers", "workers"


class Meter:
    """Counts items, and the processor time from the start to the last."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.count, self.began = wanted, 0, 0.0

    def start(self) -> None:
        """Begin to measure. What imports left in memory is not looked through during it, as in a long run."""
        gc.collect()
        gc.freeze()
        self.began = time.process_time()

    def handle(self, item: dict[str, Any]) -> None:
        """Do the work of one item."""
        self.count += 1
        assert "n" in item

    def microseconds(self) -> float:
        """Return the processor time per item."""
        assert self.count == self.wanted, f"{self.count} of {self.wanted} items were handled"
        return (time.process_time() - self.began) / self.wanted * 1e6


def fill(url: str, count: int) -> None:
    """Add entries as a program with plain Redis would."""
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as adding:
        for number in range(count):
            adding.xadd(STREAM, {"data": json.dumps({"n": number})})
        adding.execute()


def queue(url: str, size: int) -> RedisStreamsQueue:
    """Open the stream as our guide shows it."""
    config = QueueConfig(stream=STREAM, group=GROUP, consumer="one", max_read_count=size)
    return RedisStreamsQueue(connect_redis(url), config)


def policy(size: int, *, together: bool, limit: int, continuous: bool = False) -> ConsumerPolicy:
    """Return a policy that ends at the last item."""
    batch = BatchPolicy(size=size, acknowledge_together=together)
    loop = ConsumerLoopPolicy(batch=batch, concurrency=ConcurrencyPolicy(value=1), limit=limit, continuous=continuous)
    return ConsumerPolicy(loop=loop)


def bare(url: str, size: int, meter: Meter) -> None:
    """Read, decode, work, acknowledge: a loop without anything else."""
    client: Any = redis.Redis.from_url(url, protocol=2)
    fill(url, meter.wanted)
    client.xgroup_create(STREAM, GROUP, id="0-0")
    meter.start()
    while meter.count < meter.wanted:
        ((_, entries),) = client.xreadgroup(GROUP, "one", {STREAM: ">"}, count=size, block=1000)
        for _, fields in entries:
            meter.handle(json.loads(fields[b"data"]))
        client.xack(STREAM, GROUP, *(entry for entry, _ in entries))


def bare_asyncio(url: str, size: int, meter: Meter) -> None:
    """Do the same with the client for asyncio."""
    import redis.asyncio

    async def run() -> None:
        client: Any = redis.asyncio.Redis.from_url(url, protocol=2)
        fill(url, meter.wanted)
        await client.xgroup_create(STREAM, GROUP, id="0-0")
        meter.start()
        while meter.count < meter.wanted:
            ((_, entries),) = await client.xreadgroup(GROUP, "one", {STREAM: ">"}, count=size, block=1000)
            for _, fields in entries:
                meter.handle(json.loads(fields[b"data"]))
            await client.xack(STREAM, GROUP, *(entry for entry, _ in entries))
        await client.aclose()

    asyncio.run(run())


def threads(url: str, size: int, meter: Meter, *, together: bool = False, continuous: bool = False) -> None:
    """Consume with the engine and threads."""

    class Numbers(ConsumerMixin):
        def process_transaction(self, transaction: Transaction) -> None:
            meter.handle(transaction.payload)

    fill(url, meter.wanted)
    chosen = policy(size, together=together, limit=meter.wanted, continuous=continuous)
    source = StreamSource(queue(url, size), chosen)
    meter.start()
    Numbers().consume_transactions(source=source, policy=chosen)


def coroutines(url: str, size: int, meter: Meter, *, together: bool = False) -> None:
    """Consume with the engine and asyncio."""

    class Numbers(AsyncConsumerMixin):
        async def process_transaction(self, transaction: Transaction) -> None:
            meter.handle(transaction.payload)

    fill(url, meter.wanted)
    chosen = policy(size, together=together, limit=meter.wanted)
    source = AsyncStreamSource(queue(url, size), chosen)

    async def run() -> None:
        meter.start()
        await Numbers().consume_transactions(source=source, policy=chosen)

    asyncio.run(run())


class NoDatabase:
    """A database without transactions."""

    def begin(self) -> "NoDatabase":
        return self

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


def queue_consumer(url: str, size: int, meter: Meter) -> None:
    """Consume with QueueConsumer.run, which takes one message at a time."""
    assert size == 1
    consumer = QueueConsumer(queue(url, size))
    fill(url, meter.wanted)

    def handle(message: Any, _: NoDatabase) -> None:
        meter.handle(message.payload)
        if meter.count == meter.wanted:
            consumer.stop()

    meter.start()
    consumer.run(handle, NoDatabase())


def faststream(url: str, size: int, meter: Meter, *, whole: bool = False) -> None:
    """Consume with FastStream; with ``whole``, its handler takes a list and acknowledges it in one call."""
    from faststream.redis import RedisBroker, StreamSub

    async def run() -> None:
        broker, done = RedisBroker(url, logger=None), asyncio.Event()
        stream = StreamSub(STREAM, group=GROUP, consumer="one", max_records=size, batch=whole, polling_interval=1000)

        async def one(item: dict[str, Any]) -> None:
            meter.handle(item)
            if meter.count == meter.wanted:
                done.set()

        async def many(items: list[dict[str, Any]]) -> None:
            for item in items:
                await one(item)

        broker.subscriber(stream=stream)(many if whole else one)
        await broker.connect()
        client: Any = redis.Redis.from_url(url)
        client.xgroup_create(STREAM, GROUP, id="0-0", mkstream=True)
        for number in range(meter.wanted):
            await broker.publish({"n": number}, stream=STREAM)
        meter.start()
        await broker.start()
        await done.wait()
        while client.xpending(STREAM, GROUP)["pending"]:
            await asyncio.sleep(0.001)
        await broker.stop()

    asyncio.run(run())


def taskiq(url: str, size: int, meter: Meter) -> None:
    """Consume with the receiver of taskiq, one task at a time."""
    from taskiq.api import run_receiver_task
    from taskiq_redis import RedisStreamBroker

    async def run() -> None:
        broker = RedisStreamBroker(
            url, queue_name=STREAM, consumer_group_name=GROUP, consumer_name="one", xread_count=size, xread_block=1000
        )
        done = asyncio.Event()

        @broker.task
        async def one(item: dict[str, Any]) -> None:
            meter.handle(item)
            if meter.count == meter.wanted:
                done.set()

        await broker.startup()
        for number in range(meter.wanted):
            await one.kiq({"n": number})
        client: Any = redis.Redis.from_url(url)
        meter.start()
        receiving = asyncio.create_task(run_receiver_task(broker, max_async_tasks=1, max_prefetch=size))
        await done.wait()
        while client.xpending(STREAM, GROUP)["pending"]:
            await asyncio.sleep(0.001)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)

    asyncio.run(run())


def _together(run: Callable[..., None]) -> Callable[..., None]:
    return lambda url, size, meter: run(url, size, meter, together=True)


CONTENDERS: dict[str, tuple[tuple[int, ...], str | None, Callable[..., None]]] = {
    "a bare loop": ((1, 100), None, bare),
    "a bare loop, asyncio": ((1, 100), None, bare_asyncio),
    "engine, threads": ((1,), None, threads),
    "engine, threads, acknowledge_together": ((100,), None, _together(threads)),
    "engine, threads, one XACK per item": ((100,), None, threads),
    "engine, asyncio": ((1,), None, coroutines),
    "engine, asyncio, acknowledge_together": ((100,), None, _together(coroutines)),
    "QueueConsumer.run": ((1,), None, queue_consumer),
    "FastStream": ((1, 100), "faststream", faststream),
    "FastStream, handler of lists": (
        (100,),
        "faststream",
        lambda url, size, meter: faststream(url, size, meter, whole=True),
    ),
    "taskiq": ((1, 100), "taskiq_redis", taskiq),
}


def measure(name: str, url: str, size: int, count: int) -> dict[str, float]:
    """Measure one contender in this process."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    meter = Meter(count)
    CONTENDERS[name][2](url, size, meter)
    return {"us": meter.microseconds(), "kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def measured_apart(name: str, url: str, size: int, count: int) -> dict[str, float]:
    """Measure one contender in a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--url", url, "--size", str(size), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"{name}, batch {size}: {done.stderr.strip()[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def own_redis() -> Iterator[str]:
    """Start a Redis for this run."""
    from tests.support.installation import own_broker

    with tempfile.TemporaryDirectory() as home, own_broker(Path(home)) as url:
        yield url


def compare(url: str, count: int, repeats: int) -> None:
    """Measure all contenders in turns and print them."""
    console = Console(highlight=False, soft_wrap=True, width=160)
    least: dict[tuple[str, int], float] = {}
    first = os.getloadavg()[0]
    for _ in range(repeats):
        for name, (sizes, needed, _) in CONTENDERS.items():
            for size in sizes if needed is None or find_spec(needed) else ():
                found = measured_apart(name, url, size, count)["us"]
                least[name, size] = min(found, least.get((name, size), found))
    console.print(
        f"{os.cpu_count()} cores, load {first:.1f} to {os.getloadavg()[0]:.1f}, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}, {count:,} items, least of {repeats}"
    )
    table = Table("contender", "batch", "µs of processor time per item", "of a bare loop")
    for (name, size), found in sorted(least.items(), key=lambda each: (each[0][1], each[1])):
        table.add_row(name, str(size), f"{found:.0f}", f"{found / least['a bare loop', size]:.2f}")
    console.print(table)


def show_memory(url: str, count: int) -> None:
    """Consume many items with the engine, each batch added before it is fetched; print the memory on the way."""
    chosen = policy(100, together=True, limit=count, continuous=True)
    stream, seen = queue(url, 100), 0

    class Filled(StreamSource):
        def fetch_transactions(self, batch_size: int, /, **extra: Any) -> list[Transaction]:
            fill(url, batch_size)
            stream.client.xtrim(STREAM, maxlen=10 * batch_size)
            return super().fetch_transactions(batch_size, **extra)

    class Numbers(ConsumerMixin):
        def process_transaction(self, transaction: Transaction) -> None:
            nonlocal seen
            seen += 1
            if seen % (count // 10) == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                print(f"{seen:>10,} items: {pages * resource.getpagesize() // 1024:,} KiB")

    report = Numbers().consume_transactions(source=Filled(stream, chosen), policy=chosen)
    print(f"{report.succeeded:,} succeeded of {report.fetched:,}")


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=5_000, help="items for each measurement")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--flat", type=int, help="items that the engine consumes while its memory is read")
    options.add_argument("--one", help=argparse.SUPPRESS)
    options.add_argument("--url", help=argparse.SUPPRESS)
    options.add_argument("--size", type=int, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.url, given.size, given.count)))
        return
    with own_redis() as url:
        if given.flat:
            show_memory(url, given.flat)
        else:
            compare(url, given.count, given.repeats)


if __name__ == "__main__":
    main()
