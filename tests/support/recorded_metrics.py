"""Numbers that a test made, and the questions it asks about them."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.telemetry import metrics
from pipeline.telemetry.metrics_export import collector
from pipeline.telemetry.metrics_export.totals import MetricPoint, MetricTotals


class Counted:
    """Everything that was counted so far, in this process."""

    def __init__(self) -> None:
        self.reader, self.totals = collector.pull_reader(), MetricTotals()
        self.provider = collector.meter_provider([self.reader])

    def rows(self) -> list[MetricPoint]:
        """Every series."""
        self.totals.add(collector.collect(self.reader)[0])
        return self.totals.points()

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """A metric by these labels: what a counter says, and how often a histogram was told something."""
        found: dict[tuple[str, ...], float] = {}
        for row in self.rows():
            if row.name == name:
                known = dict(row.labels)
                key = tuple(known[label] for label in labels)
                found[key] = found.get(key, 0) + (row.value[0] if isinstance(row.value, tuple) else row.value)
        return found

    def one(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels."""
        return self.by(name, *labels).get(tuple(labels.values()), 0)


@contextmanager
def counting() -> Iterator[Counted]:
    """Let what is counted here go into memory."""
    counted = Counted()
    metrics.use_provider(counted.provider)
    try:
        yield counted
    finally:
        metrics.use_provider(None)
        counted.provider.shutdown()
