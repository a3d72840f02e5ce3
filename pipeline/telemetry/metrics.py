"""Define every metric in one table, and record counters and histograms.

Only the API of OpenTelemetry is used; without a provider, recording costs one check. Labels are statuses and names
from the code, never ids, keys or payloads. Gauges are in the table too; ``admin.gauges`` reads them from Postgres.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from opentelemetry import metrics as api

log = logging.getLogger(__name__)

SCOPE = "pipeline"
COUNTER, HISTOGRAM, GAUGE, UP_DOWN = "counter", "histogram", "gauge", "up-down counter"

#: Seconds of a call, a phase or a sweep, which are limited to minutes.
SHORT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Seconds of what may wait for a rate limit or an operator.
LONG_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    900.0,
    3600.0,
    14400.0,
    86400.0,
)
SIZE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class Metric(NamedTuple):
    """A metric: its name, kind, unit, labels and meaning."""

    name: str
    kind: str
    unit: str  #: in OpenTelemetry's notation: ``s``, or what is counted in braces
    labels: tuple[str, ...]
    description: str
    bounds: tuple[float, ...] = ()  #: of a histogram's buckets

    @property
    def prometheus(self) -> str:
        """The name at the Prometheus endpoint."""
        return prometheus_name(self.name, self.unit, self.kind == COUNTER)


@lru_cache(maxsize=4096)
def prometheus_name(name: str, unit: str, is_counter: bool) -> str:
    """Convert a name for Prometheus: underscores, the unit at the end, and ``_total`` for a counter."""
    plain = "".join(letter if letter.isalnum() or letter in "_:" else "_" for letter in name)
    suffix = {"s": "seconds", "ms": "milliseconds", "By": "bytes", "1": ""}.get(unit, unit)
    is_word = suffix.isalpha() and not plain.endswith(f"_{suffix}")
    return f"{plain}{f'_{suffix}' if is_word else ''}{'_total' if is_counter else ''}"


_EFFECT = ("connector", "operation")
_CONSUMER = ("workflow", "topic", "handler")
_TASK = ("task",)
_STREAM = ("stream",)
_GROUP = ("stream", "group")

_COUNTED = (
    Metric(
        "pipeline.transitions",
        COUNTER,
        "{transition}",
        ("transition", "workflow"),
        "lines of the log by name; `event.published` counts the events",
    ),
    Metric(
        "pipeline.runs.stopped", COUNTER, "{run}", ("workflow", "handler", "status"), "runs that stopped, by status"
    ),
    Metric(
        "pipeline.run.latency",
        HISTOGRAM,
        "s",
        ("workflow", "handler"),
        "from the publish of a run's oldest input to its commit",
        LONG_BUCKETS,
    ),
    Metric(
        "pipeline.phase.duration",
        HISTOGRAM,
        "s",
        ("workflow", "phase", "result"),
        "a phase of one run, from its claim until its result is recorded; `done` or `failed`",
        SHORT_BUCKETS,
    ),
    Metric("pipeline.cohort.size", HISTOGRAM, "{run}", ("phase",), "runs that one message claimed", SIZE_BUCKETS),
    Metric(
        "pipeline.deliveries.ignored",
        COUNTER,
        "{run}",
        _TASK,
        "runs of a message that could not be claimed: done, stopped or held by another worker",
    ),
    Metric(
        "pipeline.rescues", COUNTER, "{run}", ("workflow",), "runs that were stopped because they lost their worker"
    ),
    Metric(
        "pipeline.mutation.duration",
        HISTOGRAM,
        "s",
        (*_EFFECT, "outcome"),
        "one call of a mutation: `applied`, `failed`, `retry` (another attempt follows) or `unknown`",
        SHORT_BUCKETS,
    ),
    Metric(
        "pipeline.reconcile.attempts",
        COUNTER,
        "{attempt}",
        (*_EFFECT, "verdict"),
        "reconcile attempts: `applied`, `not found`, `retry` or `no verdict`",
    ),
    Metric(
        "pipeline.mutation.time_to_resolution",
        HISTOGRAM,
        "s",
        (*_EFFECT, "verdict"),
        "from the first doubt about a mutation until it was resolved: `applied`, `failed` or `skipped`",
        (*LONG_BUCKETS, 604_800.0),
    ),
    Metric(
        "pipeline.dead_letters",
        COUNTER,
        "{message}",
        ("kind",),
        "messages that no worker could process, moved to the queue `pipeline.dead_letters`, by kind",
    ),
    Metric("pipeline.sweep.duration", HISTOGRAM, "s", ("sweep",), "one pass of a sweep", SHORT_BUCKETS),
)

_ENGINE = (
    Metric(
        "pipeline.consumer_engine.transactions", COUNTER, "{item}", (*_TASK, "status"), "items that ended, by status"
    ),
    Metric(
        "pipeline.consumer_engine.transaction.duration",
        HISTOGRAM,
        "s",
        (*_TASK, "status"),
        "from start of work to end of an item",
        SHORT_BUCKETS,
    ),
    Metric("pipeline.consumer_engine.in_flight", UP_DOWN, "{item}", _TASK, "items being worked on"),
    Metric(
        "pipeline.consumer_engine.attempts",
        COUNTER,
        "{attempt}",
        (*_TASK, "step", "result"),
        "attempts, by result",
    ),
    Metric("pipeline.consumer_engine.retries", COUNTER, "{attempt}", (*_TASK, "step"), "attempts after the first"),
    Metric(
        "pipeline.consumer_engine.step.duration",
        HISTOGRAM,
        "s",
        (*_TASK, "step"),
        "one attempt of a step",
        SHORT_BUCKETS,
    ),
    Metric(
        "pipeline.consumer_engine.backoff",
        HISTOGRAM,
        "s",
        (*_TASK, "step"),
        "pauses before the next attempt; `empty` is the pause after an empty fetch",
        SHORT_BUCKETS,
    ),
    Metric(
        "pipeline.consumer_engine.timeouts",
        COUNTER,
        "{timeout}",
        (*_TASK, "scope", "step"),
        "timeouts of a step, transaction or loop, by the step that ran then",
    ),
    Metric("pipeline.consumer_engine.batch.size", HISTOGRAM, "{item}", _TASK, "items in one fetch", SIZE_BUCKETS),
    Metric(
        "pipeline.consumer_engine.oversize_batches",
        COUNTER,
        "{batch}",
        _TASK,
        "fetches that returned more than the limit",
    ),
    Metric(
        "pipeline.consumer_engine.deferred",
        COUNTER,
        "{item}",
        _TASK,
        "items that waited because another item with their id was processed",
    ),
    Metric(
        "pipeline.consumer_engine.abandoned_calls",
        UP_DOWN,
        "{call}",
        _TASK,
        "abandoned calls that still run",
    ),
)

_QUEUE = (
    Metric("pipeline.queue.messages_read", COUNTER, "{entry}", _STREAM, "entries delivered by reads"),
    Metric("pipeline.queue.acks", COUNTER, "{entry}", _STREAM, "entries acknowledged"),
    Metric("pipeline.queue.messages_claimed", COUNTER, "{entry}", _STREAM, "stale entries taken over"),
    Metric("pipeline.queue.read_latency", HISTOGRAM, "s", _STREAM, "time of reads that found something", SHORT_BUCKETS),
    Metric(
        "pipeline.queue.lag", GAUGE, "{entry}", _GROUP, "entries of the stream that were not delivered to the group"
    ),
    Metric("pipeline.queue.pending", GAUGE, "{entry}", _GROUP, "entries that were read and not acknowledged"),
)

_GAUGES = (
    Metric("pipeline.database.up", GAUGE, "1", (), "1 if Postgres answers, else 0"),
    Metric(
        "pipeline.gauges.age",
        GAUGE,
        "s",
        (),
        "since all gauges were last read: while it grows, they are missing or old",
    ),
    Metric(
        "pipeline.runs",
        GAUGE,
        "{run}",
        ("workflow", "phase", "status"),
        "runs that are active, or that will be retried",
    ),
    Metric("pipeline.backlog.events", GAUGE, "{event}", _CONSUMER, "events that wait, counted up to a bound"),
    Metric(
        "pipeline.backlog.age",
        GAUGE,
        "s",
        _CONSUMER,
        "age of the oldest event that a run may take now; 0 while its workflow starts no runs",
    ),
    Metric(
        "pipeline.backlog.declined.age",
        GAUGE,
        "s",
        _CONSUMER,
        "age of the oldest event that its consumer declined; 0 while its workflow starts no runs",
    ),
    Metric("pipeline.leases", GAUGE, "{run}", ("state",), "runs that a worker holds (`held`) or lost (`lapsed`)"),
    Metric("pipeline.mutations.open", GAUGE, "{mutation}", (*_EFFECT, "status"), "mutations that are not resolved"),
    Metric("pipeline.mutations.oldest", GAUGE, "s", (*_EFFECT, "status"), "age of the oldest that is not resolved"),
    Metric("pipeline.breakers.open", GAUGE, "{breaker}", _EFFECT, "1 while no new mutation of an operation starts"),
    Metric(
        "pipeline.workflows",
        GAUGE,
        "{workflow}",
        ("workflow", "status"),
        "1 for the current status of a workflow; `maintenance` may be 1 beside it",
    ),
    Metric("pipeline.sweeps.age", GAUGE, "s", ("sweep",), "since a sweep last ran: grows when beat is down"),
    Metric("pipeline.findings", GAUGE, "{row}", ("invariant", "severity"), "findings of the doctor's last run"),
    Metric(
        "pipeline.attention", GAUGE, "{item}", ("kind",), "what waits for an operator, as `pipeline attention` lists"
    ),
)

#: Every metric there is, by its OpenTelemetry name.
METRICS: Mapping[str, Metric] = {each.name: each for each in (*_COUNTED, *_GAUGES, *_ENGINE, *_QUEUE)}

#: Field with the number of things that one log line is about.
_AMOUNTS = {"event.published": "events"}

_provider: Any = None  #: the provider of ``MetricsExport``; None: the process-wide one
_cached_recorders: tuple[Any, Mapping[str, Callable[..., None]]] | None = None


def use_provider(provider: Any) -> None:
    """Record with this provider; None: with the process-wide one, if there is one."""
    global _provider
    _provider = provider


def is_on() -> bool:
    """Return whether a provider records metrics."""
    return _provider is not None or is_configured(api.get_meter_provider())


def is_configured(provider: object) -> bool:
    """Return whether a provider of metrics or spans was configured: those of the bare API drop everything."""
    return not type(provider).__module__.startswith(("opentelemetry.metrics", "opentelemetry.trace"))


def record(name: str, labels: Mapping[str, str], value: float = 1) -> None:
    """Add to a counter, or record a value of a histogram. A failing meter is ignored."""
    add = _current_recorders()[name]
    try:
        add(value, labels)
    except Exception:
        log.debug("%s was not recorded", name, exc_info=True)


def count_transitions(lines: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Count the transitions of one transaction, summed by name and workflow."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, fields in lines:
        amount = fields[_AMOUNTS[name]] if name in _AMOUNTS else 1
        counts[name, str(fields.get("workflow") or "")] += amount
    for (name, workflow), amount in counts.items():
        record("pipeline.transitions", {"transition": name, "workflow": workflow}, amount)


def recorders(meter: api.Meter, of: Sequence[Metric]) -> dict[str, Callable[..., None]]:
    """Create the instruments of these metrics; return by name the function that adds or records a value."""
    return {each.name: _recorder(meter, each) for each in of if each.kind != GAUGE}


def metrics_with_prefix(prefix: str) -> list[Metric]:
    """Return the metrics whose names begin with the prefix."""
    return [each for each in METRICS.values() if each.name.startswith(prefix)]


def _current_recorders() -> Mapping[str, Callable[..., None]]:
    """Return the recording function of each metric at the current provider."""
    global _cached_recorders
    provider = _provider if _provider is not None else api.get_meter_provider()
    if _cached_recorders is None or _cached_recorders[0] is not provider:
        _cached_recorders = provider, recorders(provider.get_meter(SCOPE), _COUNTED)
    return _cached_recorders[1]


def _recorder(meter: api.Meter, of: Metric) -> Callable[..., None]:
    about = {"unit": of.unit, "description": of.description}
    if of.kind == HISTOGRAM:
        return meter.create_histogram(of.name, explicit_bucket_boundaries_advisory=of.bounds, **about).record
    make = meter.create_up_down_counter if of.kind == UP_DOWN else meter.create_counter
    return make(of.name, **about).add
