"""How far a stream has been read, for whoever scrapes: asked of Redis when he does, and never else.

The connection of a queue belongs to its loop, which holds it while a read waits and must see it fail: a look here is
over a connection of its own, in a thread of its own, so that whoever asks waits only so long.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation

from pipeline.ingest.errors import QueueError
from pipeline.ingest.queue import BacklogStats, QueueConfig, RedisStreamsQueue
from pipeline.ingest.redis_client import connect_redis
from pipeline.telemetry.metrics import METRICS

SCRAPE_TIMEOUT = 3.0  #: seconds that a scrape waits for a look
_GAUGES: dict[str, Callable[[BacklogStats], int | None]] = {
    "pipeline.queue.lag": lambda stats: stats.lag,
    "pipeline.queue.pending": lambda stats: stats.pending,
}


def lag_gauges(url: str, config: QueueConfig) -> Callable[[Meter], None]:
    """Adds the gauges of a stream to a meter. A Redis that is away, slow, or cannot tell, tells nothing."""
    labels, looks = {"stream": config.stream, "group": config.group}, BacklogReader(lambda: read_backlog(url, config))

    def asks(name: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def ask(_: CallbackOptions) -> Iterator[Observation]:
            stats = looks.stats_for(name)
            value = None if stats is None else _GAUGES[name](stats)
            if value is not None:
                yield Observation(value, labels)

        return ask

    def register(meter: Meter) -> None:
        for name in _GAUGES:
            about = METRICS[name]
            meter.create_observable_gauge(name, callbacks=[asks(name)], unit=about.unit, description=about.description)

    return register


def read_backlog(url: str, config: QueueConfig) -> BacklogStats:
    """Count what waits, over a connection that is made for it and closed."""
    quick = replace(config, block_ms=1)  # nothing is read here: no answer is waited for longer than any other
    client = connect_redis(url, longest_block_ms=quick.block_ms)
    try:
        return RedisStreamsQueue(client, quick, meter=NoOpMeter("pipeline.ingest"), create=False).backlog_stats()
    finally:
        client.close()


class BacklogReader:
    """One look after the other: each is for every gauge once, and no other begins while it lasts."""

    def __init__(self, read: Callable[[], BacklogStats]) -> None:
        self._read, self._last = read, _BacklogRead(read)
        self._lock = threading.Lock()

    def stats_for(self, name: str) -> BacklogStats | None:
        """What the look for this gauge found; nothing when it failed, or is not over in time."""
        with self._lock:
            if name in self._last.served_gauges and not self._last.is_alive():
                self._last = _BacklogRead(self._read)
            last = self._last
            last.begin()
            last.served_gauges.add(name)
        last.join(max(0.0, last.until - time.monotonic()))
        return last.stats


class _BacklogRead(threading.Thread):
    def __init__(self, look: Callable[[], BacklogStats]) -> None:
        super().__init__(name="pipeline-lag", daemon=True)
        self._read = look
        self.stats: BacklogStats | None = None
        self.served_gauges: set[str] = set()
        self.until = 0.0

    def begin(self) -> None:
        if self.ident is None:
            self.until = time.monotonic() + SCRAPE_TIMEOUT
            self.start()

    def run(self) -> None:
        try:
            self.stats = self._read()
        except QueueError:
            return
