"""Reads for operators, page by page: newest first, from a position on. All bounded.

The position is an id, so a page costs the same wherever it begins, and new rows move no later page.

What is open is found by an index. What is long done has no index of its own, which would make every write pay for a
rare read. It is searched in a window of the primary key, and the next page continues where the window ends. So a page
may have fewer rows than asked for, and others may follow all the same.

A condition on a status that a partial index has is written into the statement. As a parameter it would keep a prepared
statement from using that index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

from pipeline.domain.states import DeliveryStatus, MutationStatus, RunStatus
from pipeline.store.database import Statement, Transaction
from pipeline.store.predicates import OPEN_MUTATION, is_of_handler, join_by_id
from pipeline.store.reads.listings import EVENT_COLUMNS, JOIN_DELIVERIES, RUN_COLUMNS
from pipeline.store.rows import (
    FoundIdRow,
    LedgerPageRow,
    ListedEventRow,
    ListedRunRow,
    NumberIdRow,
    QuarantinedEventRow,
    SessionCostRow,
    UuidRow,
)
from pipeline.store.schema import AuditRow

FIRST_NUMBER, LAST_NUMBER = 0, 2**63 - 1
FIRST_UUID, LAST_UUID = UUID(int=0), UUID(int=2**128 - 1)
#: Ids are given out while a transaction runs, and a row has the time at which its transaction began. Rows of longer
#: transactions may be missing from a list that is restricted by time.
LONGEST_TRANSACTION = timedelta(minutes=1)
#: How many runs of a session are read for its cost.
_MAX_COST_ROWS = 10_000

RowT = TypeVar("RowT")
PositionT = TypeVar("PositionT", int, UUID, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRange(Generic[PositionT]):
    """Which part of a list is read: rows with ids in ``[low, before)``, newest first."""

    before: PositionT
    low: PositionT
    limit: int  #: rows of the page, at most
    window: int  #: rows that are searched, at most


@dataclass(frozen=True, slots=True)
class RowPage(Generic[RowT, PositionT]):
    """The rows of a page, and the position of the next one; None if there is none."""

    rows: Sequence[RowT]
    position: PositionT | None


def _in_range(column: str) -> str:
    return f"{column} < :before AND {column} >= :low"


def _of_workflows(alias: str) -> str:
    return f"(CAST(:workflows AS text[]) IS NULL OR {alias}.workflow = ANY(CAST(:workflows AS text[])))"


def _between(column: str) -> str:
    return (
        f"(CAST(:since AS timestamptz) IS NULL OR {column} >= :since) "
        f"AND (CAST(:until AS timestamptz) IS NULL OR {column} < :until)"
    )


def _window_end(table: str, condition: str = "") -> str:
    return (
        f"SELECT id FROM pipeline.{table} WHERE {_in_range('id')}{condition} "
        "ORDER BY id DESC OFFSET CAST(:window AS bigint) - 1 LIMIT 1"
    )


# Events

_EVENT_FILTER = f"""
    {_in_range("e.id")} AND {_of_workflows("e")} AND {_between("e.created_at")}
    AND (CAST(:topic AS text) IS NULL OR e.topic = :topic)
    AND (CAST(:key AS text) IS NULL OR e.key = :key)
