"""Show workflows to an operator: status, reason, handlers, their backlog, and the graph of topics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from pipeline.admin import advice, lookup
from pipeline.admin.advice import WorkflowHolds, describe_breakers
from pipeline.admin.system import Release, releases_of
from pipeline.domain.workflows import CLEARED_BY_RESUME, BlockKind, DesiredStatus, HandlerKind, workflow_status
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import ledger, listings, work
from pipeline.store.rows import CapacityRow, ListedHandlerRow
from pipeline.store.schema import AuditRow, BlockRow, BreakerRow, TopicRow, WorkflowRow

_Cause = tuple[str, datetime | None]  #: why nothing starts, and since when


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSummary:
    """A handler and its backlog."""

    name: str
    kind: str
    subscribes: tuple[str, ...]
    waiting: int  #: events that no run holds, counted up to 10,000
    reserved: int  #: events that a run holds
    quarantined: int  #: quarantined events
    active_runs: int
    oldest_at: datetime | None  #: when the oldest open event was published
    failures: int  #: consecutive failures of its runs
    retry_at: datetime | None
    next_run_at: datetime | None  #: of a producer
    wake_at: datetime | None
    is_retired: bool  #: no longer in the code


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSummary:
    """A workflow in one line."""

    name: str
    status: str  #: active, paused or error
    reason: str  #: why it starts no runs; else empty
    since: datetime | None
    is_in_maintenance: bool
    concurrency: int
    active_runs: int
    waiting: int  #: events that no run holds, counted up to 10,000 for each handler
    quarantined: int
    oldest_at: datetime | None  #: when the oldest open event was published
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSummary:
    """A topic and its consumers."""

    name: str
    has_schema: bool
    consumers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One reason for which the system starts no runs of a workflow."""

    kind: str
    reason: str
    since: datetime
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One act of an operator or a sweep, with the reason."""

    at: datetime
    actor: str
    act: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowDetail:
    """Everything about one workflow."""

    workflow: WorkflowSummary
    desired: str  #: as the operator chose: active or paused
    on_uncertain: str
    on_logic_error: str
    on_exhausted: str
    maintenance_reason: str | None
    maintenance_since: datetime | None
    handlers: tuple[HandlerSummary, ...]
    topics: tuple[TopicSummary, ...]
    releases: tuple[Release, ...]  #: which versions of its code workers run now, the newest first
    blocks: tuple[Block, ...]
    acts: tuple[AuditEntry, ...]  #: the newest ones first


def list_workflows(db: Database) -> list[WorkflowSummary]:
    """List every workflow, by name."""
    with db.transaction() as tx:
        return _summaries(tx, None)


def detail(db: Database, name: str) -> WorkflowDetail:
    """Return one workflow with its handlers, topics, blocks and newest acts."""
    with db.transaction() as tx:
        lookup.require_workflow(tx, name)
        (workflow,) = _summaries(tx, name)
        (row,) = listings.workflows(tx, name)
        handlers = tuple(_handler_summary(each) for each in listings.handlers(tx, name))
        topics = work.topics(tx, name)
        blocks = listings.blocks(tx, name)
        acts = listings.audit_of_workflow(tx, name)
        releases = releases_of(tx, name)
    return WorkflowDetail(
        workflow=workflow,
        desired=row.desired,
        on_uncertain=row.on_uncertain,
        on_logic_error=row.on_logic_error,
        on_exhausted=row.on_exhausted,
        maintenance_reason=row.maintenance_reason,
        maintenance_since=row.maintenance_since,
        handlers=handlers,
        topics=tuple(_topic_summary(each, handlers) for each in topics),
        releases=releases,
        blocks=tuple(
            Block(kind=each.kind, reason=each.reason, since=each.since, run_id=str(each.run_id)) for each in blocks
        ),
        acts=tuple(audit_entry(each) for each in acts),
    )


def require(db: Database, name: str) -> None:
    """Raise if there is no such workflow."""
    with db.transaction() as tx:
        lookup.require_workflow(tx, name)


def topic_schema(db: Database, workflow: str, topic: str) -> Any:
    """Return the JSON Schema of a topic's payloads; None: the topic takes any."""
    with db.transaction() as tx:
        lookup.require_topic(tx, workflow, topic)
        return next(row.schema for row in work.topics(tx, workflow) if row.name == topic)


