"""Reads that find a run, a mutation or an event by any id, and follow it both ways. All bounded."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from pipeline.domain.states import RunStatus
from pipeline.store.database import Statement, Transaction
from pipeline.store.predicates import BEFORE_PREPARED
from pipeline.store.rows import EventThroughputRow, MutationOfRunRow, RunInputsRow, RunThroughputRow, UuidRow

_IDS_BETWEEN = {
    table: Statement[UuidRow](
        f"SELECT id FROM pipeline.{table} WHERE id BETWEEN :low AND :high ORDER BY id LIMIT :limit"
    )
    for table in ("runs", "mutations")
}
_BY_KEY = Statement[MutationOfRunRow](
    "SELECT id, run_id FROM pipeline.mutations WHERE idempotency_key = :key ORDER BY id LIMIT :limit"
)
#: Any value inside a result, however deep: what outside systems call the thing that was made.
_BY_RESULT_VALUE = Statement[MutationOfRunRow]("""
SELECT m.id, m.run_id FROM (SELECT * FROM pipeline.mutations ORDER BY id DESC LIMIT :recent) m
WHERE m.result IS NOT NULL
  AND jsonb_path_exists(m.result, '$.** ? (@ == $text || @ == $number)', CAST(:value AS jsonb))
ORDER BY m.id LIMIT :limit
""")
#: Runs that held an event and let it go leave no trace at the event; ids are ordered by time, so they are looked
#: for among the runs that began after it came. A run that failed before it had chosen held what it was offered.
_RUNS_WITH_INPUTS = Statement[RunInputsRow](f"""
SELECT r.id, r.handler_id, r.event_ids FROM (
  SELECT * FROM pipeline.runs WHERE id >= :since ORDER BY id LIMIT :recent) r
WHERE r.event_ids && CAST(:events AS bigint[]) OR (r.error IS NOT NULL AND r.event_ids = '{{}}'
  AND r.phase IN {BEFORE_PREPARED} AND r.offered && CAST(:events AS bigint[]))
ORDER BY r.id LIMIT :limit
""")
_RUN_THROUGHPUT = Statement[RunThroughputRow](f"""
SELECT r.workflow, count(*) FILTER (WHERE r.status = '{RunStatus.COMMITTED}') AS committed,
  count(*) FILTER (WHERE r.finished_at IS NOT NULL AND r.status <> '{RunStatus.COMMITTED}') AS stopped,
  extract(epoch FROM pipeline.clock() - min(r.finished_at)) AS oldest_age, sum(count(*)) OVER () AS rows_read
FROM (SELECT * FROM pipeline.runs ORDER BY id DESC LIMIT :recent) r
WHERE r.finished_at > pipeline.clock() - CAST(:span AS interval) GROUP BY r.workflow
""")
_EVENT_THROUGHPUT = Statement[EventThroughputRow]("""
SELECT e.workflow, count(*) AS published,
  extract(epoch FROM pipeline.clock() - min(e.created_at)) AS oldest_age, sum(count(*)) OVER () AS rows_read
FROM (SELECT workflow, created_at FROM pipeline.events ORDER BY id DESC LIMIT :recent) e
WHERE e.created_at > pipeline.clock() - CAST(:span AS interval) GROUP BY e.workflow
""")


def ids_between(tx: Transaction, table: str, low: UUID, high: UUID, *, limit: int = 6) -> list[UUID]:
    """Ids of runs or mutations in a range: those that begin alike."""
    return [row.id for row in tx.all(_IDS_BETWEEN[table], low=low, high=high, limit=limit)]


def mutations_by_key(tx: Transaction, key: str, *, limit: int = 20) -> Sequence[MutationOfRunRow]:
    """Mutations sent under an idempotency key."""
    return tx.all(_BY_KEY, key=key, limit=limit)


def mutations_by_result_value(
    tx: Transaction, value: str, *, recent: int, limit: int = 20
) -> Sequence[MutationOfRunRow]:
    """The newest mutations in whose result a value occurs, written as JSON ``{"text": …, "number": …}``."""
    return tx.all(_BY_RESULT_VALUE, value=value, recent=recent, limit=limit)


def runs_with_inputs(
    tx: Transaction, events: Sequence[int], since: UUID, *, recent: int, limit: int = 200
) -> Sequence[RunInputsRow]:
    """Runs from an id on that had one of these events among their inputs."""
    return tx.all(_RUNS_WITH_INPUTS, events=list(events), since=since, recent=recent, limit=limit)


def run_throughput(tx: Transaction, span: str, *, recent: int) -> Sequence[RunThroughputRow]:
    """Runs that ended lately, by workflow: how far back the read reached, and how many rows it counted."""
    return tx.all(_RUN_THROUGHPUT, span=span, recent=recent)


def event_throughput(tx: Transaction, span: str, *, recent: int) -> Sequence[EventThroughputRow]:
    """Events published lately, by workflow: how far back the read reached, and how many rows it counted."""
    return tx.all(_EVENT_THROUGHPUT, span=span, recent=recent)


def first_id_at(moment: datetime, *, margin: float = 60.0) -> UUID:
    """The smallest id that a run could have got at a moment, less a while for runs that were waiting by then."""
    milliseconds = max(0, int((moment.timestamp() - margin) * 1000))
    return UUID(int=milliseconds << 80)
