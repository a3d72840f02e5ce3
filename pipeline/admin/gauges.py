"""Read gauges from Postgres on scrape; every process gives the same values.

- Postgres is read every few seconds at most, however often it is scraped.
- If Postgres does not answer in time, only ``pipeline.database.up`` is exported, as 0.
- While a lock holds its tables, as during a migration, the last values are reused for a minute.
- The age of the last complete read is always exported: while it grows, missing gauges mean nothing.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from pipeline.domain.states import MutationStatus
from pipeline.domain.workflows import CLEARED_BY_RESUME, BlockKind, DesiredStatus, WorkflowStatus, workflow_status
from pipeline.store.database import Database, Transaction, is_disconnected
from pipeline.store.reads import gauges
from pipeline.store.reads.invariants import INVARIANTS, LATE_EFFECTS, Severity
from pipeline.store.rows import MutationCountRow, SweepGaugeRow, WorkflowGaugeRow
from pipeline.telemetry.metrics import GAUGE, METRICS

log = logging.getLogger(__name__)

#: A value of a gauge, with its labels.
Value = tuple[str, Mapping[str, str], float]
Values = Mapping[str, Sequence[Observation]]

UP, AGE = "pipeline.database.up", "pipeline.gauges.age"
_UNAVAILABLE: Values = {UP: [Observation(0)]}
_REUSE_SECONDS = 60.0
GAUGE_NAMES = tuple(
    each.name for each in METRICS.values() if each.kind == GAUGE and not each.name.startswith("pipeline.queue.")
)


def read(db: Database) -> Iterator[Value]:
    """Yield every gauge, in one transaction. Gauges read before an error were yielded."""
    with db.transaction() as tx:
        gauges.limit_reads(tx)
        yield from _work_gauges(tx)
        yield from _attention_gauges(tx)
        yield from _backlog(tx)


def _work_gauges(tx: Transaction) -> Iterator[Value]:
    for row in gauges.runs(tx):
        yield "pipeline.runs", {"workflow": row.workflow, "phase": row.phase, "status": row.status}, row.number
    for state, count in gauges.leases(tx).items():
        yield "pipeline.leases", {"state": state}, count
    for breaker in gauges.breakers(tx):
        labels = {"connector": breaker.connector, "operation": breaker.operation}
        yield "pipeline.breakers.open", labels, breaker.is_open


def _attention_gauges(tx: Transaction) -> Iterator[Value]:
    """Yield the counts of what waits for an operator, and the facts they are derived from."""
    workflows, sweeps, mutations = gauges.workflows(tx), gauges.sweeps(tx), gauges.mutations(tx)
    found = _findings(sweeps)
    yield from chain(_workflows(workflows), _sweeps(sweeps), _mutations(mutations), found)
    waits: dict[str, float] = {
        "indeterminate": sum(row.number for row in mutations if row.status == MutationStatus.INDETERMINATE),
        "approval": sum(row.awaiting_approval for row in mutations),
        "maintenance": sum(row.maintenance for row in workflows),
        "breaker": sum(row.is_open for row in gauges.breakers(tx)),
        "broken_invariant": sum(count for _, labels, count in found if _is_broken(labels)),
        **gauges.attention(tx, sorted(CLEARED_BY_RESUME)),
    }
    for kind, count in waits.items():
        yield "pipeline.attention", {"kind": kind}, count


def _workflows(rows: Sequence[WorkflowGaugeRow]) -> Iterator[Value]:
    for row in rows:
        shown = workflow_status(DesiredStatus(row.desired), [BlockKind(kind) for kind in row.blocks])
        for status in WorkflowStatus:
            yield "pipeline.workflows", {"workflow": row.workflow, "status": str(status)}, status is shown
        yield "pipeline.workflows", {"workflow": row.workflow, "status": "maintenance"}, row.maintenance


def _sweeps(rows: Sequence[SweepGaugeRow]) -> Iterator[Value]:
    for row in rows:
        yield "pipeline.sweeps.age", {"sweep": row.name}, float(row.age)


def _mutations(rows: Sequence[MutationCountRow]) -> Iterator[Value]:
    for row in rows:
        labels = {"connector": row.connector, "operation": row.operation, "status": row.status}
        yield "pipeline.mutations.open", labels, row.number
        yield "pipeline.mutations.oldest", labels, float(row.oldest)


def _findings(sweeps: Sequence[SweepGaugeRow]) -> list[Value]:
    """Return the findings of the doctor's last run, with zero for each invariant that holds."""
    report = next((row.report for row in sweeps if row.name == "doctor"), None)
    if report is None:
        return []
    return [
        (
            "pipeline.findings",
            {"invariant": each.name, "severity": str(each.severity)},
            report.get(f"{each.severity}: {each.name}", 0),
        )
        for each in INVARIANTS
    ]