def workflow_holds(tx: Transaction, name: str) -> WorkflowHolds:
    """Return what keeps the runs of a workflow from starting, and approved requests from being sent."""
    (row,) = listings.workflows(tx, name)
    blocks = listings.blocks(tx, name)
    lifts = [advice.resume_command(name)] if row.desired == DesiredStatus.PAUSED or _is_lifted_by_resume(blocks) else []
    lifts += [advice.exit_maintenance_command(name)] if row.maintenance else []
    return WorkflowHolds(
        reason="; ".join(text for text, _ in _hold_causes(tx, row, blocks)),
        commands=tuple(lifts) or (advice.show_workflow_command(name),),
        open_breakers=tuple(ledger.open_breakers(tx)),
        is_serial=row.concurrency == 1,
    )


def _is_lifted_by_resume(blocks: Sequence[BlockRow]) -> bool:
    return bool(blocks) and all(block.kind in CLEARED_BY_RESUME for block in blocks)


def audit_entry(row: AuditRow) -> AuditEntry:
    """Convert a row of the audit."""
    return AuditEntry(at=row.at, actor=row.actor, act=row.act, reason=row.reason)


def _summaries(tx: Transaction, name: str | None) -> list[WorkflowSummary]:
    handlers: dict[str, list[ListedHandlerRow]] = {}
    for handler in listings.handlers(tx, name):
        handlers.setdefault(handler.workflow, []).append(handler)
    blocks: dict[str, list[BlockRow]] = {}
    for block in listings.blocks(tx, name):
        blocks.setdefault(block.workflow, []).append(block)
    places, breakers = {row.workflow: row for row in listings.capacity_holders(tx, name)}, ledger.open_breakers(tx)
    listed = []
    for row in listings.workflows(tx, name):
        its_blocks = blocks.get(row.name, [])
        causes = [*_hold_causes(tx, row, its_blocks), *_capacity_causes(row, places[row.name], breakers)]
        listed.append(_workflow_summary(row, handlers.get(row.name, []), its_blocks, causes))
    return listed


def _workflow_summary(
    row: WorkflowRow, handlers: Sequence[ListedHandlerRow], blocks: Sequence[BlockRow], causes: Sequence[_Cause]
) -> WorkflowSummary:
    return WorkflowSummary(
        name=row.name,
        status=workflow_status(DesiredStatus(row.desired), [BlockKind(block.kind) for block in blocks]),
        reason="; ".join(text for text, _ in causes),
        since=min((since for _, since in causes if since is not None), default=None),
        is_in_maintenance=row.maintenance,
        concurrency=row.concurrency,
        active_runs=sum(handler.active_runs for handler in handlers),
        waiting=sum(handler.waiting for handler in handlers),
        quarantined=sum(handler.quarantined for handler in handlers),
        oldest_at=min((handler.oldest_at for handler in handlers if handler.oldest_at), default=None),
        version=row.version,
    )


def _hold_causes(tx: Transaction, row: WorkflowRow, blocks: Sequence[BlockRow]) -> list[_Cause]:
    """Return pause, maintenance and blocks of a workflow, each with its instant."""
    causes: list[_Cause] = []
    if row.desired == DesiredStatus.PAUSED:
        acts = listings.audit_of_workflow(tx, row.name, limit=100)
        pause = next((act for act in acts if act.act == "workflow.pause"), None)
        text = f"paused by {pause.actor}" + (f": {pause.reason}" if pause.reason else "") if pause else "paused"
        causes.append((text, pause.at if pause else None))
    if row.maintenance:
        causes.append((f"maintenance: {row.maintenance_reason}", row.maintenance_since))
    if blocks:
        more = f" (and {len(blocks) - 1} more)" if len(blocks) > 1 else ""
        causes.append((f"{blocks[0].kind}: {blocks[0].reason}{more}", blocks[0].since))
    return causes


