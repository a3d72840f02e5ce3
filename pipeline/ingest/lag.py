"""Gauges of a stream's backlog, read from Redis on scrape only.

The connection of a queue belongs to its loop: a waiting read holds it, and the loop must see it fail. A
scrape therefore uses its own connection, in its own thread, so that it waits only a limited time.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation

from pipeline.consumer_engine.bounded import StepRunner
from pipeline.ingest.queue import BacklogStats, QueueConfig, RedisStreamsQueue
from pipeline.ingest.redis_client import connect_redis
from pipeline.telemetry.metrics import METRICS

SCRAPE_TIMEOUT = 3.0  #: seconds that a scrape waits for Redis
_GAUGES: dict[str, Callable[[BacklogStats], int | None]] = {
    "pipeline.queue.lag": lambda stats: stats.lag,
    "pipeline.queue.pending": lambda stats: stats.pending,
}


def lag_gauges(url: str, config: QueueConfig) -> Callable[[Meter], None]:
    """Return a function that adds the gauges of a stream to a meter.

    A gauge has no value when Redis is unreachable, too slow, or does not know it.
    """
    labels, reader = {"stream": config.stream, "group": config.group}, BacklogReader(lambda: read_backlog(url, config))

    def callback(name: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def observe(_: CallbackOptions) -> Iterator[Observation]:
            stats = reader.stats_for(name)
            value = None if stats is None else _GAUGES[name](stats)
            if value is not None:
                yield Observation(value, labels)

        return observe

    def register(meter: Meter) -> None:
        for name in _GAUGES:
            metric = METRICS[name]
            meter.create_observable_gauge(
                name, callbacks=[callback(name)], unit=metric.unit, description=metric.description
            )

    return register


def read_backlog(url: str, config: QueueConfig) -> BacklogStats:
    """Count the backlog over a connection that is opened and closed for it."""
    quick = replace(config, block_ms=1)  # no blocking read happens here: the socket timeout can be short
    client = connect_redis(url, longest_block_ms=quick.block_ms)
    try:
        return RedisStreamsQueue(client, quick, meter=NoOpMeter("pipeline.ingest"), create=False).backlog_stats()
    finally:
        client.close()


class BacklogReader:
    """Reads the backlog once per scrape for all gauges, one read at a time."""

    def __init__(self, read: Callable[[], BacklogStats]) -> None:
        self._read, self._runner = read, StepRunner()
        self._stats: BacklogStats | None = None
        self._served_gauges = set(_GAUGES)
        self._lock, self._is_hanging = threading.Lock(), False

    def stats_for(self, name: str) -> BacklogStats | None:
        """Return the stats for this gauge; None if the read failed or takes too long."""
        with self._lock:
            if name in self._served_gauges and not self._is_hanging:
                ended = self._runner.run_bounded(self._read, (), limit=SCRAPE_TIMEOUT, on_abandon=self._hold)
                self._stats, self._served_gauges = ended.value, set()
            self._served_gauges.add(name)
            return self._stats

    def _hold(self) -> Callable[[], None]:
        """Begin no other read until the one that hangs has ended."""
        self._is_hanging = True
        return lambda: setattr(self, "_is_hanging", False)