def _is_broken(labels: Mapping[str, str]) -> bool:
    return labels["severity"] == Severity.BROKEN and labels["invariant"] != LATE_EFFECTS


def _backlog(tx: Transaction) -> Iterator[Value]:
    for row in gauges.backlog(tx):
        labels = {"workflow": row.workflow, "topic": row.topic, "handler": row.handler}
        yield "pipeline.backlog.events", labels, row.number
        yield "pipeline.backlog.age", labels, float(row.age)
        yield "pipeline.backlog.declined.age", labels, float(row.declined_age)


class Gauges:
    """Read gauges in a separate thread, so that a scrape waits at most ``timeout``."""

    def __init__(self, db: Database, *, max_age: float = 5.0, timeout: float = 3.0) -> None:
        self.db, self.max_age, self.timeout = db, max_age, timeout
        self._values: Values = {}
        self._complete: Values = {}
        self._read_at: float | None = None
        self._complete_at = self._timed_out_at = -math.inf
        self._created_at = time.monotonic()
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None

    def register(self, meter: Meter) -> None:
        """Register every gauge with a meter."""
        for name in GAUGE_NAMES:
            about = METRICS[name]
            callbacks = [self._callback(name)]
            meter.create_observable_gauge(name, callbacks=callbacks, unit=about.unit, description=about.description)

    def snapshot(self) -> Values:
        """Return values at most ``max_age`` old; only ``pipeline.database.up`` 0 if Postgres does not answer."""
        with self._lock:
            if self._is_fresh():
                return self._values
            if time.monotonic() - self._timed_out_at < self.max_age:  # a scrape reads each gauge, and waits only once
                return _UNAVAILABLE
            if self._reading is None or not self._reading.is_alive():
                self._reading = threading.Thread(target=self._refresh, name="pipeline-gauges", daemon=True)
                self._reading.start()
            reading = self._reading
        reading.join(self.timeout)
        with self._lock:
            if self._is_fresh():
                return self._values
            self._timed_out_at = time.monotonic()
            return _UNAVAILABLE

    def age(self) -> float:
        """Return the seconds since every gauge was last read, or since the process began."""
        with self._lock:
            return time.monotonic() - max(self._complete_at, self._created_at)

    def _is_fresh(self) -> bool:
        return self._read_at is not None and time.monotonic() - self._read_at < self.max_age

    def _refresh(self) -> None:
        values: dict[str, Sequence[Observation]] = {}
        found: dict[str, list[Observation]] = {}
        is_good = False
        try:
            for name, labels, value in read(self.db):
                found.setdefault(name, []).append(Observation(float(value), labels))
            values, is_good = {**found, UP: [Observation(1)]}, True
        except SQLAlchemyError as error:
            log.warning("gauges could not be read from the database: %s", str(error).partition("\n")[0])
            values = {**found, UP: [Observation(0)]}
            if isinstance(error, DBAPIError) and not is_disconnected(error):
                values = {**found, **self._recent_values(), UP: [Observation(1)]}
        with self._lock:
            self._values, self._read_at = values, time.monotonic()
            if is_good:
                self._complete, self._complete_at = values, self._read_at

    def _recent_values(self) -> Values:
        return self._complete if time.monotonic() - self._complete_at < _REUSE_SECONDS else {}

    def _callback(self, name: str) -> Callable[[CallbackOptions], Sequence[Observation]]:
        def ask(_: CallbackOptions) -> Sequence[Observation]:
            found = self.snapshot()
            return [Observation(self.age())] if name == AGE else found.get(name, ())

        return ask
