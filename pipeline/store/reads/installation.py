"""Reads about the installation itself: workers, sweeps, versions, and samples of how the workflows stood."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from pipeline.store.database import Statement, Transaction, interval
from pipeline.store.rows import BucketRow, LastActRow, ServerRow, SweepRunRow
from pipeline.store.schema import WorkerRow

_WORKERS = Statement[WorkerRow]("SELECT * FROM pipeline.workers ORDER BY name LIMIT :limit")
_SWEEP_RUNS = Statement[SweepRunRow]("SELECT name, last_run_at, report FROM pipeline.sweeps ORDER BY name")
_SERVER = Statement[ServerRow](
    "SELECT current_setting('server_version') AS server_version, version_num AS schema_version "
    "FROM pipeline.alembic_version"
)
_LAST_ACT = Statement[LastActRow]("SELECT (SELECT a.at FROM pipeline.audit a ORDER BY a.id DESC LIMIT 1) AS at")
#: A workflow in which nothing happened has no samples. The reader counts them as zero.
_BUCKETS = Statement[BucketRow]("""
SELECT s.workflow, date_bin(CAST(:step AS interval), s.at, CAST(:since AS timestamptz)) AS at, sum(s.span) AS span,
  CAST(sum(s.published) AS bigint) AS published, CAST(sum(s.committed) AS bigint) AS committed,
  CAST(sum(s.stopped) AS bigint) AS stopped, CAST(sum(s.mutated) AS bigint) AS mutated,
  CAST(sum(s.uncertain) AS bigint) AS uncertain, max(s.backlog) AS backlog, max(s.at - s.oldest_at) AS oldest_age,
  max(s.unresolved) AS unresolved
FROM unnest(CAST(:workflows AS text[])) AS w(name)
JOIN pipeline.samples s ON s.workflow = w.name AND s.at >= :since AND s.at < :until
GROUP BY 1, 2 ORDER BY 1, 2
""")


def workers(tx: Transaction, *, limit: int = 1_000) -> Sequence[WorkerRow]:
    """Workers that run, and those that were killed within the last day."""
    return tx.all(_WORKERS, limit=limit)


def sweep_runs(tx: Transaction) -> dict[str, SweepRunRow]:
    """When each sweep ran last, and what it did. One that never ran is missing."""
    return {row.name: row for row in tx.all(_SWEEP_RUNS)}


def server(tx: Transaction) -> ServerRow:
    """The version of Postgres, and of the schema."""
    return tx.one(_SERVER)


def last_act_at(tx: Transaction) -> datetime | None:
    """When an operator or a sweep acted last."""
    return tx.one(_LAST_ACT).at


def buckets(
    tx: Transaction, workflows: Sequence[str], *, since: datetime, until: datetime, step: timedelta
) -> Sequence[BucketRow]:
    """Samples of workflows, added up by spans of time. A span without samples is missing."""
    return tx.all(_BUCKETS, workflows=list(workflows), since=since, until=until, step=interval(step))
