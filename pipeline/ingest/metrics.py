"""What a queue counts. Only the queue does: the loops above it count nothing and ask Redis nothing."""

import logging
from collections.abc import Callable
from typing import Any

from opentelemetry.metrics import Meter, get_meter

from pipeline.telemetry import metrics as table

logger = logging.getLogger("pipeline.ingest")


class QueueMetrics:
    """Counters and one histogram, by stream. A failure to count never reaches the caller."""

    def __init__(self, stream: str, meter: Meter | None = None) -> None:
        instruments = table.instruments(meter or get_meter("pipeline.ingest"), table.named("pipeline.queue."))
        self._labels = {"stream": stream}
        self._read, self._acked, self._claimed, self._latency = (
            instruments[f"pipeline.queue.{name}"]
            for name in ("messages_read", "acks", "messages_claimed", "read_latency")
        )

    def read(self, count: int, seconds: float) -> None:
        """A read came back with so many entries."""
        if count:
            _count(self._read.add, count, self._labels)
            _count(self._latency.record, seconds, self._labels)

    def acked(self, count: int) -> None:
        """Redis took an acknowledgement of so many entries, whether or not they were pending."""
        _count(self._acked.add, count, self._labels)

    def claimed(self, count: int) -> None:
        """So many stale entries changed hands."""
        if count:
            _count(self._claimed.add, count, self._labels)


def _count(record: Callable[..., Any], amount: float, labels: dict[str, str]) -> None:
    try:
        record(amount, labels)
    except Exception:  # what was counted has happened; a meter must not undo it
        logger.debug("a metric was not recorded", exc_info=True)
