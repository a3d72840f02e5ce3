"""How far a stream has been read, for whoever scrapes: asked of Redis when he does, and never else."""

from collections.abc import Callable, Iterator

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pipeline.ingest.errors import QueueError
from pipeline.ingest.queue import BacklogStats, RedisStreamsQueue
from pipeline.telemetry.metrics import METRICS

_TOLD: dict[str, Callable[[BacklogStats], int | None]] = {
    "pipeline.queue.lag": lambda stats: stats.waiting,
    "pipeline.queue.pending": lambda stats: stats.pending,
}


def watching(queue: RedisStreamsQueue) -> Callable[[Meter], None]:
    """Adds the gauges of a stream to a meter. A Redis that is away, or cannot tell, tells nothing."""
    labels = {"stream": queue.config.stream, "group": queue.config.group}

    def asks(name: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def ask(_: CallbackOptions) -> Iterator[Observation]:
            try:
                value = _TOLD[name](queue.backlog_stats())
            except QueueError:
                return
            if value is not None:
                yield Observation(value, labels)

        return ask

    def register(meter: Meter) -> None:
        for name in _TOLD:
            about = METRICS[name]
            meter.create_observable_gauge(name, callbacks=[asks(name)], unit=about.unit, description=about.words)

    return register