"""
#: Counted instead of asked for with EXISTS, which the planner may answer by reading every delivery there is.
_HAS_STATUS = """(CAST(:status AS text) IS NULL OR (
    SELECT count(*) FROM pipeline.deliveries d WHERE d.event_id = e.id AND d.status = :status) > 0)"""
_EVENTS = Statement[ListedEventRow](f"""
SELECT e.*, s.deliveries FROM (
  SELECT {EVENT_COLUMNS} FROM pipeline.events e WHERE {_EVENT_FILTER} AND {_HAS_STATUS}
  ORDER BY e.id DESC LIMIT :limit
) e {JOIN_DELIVERIES} ORDER BY e.id DESC
""")
_EVENTS_END = Statement[NumberIdRow](_window_end("events"))
_EVENTS_BY_MESSAGE = Statement[ListedEventRow](f"""
SELECT e.*, s.deliveries FROM (
  SELECT {EVENT_COLUMNS} FROM pipeline.topics t JOIN pipeline.events e
    ON e.workflow = t.workflow AND e.topic = t.name AND e.message_id = :message_id
  WHERE {_EVENT_FILTER} AND {_HAS_STATUS} ORDER BY e.id DESC LIMIT :limit
) e {JOIN_DELIVERIES} ORDER BY e.id DESC
""")
_OPEN_STATUSES: tuple[str, ...] = (DeliveryStatus.PENDING, DeliveryStatus.RESERVED, DeliveryStatus.QUARANTINED)


def _open_deliveries(status: str) -> str:
    """Return the SQL of the deliveries of one status of handler ``h``."""
    return f"""SELECT d.event_id FROM pipeline.deliveries d
    WHERE {is_of_handler("h.id")} AND d.status = '{status}' AND {_in_range("d.event_id")}"""


#: Of deliveries of one handler. Only an index on what is open has this order.
_NEWEST_FIRST = "d.handler_id DESC, d.event_id DESC"


#: A delivery has the topic and the key of its event.
_OPEN_EVENTS = {
    status: Statement[ListedEventRow](f"""
SELECT {EVENT_COLUMNS}, s.deliveries FROM (
  SELECT DISTINCT d.event_id FROM pipeline.handlers h CROSS JOIN LATERAL (
    {_open_deliveries(status)}
      AND (CAST(:topic AS text) IS NULL OR d.topic = :topic) AND (CAST(:key AS text) IS NULL OR d.key = :key)
      AND ((CAST(:since AS timestamptz) IS NULL AND CAST(:until AS timestamptz) IS NULL)
        OR (SELECT {_between("e.created_at")} FROM pipeline.events e WHERE e.id = d.event_id))
    ORDER BY {_NEWEST_FIRST} LIMIT :limit
  ) d WHERE {_of_workflows("h")} ORDER BY d.event_id DESC LIMIT :limit
) d {join_by_id("events", "e", "d.event_id")} {JOIN_DELIVERIES} ORDER BY e.id DESC
""")
    for status in _OPEN_STATUSES
}
#: Each handler has a window of its own. The search is complete down to the one that ends first.
_OPEN_EVENTS_END = {
    status: Statement[NumberIdRow](f"""
SELECT d.event_id AS id FROM pipeline.handlers h CROSS JOIN LATERAL (
  {_open_deliveries(status)} ORDER BY {_NEWEST_FIRST} OFFSET CAST(:window AS bigint) - 1 LIMIT 1
) d WHERE {_of_workflows("h")} ORDER BY d.event_id DESC LIMIT 1
""")
    for status in _OPEN_STATUSES
}

#: Ids are in the order of time, so the first one from an instant on is found by halving.
_FIRST_AT = {
    table: Statement[FoundIdRow](f"""
WITH RECURSIVE step(low, high) AS (
  SELECT (SELECT id FROM pipeline.{table} ORDER BY id LIMIT 1),
         (SELECT id FROM pipeline.{table} ORDER BY id DESC LIMIT 1) + 1
  UNION ALL
  SELECT CASE WHEN m.at < CAST(:moment AS timestamptz) THEN least(m.id + 1, s.high) ELSE s.low END,
         CASE WHEN m.at < CAST(:moment AS timestamptz) THEN s.high ELSE (s.low + s.high) / 2 END
  FROM step s CROSS JOIN LATERAL (
    SELECT e.id, e.{column} AS at FROM pipeline.{table} e WHERE e.id >= (s.low + s.high) / 2 ORDER BY e.id LIMIT 1
  ) m WHERE s.low < s.high
)
SELECT max(low) AS id FROM step
""")
    for table, column in (("events", "created_at"), ("audit", "at"))
}

# Runs

_RUN_FILTER = f"""
    {_in_range("r.id")} AND {_of_workflows("r")} AND {_between("r.created_at")}
    AND (CAST(:handler AS text) IS NULL OR h.name = :handler)
    AND (CAST(:status AS text) IS NULL OR r.status = :status)
    AND (CAST(:phase AS text) IS NULL OR r.phase = :phase)
    AND (CAST(:session_id AS uuid) IS NULL OR r.session_id = :session_id)
