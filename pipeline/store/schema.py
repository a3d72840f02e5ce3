"""Tables of the pipeline schema."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP
from sqlalchemy.types import UserDefinedType

from pipeline.domain.states import DeliveryStatus, MutationOutcome, MutationStatus, Phase, Resolver, RunStatus
from pipeline.domain.workflows import (
    AfterFailedMutation,
    BlockKind,
    DesiredStatus,
    HandlerKind,
    OnLogicError,
    OnUncertain,
    SessionResult,
)
from pipeline.store.predicates import (
    MUTATION_MAY_HAVE_HAPPENED,
    OPEN_DELIVERY,
    OPEN_MUTATION,
    RESOLVED_MUTATION,
    UNOWNED_DELIVERY,
    sql_list,
)

SCHEMA = "pipeline"

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={
        "pk": "%(table_name)s_pk",
        "fk": "%(table_name)s_%(column_0_name)s_fk",
        "uq": "%(table_name)s_%(column_0_N_name)s_once",
        "ck": "%(table_name)s_%(constraint_name)s",
    },
)


def enum_check(column: str, members: type[StrEnum]) -> CheckConstraint:
    """The column holds a member of the enum and nothing else."""
    return CheckConstraint(f"{column} IN ({_quoted(members)})", name=f"{column}_known")


def _quoted(members: Iterable[StrEnum]) -> str:
    return ", ".join(f"'{member.value}'" for member in members)


def check(name: str, rule: str) -> CheckConstraint:
    """A sentence that must be true of every row."""
    return CheckConstraint(rule, name=name)


def timestamp_column(name: str, **kwargs: Any) -> Column[Any]:
    """A point in time, with its zone."""
    return Column(name, TIMESTAMP(timezone=True), **kwargs)


def insert_time_column(name: str) -> Column[Any]:
    """The time at which the row came into being."""
    return timestamp_column(name, nullable=False, server_default=text("pipeline.clock()"))


def text_column(name: str, default: str | None = None, **kwargs: Any) -> Column[Any]:
    """Text that is always there."""
    server_default = None if default is None else text(f"'{default}'")
    return Column(name, Text, nullable=False, server_default=server_default, **kwargs)


class _PostgresType(UserDefinedType[Any]):
    """A type Postgres has and SQLAlchemy does not; values travel as text."""

    cache_ok = True
    name = ""

    def get_col_spec(self, **_: Any) -> str:
        return self.name


class Xid8(_PostgresType):
    """A transaction id that never wraps."""

    name = "xid8"


class PgSnapshot(_PostgresType):
    """Which transactions were visible at one instant."""

    name = "pg_snapshot"


workflows = Table(
    "workflows",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, nullable=False, server_default=text("1")),
    text_column("fingerprint", ""),
    Column("known_fingerprints", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    text_column("desired", DesiredStatus.ACTIVE),
    Column("maintenance", Boolean, nullable=False, server_default=text("false")),
    Column("maintenance_reason", Text),
    timestamp_column("maintenance_since"),
    Column("concurrency", Integer, nullable=False, server_default=text("1")),
    text_column("on_uncertain", OnUncertain.PAUSE),
    text_column("on_logic_error", OnLogicError.MAINTENANCE),
    Column("keep_done", Interval),
    Column("keep_ledger", Interval),
    Column("archives", Boolean, nullable=False, server_default=text("false")),
    insert_time_column("created_at"),
    enum_check("desired", DesiredStatus),
    enum_check("on_uncertain", OnUncertain),
    enum_check("on_logic_error", OnLogicError),
    check("concurrency_positive", "concurrency >= 1"),
    check("maintenance_has_since", "maintenance = (maintenance_since IS NOT NULL)"),
    check("ledger_outlives_done", "(keep_ledger IS NOT NULL) <= coalesce(keep_ledger >= keep_done, false)"),
)

topics = Table(
    "topics",
    metadata,
    text_column("workflow"),
    text_column("name"),
    Column("schema", JSONB),
    PrimaryKeyConstraint("workflow", "name"),
)

handlers = Table(
    "handlers",
    metadata,
    Column("id", Integer, Identity(always=True), primary_key=True),
    Column("workflow", Text, ForeignKey(workflows.c.name), nullable=False),
    text_column("name"),
    text_column("kind"),
    Column("batch", Integer, nullable=False, server_default=text("1")),
    Column("ordered", Boolean, nullable=False, server_default=text("false")),
    text_column("after_failed_mutation", AfterFailedMutation.PREPARE),
    Column("failure_policy", JSONB, nullable=False, server_default=text("'{}'")),
    Column("retired", Boolean, nullable=False, server_default=text("false")),
    Column("state", JSONB),
    timestamp_column("wake_at"),
    Column("schedule", Text),
    timestamp_column("next_run_at"),
    timestamp_column("retry_at"),
    timestamp_column("unclaimed_since"),
    Column("consecutive_failures", Integer, nullable=False, server_default=text("0")),
    Column("idle_snapshot", PgSnapshot),
    timestamp_column("idle_at"),
    Column("low_watermark", BigInteger, nullable=False, server_default=text("0")),
    Column("horizon", BigInteger),
    Column("horizon_xmax", Xid8),
    UniqueConstraint("workflow", "name"),
    enum_check("kind", HandlerKind),
    enum_check("after_failed_mutation", AfterFailedMutation),
    check("batch_positive", "batch >= 1"),
    check("horizon_complete", "(horizon IS NULL) = (horizon_xmax IS NULL)"),
)

subscriptions = Table(
    "subscriptions",
    metadata,
    text_column("workflow"),
    text_column("topic"),
    Column("handler_id", Integer, ForeignKey(handlers.c.id), nullable=False),
    PrimaryKeyConstraint("workflow", "topic", "handler_id"),
)

events = Table(
    "events",
    metadata,
    Column("id", BigInteger, primary_key=True, server_default=text("pipeline.next_event_id()")),
    text_column("workflow"),
    text_column("topic"),
    text_column("message_id"),
    Column("key", Text),
    Column("title", Text),
    Column("payload", JSONB, nullable=False),
    Column("caused_by", ARRAY(BigInteger), nullable=False, server_default=text("'{}'")),
    Column("created_by_run_id", Uuid),
    Column("traceparent", Text),
    insert_time_column("created_at"),
    UniqueConstraint("workflow", "topic", "message_id"),
    Index("events_created_by", "created_by_run_id", postgresql_where=text("created_by_run_id IS NOT NULL")),
)

_PENDING = f"status = '{DeliveryStatus.PENDING}'"
#: The few rows that can hold an ordered key back. Statements that search for one repeat this clause.
_HELD_KEY = (
    f"key IS NOT NULL AND status IN {OPEN_DELIVERY} "
    f"AND (status = '{DeliveryStatus.RESERVED}' OR offered_to IS NOT NULL OR available_at IS NOT NULL)"
)
_RESERVED = f"status = '{DeliveryStatus.RESERVED}'"

deliveries = Table(
    "deliveries",
    metadata,
    Column("event_id", BigInteger, nullable=False),
    Column("handler_id", Integer, nullable=False),
    text_column("status", DeliveryStatus.PENDING),
    Column("run_id", Uuid),
    Column("offered_to", Uuid),
    Column("key", Text),
    timestamp_column("available_at"),
    Column("failures", SmallInteger, nullable=False, server_default=text("0")),
    Column("declined", Boolean, nullable=False, server_default=text("false")),
    Column("suspect", Boolean, nullable=False, server_default=text("false")),
    Column("error", Text),
    Column("xid", Xid8, nullable=False, server_default=text("pg_current_xact_id()")),
    PrimaryKeyConstraint("event_id", "handler_id"),
    enum_check("status", DeliveryStatus),
    check(
        "reserved_has_owner",
        f"(status IN ('{DeliveryStatus.RESERVED}', '{DeliveryStatus.CONSUMED}')) <= (run_id IS NOT NULL)",
    ),
    check("open_has_no_owner", f"(status IN {UNOWNED_DELIVERY}) <= (run_id IS NULL)"),
    check("only_pending_is_offered", f"(offered_to IS NOT NULL) <= ({_PENDING})"),
    Index("deliveries_pending", "handler_id", "event_id", postgresql_where=text(_PENDING)),
    Index("deliveries_unseen", "handler_id", "xid", postgresql_where=text(_PENDING)),
    Index("deliveries_reserved", "handler_id", "event_id", postgresql_where=text(_RESERVED)),
    Index("deliveries_declined", "handler_id", "event_id", postgresql_where=text(f"{_PENDING} AND declined")),
    Index(
        "deliveries_delayed",
        "handler_id",
        "available_at",
        postgresql_where=text(f"{_PENDING} AND available_at IS NOT NULL"),
    ),
    Index(
        "deliveries_failed",
        "handler_id",
        postgresql_where=text(f"failures > 0 AND status IN {OPEN_DELIVERY}"),
    ),
    Index("deliveries_held_keys", "handler_id", "key", "event_id", postgresql_where=text(_HELD_KEY)),
    Index(
        "deliveries_quarantined",
        "handler_id",
        "event_id",
        postgresql_where=text(f"status = '{DeliveryStatus.QUARANTINED}'"),
    ),
    postgresql_with={"fillfactor": "70"},
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Uuid, primary_key=True, server_default=text("pipeline.uuid7()")),
    Column("workflow", Text, ForeignKey(workflows.c.name), nullable=False),
    insert_time_column("started_at"),
    timestamp_column("finished_at"),
    Column("result", Text),
    Column("error", Text),
    Column("run_count", Integer),
    Column("cost", Numeric),
    enum_check("result", SessionResult),
    check("finished_has_result", "(finished_at IS NULL) = (result IS NULL)"),
    Index(
        "sessions_one_open",
        "workflow",
        unique=True,
        postgresql_where=text("finished_at IS NULL"),
    ),
)

runs = Table(
    "runs",
    metadata,
    Column("id", Uuid, primary_key=True, server_default=text("pipeline.uuid7()")),
    text_column("workflow"),
    Column("handler_id", Integer, nullable=False),
    Column("session_id", Uuid, nullable=False),
    text_column("phase", Phase.PENDING),
    text_column("status", RunStatus.ACTIVE),
    text_column("mutation_outcome", MutationOutcome.NONE),
    Column("mutation_id", Uuid),
    Column("offered", ARRAY(BigInteger)),
    Column("event_ids", ARRAY(BigInteger), nullable=False, server_default=text("'{}'")),
    Column("prepare_result", JSONB),
    Column("output_state", JSONB),
    Column("error", Text),
    Column("error_type", Text),
    Column("retry_of", Uuid),
    Column("retry_pending", Boolean, nullable=False, server_default=text("false")),
    timestamp_column("retry_at"),
    Column("attempt", Integer, nullable=False, server_default=text("1")),
    Column("fence", BigInteger, nullable=False, server_default=text("0")),
    timestamp_column("lease_expires_at"),
    Column("worker", Text),
    timestamp_column("dispatched_at"),
    Column("snapshot", PgSnapshot),
    Column("traceparent", Text),
    Column("cost", Numeric),
    insert_time_column("created_at"),
    timestamp_column("started_at"),
    timestamp_column("finished_at"),
    enum_check("phase", Phase),
    enum_check("status", RunStatus),
    enum_check("mutation_outcome", MutationOutcome),
    check("committed_together", f"(phase = '{Phase.COMMITTED}') = (status = '{RunStatus.COMMITTED}')"),
    check(
        "finished_unless_moving",
        f"(finished_at IS NULL) = (status = '{RunStatus.ACTIVE}' "
        f"OR (status = '{RunStatus.PAUSED_APPROVAL}' AND phase = '{Phase.MUTATING}'))",
    ),
    check(
        "outcome_when_mutated",
        f"(mutation_outcome <> '{MutationOutcome.NONE}') "
        f"<= (phase IN {sql_list(Phase.MUTATED, Phase.EMITTING, Phase.COMMITTED)})",
    ),
    check(
        "failed_mutation_ends",
        f"(mutation_outcome = '{MutationOutcome.FAILURE}') <= (phase NOT IN ('{Phase.EMITTING}', '{Phase.COMMITTED}'))",
    ),
    check("only_active_is_leased", f"(lease_expires_at IS NOT NULL) <= (status = '{RunStatus.ACTIVE}')"),
    check(
        "only_stopped_is_retried",
        f"retry_pending <= (finished_at IS NOT NULL AND status <> '{RunStatus.COMMITTED}')",
    ),
    Index("runs_open", "workflow", "handler_id", postgresql_where=text("finished_at IS NULL")),
    Index("runs_retry_pending", "workflow", "id", postgresql_where=text("retry_pending")),
    Index("runs_session", "session_id"),
    Index("runs_retry_once", "retry_of", unique=True, postgresql_where=text("retry_of IS NOT NULL")),
    postgresql_with={"fillfactor": "60"},
)

mutations = Table(
    "mutations",
    metadata,
    Column("id", Uuid, primary_key=True, server_default=text("pipeline.uuid7()")),
    Column("run_id", Uuid, ForeignKey(runs.c.id), nullable=False),
    text_column("workflow"),
    text_column("connector"),
    text_column("operation"),
    Column("params", JSONB, nullable=False),
    text_column("request_hash"),
    text_column("idempotency_key"),
    text_column("status"),
    Column("reconcilable", Boolean, nullable=False),
    Column("settle", Interval, nullable=False),
    Column("timeout", Interval, nullable=False),
    Column("result", JSONB),
    Column("error", Text),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("approved_by", Text),
    timestamp_column("approved_at"),
    timestamp_column("sent_at"),
    timestamp_column("send_deadline"),
    timestamp_column("quiet_until"),
    Column("reconcile_attempts", Integer, nullable=False, server_default=text("0")),
    timestamp_column("next_reconcile_at"),
    Column("resolved_by", Text),
    timestamp_column("resolved_at"),
    insert_time_column("created_at"),
    timestamp_column("doubted_at"),
    timestamp_column("reconcile_deferred_since"),
    Column("monitor_after", Interval),
    timestamp_column("next_monitor_at"),
    Column("monitor_attempts", SmallInteger, nullable=False, server_default=text("0")),
    timestamp_column("found_late_at"),
    Column("late_result", JSONB),
    Column("acknowledged_by", Text),
    UniqueConstraint("run_id"),
    enum_check("status", MutationStatus),
    enum_check("resolved_by", Resolver),
    check("resolved_has_resolver", f"(status IN {RESOLVED_MUTATION}) = (resolved_by IS NOT NULL)"),
    check("resolver_has_time", "(resolved_by IS NULL) = (resolved_at IS NULL)"),
    check("reconcile_has_time", f"(status = '{MutationStatus.NEEDS_RECONCILE}') = (next_reconcile_at IS NOT NULL)"),
    check("only_reconcilable_is_reconciled", f"(status = '{MutationStatus.NEEDS_RECONCILE}') <= reconcilable"),
    check(
        "only_failed_is_monitored",
        f"(next_monitor_at IS NOT NULL) <= (status = '{MutationStatus.FAILED}' AND reconcilable)",
    ),
    check("only_found_late_is_acknowledged", "(acknowledged_by IS NOT NULL) <= (found_late_at IS NOT NULL)"),
    check("only_failed_is_found_late", f"(found_late_at IS NOT NULL) <= (status = '{MutationStatus.FAILED}')"),
    check("sent_has_deadline", "(sent_at IS NULL) = (send_deadline IS NULL)"),
    check("sent_has_quiet_period", "(sent_at IS NULL) = (quiet_until IS NULL)"),
    check(
        "unresolved_was_sent",
        f"(status IN {MUTATION_MAY_HAVE_HAPPENED}) <= (sent_at IS NOT NULL)",
    ),
    Index(
        "mutations_reconcile_due",
        "next_reconcile_at",
        postgresql_where=text(f"status = '{MutationStatus.NEEDS_RECONCILE}'"),
    ),
    Index(
        "mutations_open",
        "workflow",
        "id",
        postgresql_where=text(f"status IN {OPEN_MUTATION}"),
    ),
    Index("mutations_key", "idempotency_key"),
    Index("mutations_approved", "approved_at", postgresql_where=text("approved_at IS NOT NULL")),
    Index("mutations_monitor_due", "next_monitor_at", postgresql_where=text("next_monitor_at IS NOT NULL")),
    Index("mutations_found_late", "id", postgresql_where=text("found_late_at IS NOT NULL")),
)

blocks = Table(
    "blocks",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("workflow", Text, ForeignKey(workflows.c.name), nullable=False),
    Column("run_id", Uuid, ForeignKey(runs.c.id), nullable=False),
    text_column("kind"),
    text_column("reason"),
    insert_time_column("since"),
    timestamp_column("closed_at"),
    enum_check("kind", BlockKind),
    Index("blocks_open", "run_id", "kind", unique=True, postgresql_where=text("closed_at IS NULL")),
    Index("blocks_run", "run_id"),
    Index("blocks_open_of_workflow", "workflow", postgresql_where=text("closed_at IS NULL")),
)

audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    insert_time_column("at"),
    text_column("actor"),
    text_column("act"),
    Column("workflow", Text),
    Column("run_id", Uuid),
    Column("mutation_id", Uuid),
    Column("event_id", BigInteger),
    text_column("reason", ""),
    Column("evidence", JSONB),
    Index("audit_mutation", "mutation_id", postgresql_where=text("mutation_id IS NOT NULL")),
    Index("audit_run", "run_id", postgresql_where=text("run_id IS NOT NULL")),
    Index("audit_event", "event_id", postgresql_where=text("event_id IS NOT NULL")),
)

maintenance_tasks = Table(
    "maintenance_tasks",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("workflow", Text, ForeignKey(workflows.c.name), nullable=False),
    text_column("reason"),
    insert_time_column("opened_at"),
    timestamp_column("closed_at"),
    Index("maintenance_tasks_one_open", "workflow", unique=True, postgresql_where=text("closed_at IS NULL")),
)


sweeps = Table(
    "sweeps",
    metadata,
    Column("name", Text, primary_key=True),
    insert_time_column("last_run_at"),
    Column("report", JSONB),
)

notices = Table(
    "notices",
    metadata,
    text_column("kind"),
    text_column("subject"),
    insert_time_column("delivered_at"),
    PrimaryKeyConstraint("kind", "subject"),
)

#: While it is not closed, no new mutation of the operation is started, but for a probe now and then.
breakers = Table(
    "breakers",
    metadata,
    text_column("connector"),
    text_column("operation"),
    text_column("reason"),
    Column("opened_by", Text),
    insert_time_column("opened_at"),
    Column("probe_every", Interval, nullable=False),
    timestamp_column("probe_at"),
    timestamp_column("closed_at"),
    PrimaryKeyConstraint("connector", "operation"),
)

#: Where the cleaning of a table goes on.
cursors = Table(
    "cursors",
    metadata,
    Column("name", Text, primary_key=True),
    text_column("position"),
)

#: What workflows no longer keep and do not want dropped. Nothing reads it: copy it elsewhere and empty it at will.
archive = Table(
    "archive",
    metadata,
    text_column("kind"),
    text_column("id"),
    Column("workflow", Text),
    insert_time_column("archived_at"),
    Column("content", JSONB, nullable=False),
    PrimaryKeyConstraint("kind", "id"),
)
