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
from pipeline.ingest.redis_client import connect
from pipeline.telemetry.metrics import METRICS

PATIENCE = 3.0  #: seconds that a scrape waits for a look
_TOLD: dict[str, Callable[[BacklogStats], int | None]] = {
    "pipeline.queue.lag": lambda stats: stats.waiting,
    "pipeline.queue.pending": lambda stats: stats.pending,
}


def watching(url: str, config: QueueConfig) -> Callable[[Meter], None]:
    """Adds the gauges of a stream to a meter. A Redis that is away, slow, or cannot tell, tells nothing."""
    labels, looks = {"stream": config.stream, "group": config.group}, Looks(lambda: looked(url, config))

    def asks(name: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def ask(_: CallbackOptions) -> Iterator[Observation]:
            stats = looks.seen(name)
            value = None if stats is None else _TOLD[name](stats)
            if value is not None:
                yield Observation(value, labels)

        return ask

    def register(meter: Meter) -> None:
        for name in _TOLD:
            about = METRICS[name]
            meter.create_observable_gauge(name, callbacks=[asks(name)], unit=about.unit, description=about.words)

    return register


def looked(url: str, config: QueueConfig) -> BacklogStats:
    """Count what waits, over a connection that is made for it and closed."""
    quick = replace(config, block_ms=1)  # nothing is read here: no answer is waited for longer than any other
    client = connect(url, longest_block_ms=quick.block_ms)
    try:
        return RedisStreamsQueue(client, quick, meter=NoOpMeter("pipeline.ingest"), create=False).backlog_stats()
    finally:
        client.close()


class Looks:
    """One look after the other: each is for every gauge once, and no other begins while it lasts."""

    def __init__(self, look: Callable[[], BacklogStats]) -> None:
        self._look, self._last = look, _Look(look)
        self._lock = threading.Lock()

    def seen(self, name: str) -> BacklogStats | None:
        """What the look for this gauge found; nothing when it failed, or is not over in time."""
        with self._lock:
            if name in self._last.told and not self._last.is_alive():
                self._last = _Look(self._look)
            last = self._last
            last.begin()
            last.told.add(name)
        last.join(max(0.0, last.until - time.monotonic()))
        return last.stats


class _Look(threading.Thread):
    def __init__(self, look: Callable[[], BacklogStats]) -> None:
        super().__init__(name="pipeline-lag", daemon=True)
        self._look = look
        self.stats: BacklogStats | None = None
        self.told: set[str] = set()
        self.until = 0.0

    def begin(self) -> None:
        if self.ident is None:
            self.until = time.monotonic() + PATIENCE
            self.start()

    def run(self) -> None:
        try:
            self.stats = self._look()
        except QueueError:
            return