"""
_JOIN_HANDLER = "JOIN pipeline.handlers h ON h.id = r.handler_id"
_RUNS = Statement[ListedRunRow](f"""
SELECT {RUN_COLUMNS} FROM pipeline.runs r {_JOIN_HANDLER} WHERE {_RUN_FILTER} ORDER BY r.id DESC LIMIT :limit
""")
_RUNS_END = Statement[UuidRow](_window_end("runs"))
#: Open runs are few: their number is that of a workflow's concurrency, and of its pending approvals.
_ACTIVE_RUNS = Statement[ListedRunRow](f"""
SELECT {RUN_COLUMNS} FROM pipeline.workflows w CROSS JOIN LATERAL (
  SELECT * FROM pipeline.runs r WHERE r.workflow = w.name AND r.finished_at IS NULL LIMIT :window
) r {_JOIN_HANDLER} WHERE {_RUN_FILTER} ORDER BY r.id DESC LIMIT :limit
""")
#: A run that stopped and is not over waits for a retry or for approval. An index finds each.
_WAITING_RUNS = Statement[ListedRunRow](f"""
SELECT {RUN_COLUMNS} FROM pipeline.workflows w CROSS JOIN LATERAL (
  (SELECT * FROM pipeline.runs r WHERE r.workflow = w.name AND r.retry_pending AND {_in_range("r.id")}
   ORDER BY r.id DESC LIMIT :window)
  UNION ALL
  (SELECT * FROM pipeline.runs r WHERE r.workflow = w.name AND r.finished_at IS NULL
    AND r.status = '{RunStatus.PAUSED_APPROVAL}' LIMIT :window)
) r {_JOIN_HANDLER} WHERE {_RUN_FILTER} ORDER BY r.id DESC LIMIT :limit
""")

# The ledger

_MUTATION_FILTER = f"""
    {_in_range("m.id")} AND {_between("m.created_at")}
    AND (CAST(:statuses AS text[]) IS NULL OR m.status = ANY(CAST(:statuses AS text[])))
    AND (CAST(:connector AS text) IS NULL OR m.connector = :connector)
    AND (CAST(:operation AS text) IS NULL OR m.operation = :operation)
    AND (CAST(:resolved_by AS text) IS NULL OR m.resolved_by = :resolved_by)
    AND (CAST(:older_than AS interval) IS NULL OR m.created_at < pipeline.clock() - CAST(:older_than AS interval))
    AND (CAST(:error_type AS text) IS NULL
      OR :error_type = (SELECT r.error_type FROM pipeline.runs r WHERE r.id = m.run_id))
"""
_LEDGER_COLUMNS = """
  m.*, r.status AS run_status, r.phase AS run_phase, r.event_ids, h.name AS handler, r.error_type,
  m.quiet_until > pipeline.clock() AS is_quiet
"""
_JOIN_RUN = f"{join_by_id('runs', 'r', 'm.run_id')} JOIN pipeline.handlers h ON h.id = r.handler_id"
_MUTATIONS = Statement[LedgerPageRow](f"""
SELECT {_LEDGER_COLUMNS} FROM (
  SELECT m.* FROM pipeline.mutations m WHERE {_MUTATION_FILTER} AND {_of_workflows("m")} ORDER BY m.id DESC LIMIT :limit
) m {_JOIN_RUN} ORDER BY m.id DESC
""")
_MUTATIONS_END = Statement[UuidRow](_window_end("mutations"))
_IS_OPEN_OF_WORKFLOW = f"m.workflow = w.name AND m.status IN {OPEN_MUTATION}"
_OPEN_MUTATIONS = Statement[LedgerPageRow](f"""
SELECT {_LEDGER_COLUMNS} FROM (
  SELECT m.* FROM pipeline.workflows w CROSS JOIN LATERAL (
    SELECT * FROM pipeline.mutations m WHERE {_IS_OPEN_OF_WORKFLOW} AND {_MUTATION_FILTER}
    ORDER BY m.id DESC LIMIT :limit
  ) m WHERE {_of_workflows("m")} ORDER BY m.id DESC LIMIT :limit
) m {_JOIN_RUN} ORDER BY m.id DESC
""")
#: Each workflow has a window of its own, as handlers have in the list of open events.
_OPEN_MUTATIONS_END = Statement[UuidRow](f"""
SELECT m.id FROM pipeline.workflows w CROSS JOIN LATERAL (
  SELECT m.id FROM pipeline.mutations m WHERE {_IS_OPEN_OF_WORKFLOW} AND {_in_range("m.id")}
  ORDER BY m.id DESC OFFSET CAST(:window AS bigint) - 1 LIMIT 1
) m WHERE CAST(:workflows AS text[]) IS NULL OR w.name = ANY(CAST(:workflows AS text[])) ORDER BY m.id DESC LIMIT 1
""")
_OPEN_MUTATION_STATUSES = frozenset(
    {MutationStatus.PENDING, MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE}
)

# Sessions, the audit and the quarantine

_SESSIONS = Statement[SessionCostRow](f"""
SELECT s.*, (SELECT sum(r.cost) FROM (
  SELECT r.cost FROM pipeline.runs r WHERE r.session_id = s.id LIMIT :cost_rows) r) AS runs_cost
