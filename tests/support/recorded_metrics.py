"""Numbers that a test made, and the questions it asks about them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pipeline.telemetry import metrics, metrics_collector
from pipeline.telemetry.metrics import HISTOGRAM


class Row(NamedTuple):
    """One series and its number: of a histogram how often it was told something, the sum, and each bucket."""

    name: str
    unit: str
    description: str
    bounds: tuple[float, ...]
    labels: tuple[tuple[str, str], ...]
    value: float | tuple[float, float, tuple[float, ...]]


class Counted:
    """Everything that was counted so far, in this process."""

    def __init__(self) -> None:
        self.reader, self.totals = metrics_collector.pull_reader(), metrics_collector.MetricTotals()
        self.provider = metrics_collector.meter_provider([self.reader])

    def rows(self) -> list[Row]:
        """Every series."""
        self.totals.add(metrics_collector.points_of(self.reader.get_metrics_data())[0])
        return [_row(*value) for value in self.totals.values()]

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


def _row(series: metrics_collector.Series, numbers: metrics_collector.Numbers) -> Row:
    *buckets, last = numbers
    value = (sum(buckets), last, tuple(buckets)) if series.kind == HISTOGRAM else last
    return Row(series.name, series.unit, series.description, series.bounds, series.labels, value)


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
