"""What a queue counts. Only the queue does: the loops above it count nothing and ask Redis nothing."""

import logging
from collections.abc import Callable
from typing import Any

from opentelemetry.metrics import Meter, get_meter

logger = logging.getLogger("pipeline.ingest")


class QueueMetrics:
    """Counters and one histogram, by stream. A failure to count never reaches the caller."""

    def __init__(self, stream: str, meter: Meter | None = None) -> None:
        made = meter or get_meter("pipeline.ingest")
        self._labels = {"stream": stream}
        self._read = made.create_counter("pipeline.queue.messages_read", description="entries delivered by reads")
        self._acked = made.create_counter("pipeline.queue.acks", description="entries acknowledged")
        self._claimed = made.create_counter("pipeline.queue.messages_claimed", description="stale entries taken over")
        self._latency = made.create_histogram(
            "pipeline.queue.read_latency", unit="s", description="time of reads that found something"
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