FROM (
  SELECT s.* FROM pipeline.sessions s
  WHERE {_in_range("s.id")} AND {_of_workflows("s")} AND {_between("s.started_at")}
    AND (CAST(:result AS text) IS NULL OR s.result = :result)
    AND (CAST(:is_open AS boolean) IS NULL OR (s.finished_at IS NULL) = :is_open)
  ORDER BY s.id DESC LIMIT :limit
) s ORDER BY s.id DESC
""")
_SESSIONS_END = Statement[UuidRow](_window_end("sessions"))

_AUDIT_FILTER = f"""
    {_in_range("a.id")} AND {_of_workflows("a")} AND {_between("a.at")}
    AND (CAST(:actor AS text) IS NULL OR a.actor = :actor)
    AND (CAST(:act AS text) IS NULL OR a.act = :act)
"""
#: By the subject whose index finds the acts; without one, they are searched by id.
_AUDIT_SUBJECTS: Mapping[str, str] = {
    name: f" AND {name} = :subject" for name in ("mutation_id", "run_id", "event_id", "workflow")
} | {"": ""}
_AUDIT = {
    name: Statement[AuditRow](
        f"SELECT a.* FROM pipeline.audit a WHERE {_AUDIT_FILTER}{subject} ORDER BY a.id DESC LIMIT :limit"
    )
    for name, subject in _AUDIT_SUBJECTS.items()
}
_AUDIT_END = {name: Statement[NumberIdRow](_window_end("audit", subject)) for name, subject in _AUDIT_SUBJECTS.items()}

_QUARANTINE = Statement[QuarantinedEventRow](f"""
SELECT {EVENT_COLUMNS}, d.handler_id, d.handler, d.retired, d.failures, d.failing_since, d.error FROM (
  SELECT d.*, h.name AS handler, h.retired FROM pipeline.handlers h CROSS JOIN LATERAL (
    SELECT d.* FROM pipeline.deliveries d
    WHERE d.handler_id = h.id AND d.status = '{DeliveryStatus.QUARANTINED}' AND d.event_id <= :before
      AND (d.event_id, d.handler_id) < (:before, :before_handler)
    ORDER BY d.event_id DESC LIMIT :limit
  ) d WHERE {_of_workflows("h")} AND (CAST(:handler AS text) IS NULL OR h.name = :handler)
  ORDER BY d.event_id DESC, d.handler_id DESC LIMIT :limit
) d {join_by_id("events", "e", "d.event_id")} ORDER BY d.event_id DESC, d.handler_id DESC
""")


def first_at(tx: Transaction, table: str, moment: datetime) -> int:
    """Return the id from which on rows of ``events`` or ``audit`` may be of this instant or later."""
    return tx.one(_FIRST_AT[table], moment=moment - LONGEST_TRANSACTION).id or FIRST_NUMBER


def first_after(tx: Transaction, table: str, moment: datetime) -> int:
    """Return the id from which on rows of ``events`` or ``audit`` are later than this instant."""
    return tx.one(_FIRST_AT[table], moment=moment + LONGEST_TRANSACTION).id or LAST_NUMBER


def events(
    tx: Transaction, part: PageRange[int], *, message_id: str | None, status: str | None, **only: Any
) -> RowPage[ListedEventRow, int]:
    """Events; ``only`` names workflows, topic, key, since and until."""
    only |= {"message_id": message_id, "status": status}
    if message_id is not None:
        return _rows(tx, _EVENTS_BY_MESSAGE, part, None, only)
    if status in _OPEN_EVENTS:
        return _rows(tx, _OPEN_EVENTS[status], part, _end(tx, _OPEN_EVENTS_END[status], part, only), only)
    return _rows(tx, _EVENTS, part, _end(tx, _EVENTS_END, part, only), only)


def runs(
    tx: Transaction, part: PageRange[UUID], *, is_waiting: bool, status: str | None, **only: Any
) -> RowPage[ListedRunRow, UUID]:
    """Runs; ``only`` names workflows, handler, phase, session_id, since and until.

    ``is_waiting``: only runs that stopped and wait for something.
    """
    only |= {"status": status, "window": part.window}
    if is_waiting:
        return _rows(tx, _WAITING_RUNS, part, None, only)
    if status == RunStatus.ACTIVE:
        return _rows(tx, _ACTIVE_RUNS, part, None, only)
    return _rows(tx, _RUNS, part, _end(tx, _RUNS_END, part, only), only)


def mutations(
    tx: Transaction, part: PageRange[UUID], *, statuses: Sequence[str], **only: Any
) -> RowPage[LedgerPageRow, UUID]:
    """Rows of the ledger; ``only`` names every other parameter of the filter. No status means all."""
    only |= {"statuses": list(statuses) or None}
    if statuses and _OPEN_MUTATION_STATUSES.issuperset(statuses):
        return _rows(tx, _OPEN_MUTATIONS, part, _end(tx, _OPEN_MUTATIONS_END, part, only), only)
    return _rows(tx, _MUTATIONS, part, _end(tx, _MUTATIONS_END, part, only), only)


def sessions(tx: Transaction, part: PageRange[UUID], **only: Any) -> RowPage[SessionCostRow, UUID]:
    """Sessions; ``only`` names workflows, result, is_open, since and until."""
    return _rows(tx, _SESSIONS, part, _end(tx, _SESSIONS_END, part, only), {**only, "cost_rows": _MAX_COST_ROWS})


def audit(tx: Transaction, part: PageRange[int], *, subject: tuple[str, Any], **only: Any) -> RowPage[AuditRow, int]:
    """Acts of operators and sweeps; ``only`` names workflows, actor, act, since and until.

    ``subject`` is a column and its value: mutation_id, run_id, event_id or workflow. An empty name does not restrict.
    """
    name, value = subject
    only |= {"subject": value}
    return _rows(tx, _AUDIT[name], part, _end(tx, _AUDIT_END[name], part, only), only)


def quarantine(
    tx: Transaction,
    before: tuple[int, int],
    *,
    limit: int,
    workflows: Sequence[str] | None,
    handler: str | None,
) -> Sequence[QuarantinedEventRow]:
    """Quarantined events before an event and a handler, once for each consumer, newest first."""
    event, before_handler = before
    given = {"workflows": workflows, "handler": handler, "limit": limit}
    return tx.all(_QUARANTINE, before=event, before_handler=before_handler, **given)


def _end(
    tx: Transaction, statement: Statement[Any], part: PageRange[PositionT], only: Mapping[str, Any]
) -> PositionT | None:
    """Return the last id of the window; None if the window reaches the end of the list."""
    row = tx.first(statement, **{**only, "before": part.before, "low": part.low, "window": part.window})
    return None if row is None else row.id


def _rows(
    tx: Transaction,
    statement: Statement[RowT],
    part: PageRange[PositionT],
    end: PositionT | None,
    only: Mapping[str, Any],
) -> RowPage[RowT, PositionT]:
    """Read the rows of a page down to the end of its window."""
    low = part.low if end is None else end
    rows = tx.all(statement, **{**only, "before": part.before, "low": low, "limit": part.limit + 1})
    if len(rows) <= part.limit:
        return RowPage(rows, end)
    shown = rows[: part.limit]
    last: Any = shown[-1]
    return RowPage(shown, last.id)
