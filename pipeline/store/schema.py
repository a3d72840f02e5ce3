"""Tables of the pipeline schema, each with the type of its rows.

A row type declares the columns of its table. The annotation says name, type and null of a column; ``column`` says what
an annotation cannot. ``table`` builds the table from the row type. Statements name the same type for the rows that they
return, so a column is declared once.

A row type describes rows as SQLAlchemy returns them; no row is an instance of one. A column that holds a member of an
enum is plain text at run time: it compares equal to members (``==``), and is never identical (``is``). The annotation
names the enum. The table checks the values against it, and so do the tests.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP
from sqlalchemy.types import UserDefinedType

from pipeline.domain.access import LoginSource, Role
from pipeline.domain.acts import BulkAct, ProposedAct
from pipeline.domain.renames import NameKind
from pipeline.domain.states import (
    DeliveryStatus,
    EventId,
    Fence,
    MutationId,
    MutationOutcome,
    MutationStatus,
    Phase,
    Resolver,
    RunId,
    RunStatus,
    SessionId,
)
from pipeline.domain.workflows import (
    AfterFailedMutation,
    BlockKind,
    DesiredStatus,
    HandlerKind,
    OnExhausted,
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

metadata = sa.MetaData(
    schema=SCHEMA,
    naming_convention={
        "pk": "%(table_name)s_pk",
        "fk": "%(table_name)s_%(column_0_name)s_fk",
        "uq": "%(table_name)s_%(column_0_N_name)s_once",
        "ck": "%(table_name)s_%(constraint_name)s",
    },
)

PhaseText = Annotated[str, Phase]
RunStatusText = Annotated[str, RunStatus]
MutationOutcomeText = Annotated[str, MutationOutcome]
MutationStatusText = Annotated[str, MutationStatus]
ResolverText = Annotated[str, Resolver]
DeliveryStatusText = Annotated[str, DeliveryStatus]
DesiredStatusText = Annotated[str, DesiredStatus]
NameKindText = Annotated[str, NameKind]
HandlerKindText = Annotated[str, HandlerKind]
BlockKindText = Annotated[str, BlockKind]
SessionResultText = Annotated[str, SessionResult]
AfterFailedMutationText = Annotated[str, AfterFailedMutation]
OnUncertainText = Annotated[str, OnUncertain]
OnLogicErrorText = Annotated[str, OnLogicError]
OnExhaustedText = Annotated[str, OnExhausted]
BulkActText = Annotated[str, BulkAct]
ProposedActText = Annotated[str, ProposedAct]
RoleText = Annotated[str, Role]
LoginSourceText = Annotated[str, LoginSource]

NOW = "pipeline.clock()"  #: default of a column with the time at which its row was inserted
NEW_ID = "pipeline.uuid7()"
_SQL_TYPES: Mapping[Any, Any] = {
    str: sa.Text,
    bool: sa.Boolean,
    int: sa.Integer,
    EventId: sa.BigInteger,
    Fence: sa.BigInteger,
    RunId: sa.Uuid,
    MutationId: sa.Uuid,
    SessionId: sa.Uuid,
    UUID: sa.Uuid,
    Decimal: sa.Numeric,
    datetime: TIMESTAMP(timezone=True),
    timedelta: sa.Interval,
    list[str]: sa.ARRAY(sa.Text),
    list[int]: sa.ARRAY(sa.Integer),
    list[EventId]: sa.ARRAY(sa.BigInteger),
    Any: JSONB,
}


def column(*items: Any, default: str | None = None, **options: Any) -> Any:
    """Declare what the annotation of a column cannot say: a default, a reference, a key, another SQL type.

    ``default`` is SQL or a member of an enum. JSON may be null unless ``nullable`` says no.
    """
    if default is not None:
        options["server_default"] = sa.text(f"'{default}'" if isinstance(default, StrEnum) else default)
    return items, options


def table(name: str, row_type: type, *items: Any, fillfactor: int | None = None) -> sa.Table:
    """Build a table from its row type: a column for each attribute, and a check for each column of an enum.

    ``fillfactor`` leaves room in each page for new versions of its rows.
    """
    parts: list[Any] = []
    for attribute, hint in get_type_hints(row_type, include_extras=True).items():
        is_optional = type(None) in get_args(hint)
        inner = get_args(hint)[0] if is_optional else hint
        python_type, *enums = get_args(inner) if get_origin(inner) is Annotated else (inner,)
        declared_items, declared = vars(row_type).get(attribute, column())
        found = {"type_": _SQL_TYPES[python_type], "nullable": is_optional or python_type is Any, **declared}
        parts.append(sa.Column(attribute, *declared_items, **found))
        parts.extend(check(f"{attribute}_known", f"{attribute} IN {sql_list(*enum)}") for enum in enums)
    built = sa.Table(name, metadata, *parts, *items)
    if fillfactor is not None:  # SQLAlchemy 2.0 has no option for it
        change: Any = sa.DDL(f"ALTER TABLE {built} SET (fillfactor = {fillfactor})")  # type: ignore[no-untyped-call]
        sa.event.listen(built, "after_create", change)
    return built


def check(name: str, rule: str) -> sa.CheckConstraint:
    """A sentence that must be true of every row."""
    return sa.CheckConstraint(rule, name=name)


def index(name: str, *columns: str, where: str | None = None, unique: bool = False) -> sa.Index:
    """An index on the rows of which ``where`` is true."""
    return sa.Index(name, *columns, unique=unique, postgresql_where=None if where is None else sa.text(where))


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


class WorkflowRow(Protocol):
    """A row of ``workflows``."""

    name: str = column(primary_key=True)
    version: int = column(default="1")
    fingerprint: str = column(default="''")
    known_fingerprints: list[str] = column(default="'{}'")
    desired: DesiredStatusText = column(default=DesiredStatus.ACTIVE)
    maintenance: bool = column(default="false")
    maintenance_reason: str | None
    maintenance_since: datetime | None
    concurrency: int = column(default="1")
    on_uncertain: OnUncertainText = column(default=OnUncertain.PAUSE)
    on_logic_error: OnLogicErrorText = column(default=OnLogicError.MAINTENANCE)
    on_exhausted: OnExhaustedText = column(default=OnExhausted.BLOCK)
    keep_done: timedelta | None
    keep_ledger: timedelta | None
    archives: bool = column(default="false")
    codec_secret: Any  #: of an encrypted workflow, sealed: keys the hashes of its requests
    turns: list[int] = column(default="'{}'")
    created_at: datetime = column(default=NOW)


workflows = table(
    "workflows",
    WorkflowRow,
    check("concurrency_positive", "concurrency >= 1"),
    check("maintenance_has_since", "maintenance = (maintenance_since IS NOT NULL)"),
    check("ledger_outlives_done", "(keep_ledger IS NOT NULL) <= coalesce(keep_ledger >= keep_done, false)"),
    index("workflows_maintenance", "name", where="maintenance"),
)


#: What a publisher must know of a topic: its schema, and the uid to which it must bind sealed payloads.
_SCHEMA_DIGEST = "coalesce(md5(schema::text), '') || CASE WHEN is_encrypted THEN ' ' || uid::text ELSE '' END"


class TopicRow(Protocol):
    """A row of ``topics``."""

    workflow: str
    name: str
    uid: UUID = column(default=NEW_ID)  #: a part of idempotency keys, which a rename keeps
    schema: Any
    is_encrypted: bool = column(default="false")  #: its payloads are sealed by a codec
    schema_digest: str = column(sa.Computed(_SCHEMA_DIGEST, persisted=True))
    retired: bool = column(default="false")  #: the newest code declares it no more


topics = table(
    "topics",
    TopicRow,
    sa.PrimaryKeyConstraint("workflow", "name"),
)


class RenameRow(Protocol):
    """A row of ``renames``."""

    kind: NameKindText
    workflow: str  #: of a topic or a handler; empty for the name of a workflow itself
    former: str
    name: str
    renamed_at: datetime = column(default=NOW)


renames = table(
    "renames",
    RenameRow,
    sa.PrimaryKeyConstraint("kind", "workflow", "former"),
)


class HandlerRow(Protocol):
    """A row of ``handlers``."""

    id: int = column(sa.Identity(always=True), primary_key=True)
    uid: UUID = column(default=NEW_ID)
    workflow: str = column(sa.ForeignKey(workflows.c.name))
    name: str
    kind: HandlerKindText
    batch: int = column(default="1")
    ordered: bool = column(default="false")
    after_failed_mutation: AfterFailedMutationText = column(default=AfterFailedMutation.PREPARE)
    failure_policy: Any = column(nullable=False, default="'{}'")
    publishes: list[str] = column(default="'{}'")  #: the topics to which its code may publish
    retired: bool = column(default="false")
    state: Any
    wake_at: datetime | None
    schedule: str | None
    next_run_at: datetime | None
    retry_at: datetime | None
    unclaimed_since: datetime | None
    consecutive_failures: int = column(default="0")
    failing_since: datetime | None
    failing_events: list[EventId] | None
    idle_snapshot: str | None = column(type_=PgSnapshot)
    idle_at: datetime | None
    low_watermark: int = column(type_=sa.BigInteger, default="0")
    horizon: int | None = column(type_=sa.BigInteger)
    horizon_xmax: str | None = column(type_=Xid8)


handlers = table(
    "handlers",
    HandlerRow,
    sa.UniqueConstraint("workflow", "name"),
    check("batch_positive", "batch >= 1"),
    check("horizon_complete", "(horizon IS NULL) = (horizon_xmax IS NULL)"),
    index("handlers_slot", "next_run_at", where="next_run_at IS NOT NULL"),
    index("handlers_wake", "wake_at", where="wake_at IS NOT NULL"),
)


class SubscriptionRow(Protocol):
    """A row of ``subscriptions``."""

    workflow: str
    topic: str
    handler_id: int = column(sa.ForeignKey(handlers.c.id))
    backfill_until: EventId | None  #: earlier events up to this one are still being delivered; None: all are
    backfill_after: str = column(default="''")  #: message id of the last one that was


subscriptions = table(
    "subscriptions",
    SubscriptionRow,
    sa.PrimaryKeyConstraint("workflow", "topic", "handler_id"),
    index("subscriptions_backfill", "workflow", "topic", "handler_id", where="backfill_until IS NOT NULL"),
)


class EventRow(Protocol):
    """A row of ``events``."""

    id: EventId = column(primary_key=True, default="pipeline.next_event_id()")
    workflow: str
    topic: str
    message_id: str
    key: str | None
    title: str | None
    payload: Any = column(nullable=False)
    caused_by: list[EventId] = column(default="'{}'")
    created_by_run_id: RunId | None
    traceparent: str | None
    created_at: datetime = column(default=NOW)


events = table(
    "events",
    EventRow,
    sa.UniqueConstraint("workflow", "topic", "message_id"),
    index("events_created_by", "created_by_run_id", where="created_by_run_id IS NOT NULL"),
)


_PENDING = f"status = '{DeliveryStatus.PENDING}'"
#: The few rows that can hold an ordered key back. Statements that search for one repeat this clause.
_HELD_KEY = (
    f"key IS NOT NULL AND status IN {OPEN_DELIVERY} "
    f"AND (status = '{DeliveryStatus.RESERVED}' OR key_offered OR available_at IS NOT NULL)"
)
_RESERVED = f"status = '{DeliveryStatus.RESERVED}'"


class DeliveryRow(Protocol):
    """A row of ``deliveries``."""

    event_id: EventId
    handler_id: int
    topic: str
    status: DeliveryStatusText = column(default=DeliveryStatus.PENDING)
    run_id: RunId | None
    offered_to: RunId | None  #: no index names it, so that offering an event without a key writes none (a HOT update)
    key: str | None
    key_offered: bool = column(sa.Computed("key IS NOT NULL AND offered_to IS NOT NULL", persisted=True))
    available_at: datetime | None
    failures: int = column(type_=sa.SmallInteger, default="0")
    declined: bool = column(default="false")
    suspect: bool = column(default="false")
    slice_limit: int | None  #: it is being narrowed down, in slices of at most this size
    #: One of so many inputs of a request that may be repeated under its key. They are offered together, without others,
    #: and are never narrowed down.
    group_size: int | None
    narrowing_declined: bool = column(
        default="false"
    )  #: prepare declined the smaller slice: offered in whole ones again
    failing_since: datetime | None
    error: str | None
    xid: str = column(type_=Xid8, default="pg_current_xact_id()")


deliveries = table(
    "deliveries",
    DeliveryRow,
    sa.PrimaryKeyConstraint("event_id", "handler_id"),
    check(
        "reserved_has_owner",
        f"(status IN ('{DeliveryStatus.RESERVED}', '{DeliveryStatus.CONSUMED}')) <= (run_id IS NOT NULL)",
    ),
    check("open_has_no_owner", f"(status IN {UNOWNED_DELIVERY}) <= (run_id IS NULL)"),
    check("only_pending_is_offered", f"(offered_to IS NOT NULL) <= ({_PENDING})"),
    check("slice_limit_positive", "slice_limit >= 1"),
    check("group_has_several", "group_size >= 2"),
    check("sliced_in_one_way", "num_nonnulls(slice_limit, group_size) + narrowing_declined::integer <= 1"),
    index("deliveries_pending", "handler_id", "event_id", where=_PENDING),
    index("deliveries_pending_of_topic", "handler_id", "topic", "event_id", where=_PENDING),
    index("deliveries_unseen", "handler_id", "xid", where=_PENDING),
    index("deliveries_reserved", "handler_id", "event_id", where=_RESERVED),
    index("deliveries_declined", "handler_id", "declined", "event_id", where=f"{_PENDING} AND declined"),
    index("deliveries_delayed", "handler_id", "available_at", where=f"{_PENDING} AND available_at IS NOT NULL"),
    index("deliveries_failed", "handler_id", where=f"failing_since IS NOT NULL AND status IN {OPEN_DELIVERY}"),
    index("deliveries_held_keys", "handler_id", "key", "event_id", where=_HELD_KEY),
    index("deliveries_quarantined", "handler_id", "event_id", where=f"status = '{DeliveryStatus.QUARANTINED}'"),
    fillfactor=50,
)


class SessionRow(Protocol):
    """A row of ``sessions``."""

    id: SessionId = column(primary_key=True, default=NEW_ID)
    workflow: str = column(sa.ForeignKey(workflows.c.name))
    started_at: datetime = column(default=NOW)
    finished_at: datetime | None
    result: SessionResultText | None
    error: str | None
    run_count: int | None
    cost: Decimal | None


sessions = table(
    "sessions",
    SessionRow,
    check("finished_has_result", "(finished_at IS NULL) = (result IS NULL)"),
    index("sessions_one_open", "workflow", unique=True, where="finished_at IS NULL"),
)


class RunRow(Protocol):
    """A row of ``runs``."""

    id: RunId = column(primary_key=True, default=NEW_ID)
    workflow: str
    handler_id: int
    session_id: SessionId
    phase: PhaseText = column(default=Phase.PENDING)
    status: RunStatusText = column(default=RunStatus.ACTIVE)
    mutation_outcome: MutationOutcomeText = column(default=MutationOutcome.NONE)
    mutation_id: MutationId | None
    offered: list[EventId] | None
    event_ids: list[EventId] = column(default="'{}'")
    prepare_result: Any
    output_state: Any
    error: str | None
    error_type: str | None
    error_frames: str | None
    retry_of: RunId | None
    retry_pending: bool = column(default="false")
    retry_at: datetime | None
    attempt: int = column(default="1")
    fence: Fence = column(default="0")
    lease_expires_at: datetime | None
    lease_duration: timedelta | None  #: how far in the future the lease can end when it is written
    worker: str | None
    dispatched_at: datetime | None
    snapshot: str | None = column(type_=PgSnapshot)
    traceparent: str | None
    cost: Decimal | None
    created_at: datetime = column(default=NOW)
    started_at: datetime | None
    finished_at: datetime | None


runs = table(
    "runs",
    RunRow,
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
    check("cost_is_not_negative", "cost >= 0"),
    index("runs_open", "workflow", "handler_id", where="finished_at IS NULL"),
    index("runs_retry_pending", "workflow", "id", where="retry_pending"),
    index("runs_session", "session_id"),
    index("runs_retry_once", "retry_of", unique=True, where="retry_of IS NOT NULL"),
    fillfactor=60,
)


class MutationRow(Protocol):
    """A row of ``mutations``."""

    id: MutationId = column(primary_key=True, default=NEW_ID)
    run_id: RunId = column(sa.ForeignKey(runs.c.id))
    workflow: str
    connector: str
    operation: str
    params: Any = column(nullable=False)
    request_hash: str
    effect_id: UUID
    idempotency_key: str
    status: MutationStatusText
    reconcilable: bool
    keyed: bool = column(default="false")
    key_lifetime: timedelta | None
    key_expires_at: datetime | None
    refused: bool = column(default="false")
    settle: timedelta
    timeout: timedelta
    result: Any
    error: str | None
    attempts: int = column(default="0")
    approved_by: str | None
    approved_at: datetime | None
    sent_at: datetime | None
    send_deadline: datetime | None
    quiet_until: datetime | None
    reconcile_attempts: int = column(default="0")
    next_reconcile_at: datetime | None
    resolved_by: ResolverText | None
    resolved_at: datetime | None
    created_at: datetime = column(default=NOW)
    doubted_at: datetime | None
    reconcile_deferred_since: datetime | None
    monitor_after: timedelta | None
    next_monitor_at: datetime | None
    monitor_attempts: int = column(type_=sa.SmallInteger, default="0")
    found_late_at: datetime | None
    late_result: Any
    acknowledged_by: str | None
    headline: str = column(default="''")  #: one redacted line that says what it does
    message_ids: list[str] = column(default="'{}'")  #: of its inputs, the first ones
    message_count: int = column(default="0")
    four_eyes_value: Decimal | None  #: two people must decide about it, because of this value


mutations = table(
    "mutations",
    MutationRow,
    sa.UniqueConstraint("run_id"),
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
    check("only_failed_is_refused", f"refused <= (status = '{MutationStatus.FAILED}' AND sent_at IS NOT NULL)"),
    check("only_keyed_has_lifetime", "(key_lifetime IS NOT NULL) <= keyed"),
    check("sent_has_deadline", "(sent_at IS NULL) = (send_deadline IS NULL)"),
    check("sent_has_quiet_period", "(sent_at IS NULL) = (quiet_until IS NULL)"),
    check(
        "unresolved_was_sent",
        f"(status IN {MUTATION_MAY_HAVE_HAPPENED}) <= (sent_at IS NOT NULL)",
    ),
    index("mutations_reconcile_due", "next_reconcile_at", where=f"status = '{MutationStatus.NEEDS_RECONCILE}'"),
    index("mutations_open", "workflow", "id", where=f"status IN {OPEN_MUTATION}"),
    index("mutations_key", "idempotency_key"),
    index("mutations_failed_effect", "effect_id", where=f"status = '{MutationStatus.FAILED}'"),
    index("mutations_approved", "approved_at", where="approved_at IS NOT NULL"),
    index("mutations_monitor_due", "next_monitor_at", where="next_monitor_at IS NOT NULL"),
    index("mutations_found_late", "id", where="found_late_at IS NOT NULL"),
)


class BlockRow(Protocol):
    """A row of ``blocks``."""

    id: int = column(sa.Identity(always=True), type_=sa.BigInteger, primary_key=True)
    workflow: str = column(sa.ForeignKey(workflows.c.name))
    run_id: RunId = column(sa.ForeignKey(runs.c.id))
    kind: BlockKindText
    reason: str
    since: datetime = column(default=NOW)
    closed_at: datetime | None


blocks = table(
    "blocks",
    BlockRow,
    index("blocks_open", "run_id", "kind", unique=True, where="closed_at IS NULL"),
    index("blocks_run", "run_id"),
    index("blocks_open_of_workflow", "workflow", where="closed_at IS NULL"),
)


class AuditRow(Protocol):
    """A row of ``audit``."""

    id: int = column(sa.Identity(always=True), type_=sa.BigInteger, primary_key=True)
    at: datetime = column(default=NOW)
    actor: str
    act: str
    claimed: bool = column(default="false")  #: the actor named itself; no login, token or proxy did
    workflow: str | None
    run_id: RunId | None
    mutation_id: MutationId | None
    event_id: EventId | None
    reason: str = column(default="''")
    evidence: Any


audit = table(
    "audit",
    AuditRow,
    index("audit_mutation", "mutation_id", where="mutation_id IS NOT NULL"),
    index("audit_run", "run_id", where="run_id IS NOT NULL"),
    index("audit_event", "event_id", where="event_id IS NOT NULL"),
    index("audit_workflow", "workflow", "id", where="workflow IS NOT NULL"),
    index("audit_prunes", "id", where="act = 'audit.prune'"),
)


class AuditLinkRow(Protocol):
    """A row of ``audit_links``."""

    audit_id: int = column(type_=sa.BigInteger, primary_key=True, autoincrement=False)
    position: int | None = column(type_=sa.BigInteger)  #: in the chain; null: the act waits to be chained
    row_hash: str | None  #: of the act
    hash: str | None  #: of this link, the one before included
    chained_at: datetime | None


#: A chain of hashes over the acts, in the order of their links. A link stays when retention deletes its act.
audit_links = table(
    "audit_links",
    AuditLinkRow,
    check("chained_or_waits", "num_nonnulls(position, row_hash, hash, chained_at) IN (0, 4)"),
    index("audit_links_chain", "position", unique=True, where="position IS NOT NULL"),
    index("audit_links_waiting", "audit_id", where="position IS NULL"),
)


class MaintenanceTaskRow(Protocol):
    """A row of ``maintenance_tasks``."""

    id: int = column(sa.Identity(always=True), type_=sa.BigInteger, primary_key=True)
    workflow: str = column(sa.ForeignKey(workflows.c.name))
    reason: str
    opened_at: datetime = column(default=NOW)
    closed_at: datetime | None


maintenance_tasks = table(
    "maintenance_tasks",
    MaintenanceTaskRow,
    index("maintenance_tasks_one_open", "workflow", unique=True, where="closed_at IS NULL"),
)


class SweepRow(Protocol):
    """A row of ``sweeps``."""

    name: str = column(primary_key=True)
    last_run_at: datetime = column(default=NOW)
    report: Any


sweeps = table(
    "sweeps",
    SweepRow,
)


#: One row for each worker that runs, written by its main process. A worker that stops in order deletes its row.


class WorkerRow(Protocol):
    """A row of ``workers``."""

    name: str = column(primary_key=True)  #: its Celery name and process id
    host: str
    pid: int
    pool: str
    concurrency: int
    queues: list[str]
    workflows: Any = column(nullable=False)  #: versions by name
    code_version: str
    package_version: str
    started_at: datetime = column(default=NOW)
    seen_at: datetime = column(default=NOW)


workers = table(
    "workers",
    WorkerRow,
)


#: What happened in workflows since the sample before, and how they stand. One in which nothing happened has no row.


class SampleRow(Protocol):
    """A row of ``samples``."""

    workflow: str
    at: datetime = column(default=NOW)
    span: timedelta  #: since the sample before
    published: int  #: events
    committed: int  #: runs
    stopped: int  #: runs that ended without a commit
    mutated: int  #: runs that ended and had a mutation
    uncertain: int  #: of these, runs that left its outcome unknown
    backlog: int  #: events that no run holds
    oldest_at: datetime | None  #: when the oldest of these was published
    unresolved: int  #: mutations whose outcome is unknown


samples = table(
    "samples",
    SampleRow,
    sa.PrimaryKeyConstraint("workflow", "at"),
    index("samples_at", "at"),
)


class DeliveredNoticeRow(Protocol):
    """A row of ``notices``."""

    kind: str
    subject: str
    delivered_at: datetime = column(default=NOW)


notices = table(
    "notices",
    DeliveredNoticeRow,
    sa.PrimaryKeyConstraint("kind", "subject"),
)


#: While it is not closed, no new mutation of the operation is started, but for a probe now and then.


class BreakerRow(Protocol):
    """A row of ``breakers``."""

    connector: str
    operation: str
    reason: str
    opened_by: str | None
    opened_at: datetime = column(default=NOW)
    probe_every: timedelta
    probe_at: datetime | None
    closed_at: datetime | None


breakers = table(
    "breakers",
    BreakerRow,
    sa.PrimaryKeyConstraint("connector", "operation"),
)


#: What workers declare about operations, so that every process can show and resolve their mutations.


class OperationRow(Protocol):
    """A row of ``operations``."""

    connector: str
    operation: str
    is_mutation: bool
    params_schema: Any
    result_schema: Any
    redact: list[str]
    shown: list[str]
    shows: str
    look_up: str
    keyed: bool
    key_lifetime: timedelta | None
    can_reconcile: bool
    can_fetch: bool
    timeout: timedelta
    settle: timedelta
    value: str
    four_eyes_above: Decimal | None
    registered_at: datetime = column(default=NOW)


operations = table(
    "operations",
    OperationRow,
    sa.PrimaryKeyConstraint("connector", "operation"),
)


#: Where the cleaning of a table goes on.


class CursorPositionRow(Protocol):
    """A row of ``cursors``."""

    name: str = column(primary_key=True)
    position: str


cursors = table(
    "cursors",
    CursorPositionRow,
)


#: What workflows no longer keep and do not want dropped. Nothing reads it: copy it elsewhere and empty it at will.


class ArchivedRow(Protocol):
    """A row of ``archive``."""

    kind: str
    id: str
    workflow: str | None
    archived_at: datetime = column(default=NOW)
    content: Any = column(nullable=False)


archive = table(
    "archive",
    ArchivedRow,
    sa.PrimaryKeyConstraint("kind", "id"),
)


class BulkPreviewRow(Protocol):
    """A row of ``bulk_previews``."""

    id: UUID = column(primary_key=True, default=NEW_ID)
    act: BulkActText
    created_by: str
    created_at: datetime = column(default=NOW)
    expires_at: datetime
    workflows: list[str]  #: of its items; a caller needs the right to all of them
    request: Any = column(nullable=False)
    items: Any = column(nullable=False)  #: the exact items, each with its state
    item_count: int
    left_out: Any = column(nullable=False, default="'{}'")  #: how many are not in it, by reason
    reason: str = column(default="''")
    committed_by: str | None
    committed_at: datetime | None
    progress_at: datetime | None  #: when its commit last reported
    done_count: int = column(default="0")
    updated: Any = column(nullable=False, default="'[]'")
    refused: Any = column(nullable=False, default="'{}'")  #: before the commit: what would be refused, and why
    finished_at: datetime | None
    discarded_at: datetime | None


#: A frozen preview of an act on many mutations or events, and what became of it.
bulk_previews = table(
    "bulk_previews",
    BulkPreviewRow,
    check("committed_by_name", "(committed_at IS NULL) = (committed_by IS NULL)"),
    check("finished_was_committed", "(finished_at IS NOT NULL) <= (committed_at IS NOT NULL)"),
    check("committed_or_discarded", "num_nonnulls(committed_at, discarded_at) <= 1"),
    check("done_within_items", "done_count BETWEEN 0 AND item_count"),
    index("bulk_previews_created", "created_at"),
)


class ApiRequestRow(Protocol):
    """A row of ``api_requests``."""

    caller: str
    key: str
    request_hash: str
    begun_at: datetime = column(default=NOW)
    status: int | None  #: of the HTTP answer; null while the request runs
    answer: Any  #: its body and headers


#: Answers to requests of the HTTP API that carried an Idempotency-Key.
api_requests = table(
    "api_requests",
    ApiRequestRow,
    sa.PrimaryKeyConstraint("caller", "key"),
    index("api_requests_begun", "begun_at"),
)


class SavedViewRow(Protocol):
    """A row of ``saved_views``."""

    owner: str
    name: str
    page: str
    query: str  #: the query string of the page
    saved_at: datetime = column(default=NOW)


#: Filters that an operator named, to open a page with them again.
saved_views = table(
    "saved_views",
    SavedViewRow,
    sa.PrimaryKeyConstraint("owner", "name"),
)


class AccessTokenRow(Protocol):
    """A row of ``access_tokens``."""

    id: UUID = column(default=NEW_ID, primary_key=True)
    secret_hash: str = column(unique=True)
    hint: str
    name: str
    role: RoleText
    can_see_payloads: bool
    workflows: list[str] | None
    created_by: str
    created_at: datetime = column(default=NOW)
    expires_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None


access_tokens = table(
    "access_tokens",
    AccessTokenRow,
    check("revoker_of_revoked", "(revoked_at IS NULL) = (revoked_by IS NULL)"),
)


#: A one-time link is a login that is not open yet.


class LoginRow(Protocol):
    """A row of ``logins``."""

    id: UUID = column(default=NEW_ID, primary_key=True)
    secret_hash: str = column(unique=True)
    source: LoginSourceText
    token_id: UUID | None = column(sa.ForeignKey(access_tokens.c.id))
    name: str
    role: RoleText
    can_see_payloads: bool
    workflows: list[str] | None
    created_at: datetime = column(default=NOW)
    opened_at: datetime | None
    seen_at: datetime | None
    expires_at: datetime


logins = table(
    "logins",
    LoginRow,
    check("seen_if_open", "(opened_at IS NULL) = (seen_at IS NULL)"),
    check("token_of_source", f"(token_id IS NOT NULL) = (source = '{LoginSource.TOKEN}')"),
    index("logins_by_expiry", "expires_at"),
)


class ProposalRow(Protocol):
    """A row of ``proposals``."""

    id: UUID = column(primary_key=True, default=NEW_ID)
    mutation_id: MutationId
    act: ProposedActText
    answer: Any = column(nullable=False)  #: what exactly was answered
    state: str  #: of the mutation when it was proposed; it counts in this state only
    proposed_by: str
    reason: str
    proposed_at: datetime = column(default=NOW)
    confirmed_by: str | None
    closed_at: datetime | None  #: confirmed, or replaced by another proposal


#: Answers about mutations of a high value, each of which another person must confirm.
proposals = table(
    "proposals",
    ProposalRow,
    check("confirmed_is_closed", "(confirmed_by IS NOT NULL) <= (closed_at IS NOT NULL)"),
    check("confirmed_by_another", "confirmed_by <> proposed_by"),
    index("proposals_open", "mutation_id", unique=True, where="closed_at IS NULL"),
)