def _capacity_causes(row: WorkflowRow, places: CapacityRow, breakers: Sequence[BreakerRow]) -> list[_Cause]:
    """Return which waiting runs use the whole concurrency of a workflow, so that no other starts."""
    if row.concurrency == 1 and places.approval_run_id is not None:
        return [
            (f"run {places.approval_run_id} waits for approval and uses the concurrency of 1", places.approval_since)
        ]
    if breakers and places.unsent >= row.concurrency:
        who = (
            f"{places.unsent} runs use the whole concurrency and wait"
            if places.unsent > 1
            else "1 run uses the concurrency of 1 and waits"
        )
        since = min(breaker.opened_at for breaker in breakers)
        return [(f"{who} to send; open breakers: {describe_breakers(breakers)}", since)]
    return []


def _handler_summary(row: ListedHandlerRow) -> HandlerSummary:
    return HandlerSummary(
        name=row.name,
        kind=row.kind,
        subscribes=tuple(row.subscribes),
        waiting=row.waiting,
        reserved=row.reserved,
        quarantined=row.quarantined,
        active_runs=row.active_runs,
        oldest_at=row.oldest_at,
        failures=row.consecutive_failures,
        retry_at=row.retry_at,
        next_run_at=row.next_run_at if row.kind == HandlerKind.PRODUCER else None,
        wake_at=row.wake_at,
        is_retired=row.retired,
    )


def _topic_summary(row: TopicRow, handlers: Sequence[HandlerSummary]) -> TopicSummary:
    consumers = tuple(handler.name for handler in handlers if row.name in handler.subscribes)
    return TopicSummary(name=row.name, has_schema=row.schema is not None, consumers=consumers)


#: Rows of the ledger that are searched for calls.
_RECENT_MUTATIONS = 10_000


class NodeKind(StrEnum):
    """What a node of the graph is."""

    TOPIC = "topic"
    CONSUMER = "consumer"
    PRODUCER = "producer"
    OPERATION = "operation"


class EdgeKind(StrEnum):
    """What leads from one node to another."""

    SUBSCRIBES = "subscribes"  #: from a topic to a consumer
    PUBLISHES = "publishes"  #: from a handler to a topic
    CALLS = "calls"  #: from a handler to an operation, as the ledger shows


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A topic, a handler or an operation."""

    id: str  #: unique in the graph
    kind: NodeKind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """A way that events or calls take."""

    source: str  #: id of a node
    target: str
    kind: EdgeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicGraph:
    """The nodes of a workflow and the edges between them. What is no longer in the code is missing."""

    workflow: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]


def topic_graph(db: Database, workflow: str) -> TopicGraph:
    """Return the graph of a workflow: what its code declares, and which operations its newest mutations called."""
    with db.transaction() as tx:
        lookup.require_workflow(tx, workflow)
        topics = [row.name for row in work.topics(tx, workflow) if not row.retired]
        handlers = [row for row in listings.handlers(tx, workflow, limit=1) if not row.retired]
        calls = listings.called_operations(tx, workflow, recent=_RECENT_MUTATIONS)
    names = {row.name for row in handlers}
    calls = [row for row in calls if row.handler in names]

    def edges() -> Iterator[GraphEdge]:
        for row in handlers:
            for topic in row.subscribes:
                yield GraphEdge(source=_topic(topic), target=_handler(row.name), kind=EdgeKind.SUBSCRIBES)
            for topic in row.publishes:
                yield GraphEdge(source=_handler(row.name), target=_topic(topic), kind=EdgeKind.PUBLISHES)
        for call in calls:
            operation = _operation(f"{call.connector}.{call.operation}")
            yield GraphEdge(source=_handler(call.handler), target=operation, kind=EdgeKind.CALLS)

    operations = sorted({f"{call.connector}.{call.operation}" for call in calls})
    return TopicGraph(
        workflow=workflow,
        nodes=(
            *(GraphNode(id=_topic(name), kind=NodeKind.TOPIC, name=name) for name in topics),
            *(GraphNode(id=_handler(row.name), kind=NodeKind(row.kind), name=row.name) for row in handlers),
            *(GraphNode(id=_operation(name), kind=NodeKind.OPERATION, name=name) for name in operations),
        ),
        edges=tuple(edges()),
    )


def _topic(name: str) -> str:
    return f"topic:{name}"


def _handler(name: str) -> str:
    return f"handler:{name}"


def _operation(name: str) -> str:
    return f"operation:{name}"
