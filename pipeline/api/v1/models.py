"""What the endpoints under /v1 take and answer. These shapes are a promise: fields are added, and never renamed.

Ids of events are texts, because a number of 64 bits loses digits in many JSON readers. Instants are RFC 3339 in UTC.
"""

from datetime import UTC, timedelta
from decimal import Decimal
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from pipeline.admin.resolutions import ResolutionKind
from pipeline.domain.acts import BulkAct
from pipeline.domain.states import DeliveryStatus, MutationStatus

ItemT = TypeVar("ItemT")

EventIdText = Annotated[str, BeforeValidator(str), Field(examples=["4711"], description="Id of an event.")]
AuditIdText = Annotated[str, BeforeValidator(str), Field(examples=["815"], description="Id of an act in the audit.")]
Instant = Annotated[AwareDatetime, AfterValidator(lambda at: at.astimezone(UTC))]
Seconds = Annotated[float, BeforeValidator(lambda span: span.total_seconds() if isinstance(span, timedelta) else span)]
Reason = Annotated[
    str,
    Field(min_length=1, max_length=4_000, description="Why; kept in the audit.", examples=["the dashboard shows it"]),
]
OptionalReason = Annotated[str, Field(max_length=4_000, description="Why; kept in the audit.")]


class ApiModel(BaseModel):
    """A value that an endpoint answers."""

    model_config = ConfigDict(from_attributes=True)


class ApiBody(BaseModel):
    """A value that an endpoint takes. A field that is not listed is refused."""

    model_config = ConfigDict(extra="forbid")


class PageView(ApiModel, Generic[ItemT]):
    """Some items of a list."""

    items: list[ItemT]
    next: str | None = Field(description="Cursor of the next page, for `after`; null: this is the last one.")


class ProblemView(BaseModel):
    """A problem, as RFC 9457 says."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:pipeline:problem:not-found",
                    "title": "There is no such thing",
                    "status": 404,
                    "detail": "There is no workflow 'shop'. Known: billing.",
                }
            ]
        },
    )

    type: str = Field(description="Stable name of the kind of problem.")
    title: str
    status: int
    detail: str


# -- events and publishing


class NewEventBody(ApiBody):
    """An event to publish. The same fact has the same message id, and counts once."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"message_id": "order-4711", "key": "4711", "payload": {"cents": 9901}}]},
    )

    message_id: str = Field(min_length=1, max_length=255)
    payload: Any = None
    key: str | None = Field(default=None, max_length=255, description="Events of one key are consumed in order.")
    title: str | None = Field(default=None, description="One line that operators read.")
    traceparent: str | None = Field(default=None, description="Trace context of W3C, to join the caller's trace.")


class EventBatchBody(ApiBody):
    """Up to 1,000 events of one topic, published in one transaction: all or none."""

    events: list[NewEventBody] = Field(min_length=1, max_length=1_000)
    replace: bool = Field(default=False, description="Replace the payload of events that no run has taken.")


class PublishedView(ApiModel):
    """What became of one event."""

    message_id: str
    outcome: str = Field(description="new, repeated or replaced", examples=["new"])


class ReceiptView(ApiModel):
    """What became of each event, in the order in which they were given."""

    workflow: str
    topic: str
    events: list[PublishedView]


class EventLineView(ApiModel):
    """An event that went into a run or came out of it."""

    id: EventIdText
    topic: str
    message_id: str
    key: str | None
    title: str | None
    deliveries: list[str] = Field(description="`handler: status`, one for each consumer.")


class EventView(EventLineView):
    """An event in one line."""

    workflow: str
    created_at: Instant
    created_by_run_id: UUID | None


class TimelineView(ApiModel):
    """Something that happened, or is planned."""

    at: Instant
    description: str
    by: str | None
    note: str
    is_planned: bool


class RunView(ApiModel):
    """A run in one line."""

    id: UUID
    workflow: str
    handler: str
    phase: str
    status: str
    outcome: str = Field(description="Of its mutation: success, failure, skipped or empty.")
    title: str | None
    attempt: int
    input_count: int
    error: str | None
    sequel: str = Field(description="What became of it after it stopped.")
    retried_by: UUID | None
    cost: Decimal | None
    created_at: Instant
    finished_at: Instant | None


class DeliveryView(ApiModel):
    """The state of an event for one consumer, and what it caused."""

    handler: str
    status: DeliveryStatus
    is_retired: bool
    failures: int
    failing_since: Instant | None
    error: str | None
    available_at: Instant | None
    runs: list[RunView]
    outputs: list[EventLineView]


class EventDetailView(ApiModel):
    """Everything about one event."""

    event: EventView
    payload: Any = Field(description="Null unless `fields=payload` was asked for.")
    caused_by: list[EventIdText]
    deliveries: list[DeliveryView]
    acts: list[TimelineView]


class TraceNodeView(ApiModel):
    """One thing in the tree of causes and effects, and what it caused."""

    kind: str
    id: str
    description: str
    status: str
    at: Instant
    is_match: bool
    children: list["TraceNodeView"]


class TraceView(ApiModel):
    """The trees of causes and effects that contain the thing that was asked for."""

    roots: list[TraceNodeView]
    is_partial: bool = Field(description="There are more nodes.")


class QuarantineView(ApiModel):
    """A quarantined event, for one consumer."""

    event_id: EventIdText
    workflow: str
    handler: str
    topic: str
    message_id: str
    key: str | None
    title: str | None
    failures: int
    failing_since: Instant | None
    error: str | None
    created_at: Instant


class ChangedView(ApiModel):
    """An act that was done."""

    act: str
    subject: str


# -- workflows


class WorkflowView(ApiModel):
    """A workflow in one line."""

    name: str
    status: str = Field(description="active, paused or error")
    reason: str = Field(description="Why it starts no runs; else empty.")
    since: Instant | None
    is_in_maintenance: bool
    concurrency: int
    active_runs: int
    waiting: int = Field(description="Events that no run holds, counted up to 10,000 for each handler.")
    quarantined: int
    oldest_at: Instant | None
    version: int


class HandlerView(ApiModel):
    """A handler and its backlog."""

    name: str
    kind: str = Field(description="consumer or producer")
    subscribes: list[str]
    waiting: int
    reserved: int
    quarantined: int
    active_runs: int
    oldest_at: Instant | None
    failures: int
    retry_at: Instant | None
    next_run_at: Instant | None
    wake_at: Instant | None
    is_retired: bool


class TopicView(ApiModel):
    """A topic and its consumers."""

    name: str
    has_schema: bool
    consumers: list[str]


class TopicSchemaView(ApiModel):
    """The JSON Schema that payloads of a topic must match."""

    workflow: str
    topic: str
    payload_schema: Any = Field(description="JSON Schema; null: the topic takes any payload.")


class BlockView(ApiModel):
    """One reason for which the system starts no runs of a workflow."""

    kind: str
    reason: str
    since: Instant
    run_id: UUID


class ActLineView(ApiModel):
    """One act of an operator or a sweep, with the reason."""

    at: Instant
    actor: str
    act: str
    reason: str


class ReleaseView(ApiModel):
    """One version of a workflow's code that workers run."""

    workflow: str
    version: int = Field(description="of the workflow, as its code declares it")
    code_version: str = Field(description="as set by the operator; empty if unset")
    package_version: str = Field(description="of Pipeline")
    workers: list[str] = Field(description="that run it")
    since: Instant = Field(description="when the first of these workers started")


class WorkflowDetailView(ApiModel):
    """Everything about one workflow."""

    workflow: WorkflowView
    desired: str
    on_uncertain: str
    on_logic_error: str
    on_exhausted: str
    maintenance_reason: str | None
    maintenance_since: Instant | None
    handlers: list[HandlerView]
    topics: list[TopicView]
    releases: list[ReleaseView]
    blocks: list[BlockView]
    acts: list[ActLineView]


class ReasonBody(ApiBody):
    """Why an act is done."""

    reason: Reason


class OptionalReasonBody(ApiBody):
    """Why an act is done; it may be empty."""

    reason: OptionalReason = ""


class ControlView(ApiModel):
    """What an act on a workflow changed."""

    workflow: str
    is_changed: bool = Field(description="False: the workflow had that state already.")
    message: str
    consequence: str


class PlannedRunView(ApiModel):
    """One run that would start: its inputs, and the request that it would send, redacted."""

    handler: str
    message_ids: list[str]
    connector: str
    operation: str
    headline: str
    needs_approval: bool
    problem: str
    is_waiting: bool


class PlanView(ApiModel):
    """What a workflow would send now."""

    workflow: str
    runs: list[PlannedRunView]


# -- runs and sessions


class MutationLineView(ApiModel):
    """The mutation of a run, in one line."""

    id: UUID
    operation: str
    status: str
    idempotency_key: str
    error: str | None


class SessionLineView(ApiModel):
    """The session of a run."""

    id: UUID
    started_at: Instant
    result: str | None
    cost: Decimal | None


class AdviceView(ApiModel):
    """What happens next, and the commands that an operator can type."""

    text: str
    commands: list[str]


class RunPlanView(ApiModel):
    """What the prepare of a run decided. Fields that look like secrets are redacted."""

    reserved: dict[str, int] = Field(description="how many events it reserved, by topic")
    ui: Any = Field(description="what it shows to people")
    data: Any = Field(description="what it handed on to mutate and next; null unless `fields=payload`")
    needs_approval: bool
    wake_at: Instant | None = Field(description="when its handler asked to be woken")


class RunDetailView(ApiModel):
    """Everything about one run."""

    run: RunView
    worker: str | None
    retry_of: UUID | None
    session: SessionLineView | None
    inputs: list[EventLineView]
    outputs: list[EventLineView]
    mutation: MutationLineView | None
    timeline: list[TimelineView]
    advice: AdviceView
    plan: RunPlanView | None = Field(description="null: its prepare has not ended")
    traceback: str | None = Field(description="where its error was raised, if a handler raised it")
    trace_id: str


class SessionView(ApiModel):
    """A session in one line."""

    id: UUID
    workflow: str
    started_at: Instant
    finished_at: Instant | None
    result: str | None
    error: str | None
    run_count: int | None
    cost: Decimal | None


# -- mutations


class LedgerEntryView(ApiModel):
    """A mutation in one line, without parameters and result."""

    id: UUID
    run_id: UUID
    workflow: str
    handler: str
    connector: str
    operation: str
    headline: str
    status: MutationStatus
    idempotency_key: str
    error: str | None
    error_type: str | None
    attempts: int
    reconcile_attempts: int
    created_at: Instant
    sent_at: Instant | None
    doubted_at: Instant | None
    quiet_until: Instant | None
    resolved_by: str | None
    resolved_at: Instant | None
    found_late_at: Instant | None


class DeclaredResultView(ApiModel):
    """What an operation declares about its result."""

    schema_: Any = Field(
        validation_alias="schema",
        serialization_alias="schema",
        description="JSON Schema; null: the operation declares nothing.",
    )
    can_fetch: bool = Field(description="The connector can fetch it by the outside system's id.")


class MutationView(ApiModel):
    """A mutation as an operator sees it. Its ETag names the state that is shown."""

    id: UUID
    state: str = Field(description="Token of the state; the ETag without its quotes.")
    workflow: str
    handler: str
    run_id: UUID
    status: MutationStatus
    headline: str
    connector: str
    operation: str
    grade: str = Field(description="What its operation offers after an unknown outcome: A, B, C or D.")
    params: Any = Field(description="Redacted parameters; null unless `fields=params` was asked for.")
    idempotency_key: str
    request_hash: str
    error: str | None
    error_class: str
    since: Instant
    attempts: int
    reconcile_attempts: int
    quiet_until: Instant | None = Field(
        description="Until then the request may still arrive; did_not_happen is refused."
    )
    can_try_again: bool
    message_ids: list[str]
    message_count: int
    look_up: str = Field(description="Link to the effect in the outside system; may be empty.")
    four_eyes_value: Decimal | None = Field(description="Two people must decide, because of this value.")
    declared_result: DeclaredResultView | None
    after_did_not_happen: str = Field(description="What follows the answer did_not_happen.")
    after_refusal: str


class NoteView(ApiModel):
    """A note on a mutation."""

    at: Instant
    author: str
    text: str


class ProposalView(ApiModel):
    """An answer that a second person must confirm."""

    id: UUID
    act: str
    proposed_by: str
    proposed_at: Instant
    reason: str


class MutationDetailView(ApiModel):
    """Everything about one mutation."""

    mutation: MutationView
    result: Any = Field(description="Null unless `fields=result` was asked for.")
    resolved_by: str | None
    resolved_at: Instant | None
    timeline: list[TimelineView]
    advice: AdviceView
    notes: list[NoteView]
    proposal: ProposalView | None
    others: list[str] = Field(description="Other operators who have it open now.")


class ResolveBody(ApiBody):
    """An answer to an unknown outcome."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"answer": "happened", "external_id": "ch_3P", "reason": "the dashboard shows the charge"},
                {"answer": "did_not_happen", "reason": "the provider's log has no such key"},
            ]
        },
    )

    answer: ResolutionKind
    reason: Reason
    result: Any = Field(default=None, description="With happened: its result.")
    external_id: str | None = Field(
        default=None, max_length=255, description="With happened: the outside system's id, to fetch its result by."
    )
    no_result: bool = Field(default=False, description="With happened: it has no result.")
    unchecked: bool = Field(default=False, description="Record the result although it does not fit.")
    refused: bool = Field(default=False, description="With did_not_happen: the outside system itself refused it.")
    evidence: dict[str, Any] | None = Field(default=None, description="Kept in the audit.")


class ApproveBody(ApiBody):
    """The approval of exactly one request."""

    request_hash: str = Field(min_length=1, max_length=255, description="Of the request that was shown.")
    reason: OptionalReason = ""


class FetchBody(ApiBody):
    """The outside system's id of an effect."""

    external_id: str = Field(min_length=1, max_length=255)


class FetchedView(ApiModel):
    """A result as the connector fetched it. Nothing was recorded."""

    external_id: str
    result: Any


class NoteBody(ApiBody):
    """A note on a mutation."""

    text: str = Field(min_length=1, max_length=4_000)


class MutationActView(ApiModel):
    """An act on a mutation that was done, and the mutation after it."""

    act: str
    is_proposed: bool = Field(description="Nothing was done yet: a second person must confirm it.")
    mutation: MutationView


# -- attention


class AttentionView(ApiModel):
    """Something that does not continue until an operator acts."""

    id: str
    kind: str
    workflow: str
    subject: str
    headline: str
    reason: str
    since: Instant | None
    mutation_id: UUID | None
    incident: str | None
    state: str | None
    commands: list[str]


class IncidentView(ApiModel):
    """Unknown outcomes that are alike, and can be resolved as one."""

    id: str
    operation: str
    error_class: str
    count: int
    first_at: Instant
    last_at: Instant
    workflows: list[str]
    headlines: list[str]


# -- bulk


class MutationFilterBody(ApiBody):
    """Which mutations. Empty fields do not restrict."""

    workflow: str | None = None
    connector: str | None = None
    operation: str | None = None
    older_than_seconds: float | None = Field(default=None, ge=0, le=1e9)


class EventFilterBody(ApiBody):
    """Which quarantined events. Empty fields do not restrict."""

    workflow: str | None = None
    handler: str | None = None
    event_ids: list[Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]] = Field(default=[], max_length=10_000)


class BulkResultBody(ApiBody):
    """The result that all mutations of a bulk act have."""

    value: Any = None
    unchecked: bool = False


class PreviewBody(ApiBody):
    """An act on many items: exactly one of ids, incident, mutations or events selects them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"act": "did_not_happen", "mutations": {"operation": "charge"}}]},
    )

    act: BulkAct
    ids: list[UUID] = Field(default=[], max_length=10_000)
    incident: str | None = None
    mutations: MutationFilterBody | None = None
    events: EventFilterBody | None = None
    result: BulkResultBody | None = Field(default=None, description="With happened: the result of each.")


class PreviewItemView(ApiModel):
    """One item of a preview."""

    subject: str
    state: str
    workflow: str
    headline: str
    act: str
    problem: str | None


class PreviewView(ApiModel):
    """A frozen preview of an act on many items, and what became of it."""

    id: UUID
    act: BulkAct
    status: str = Field(description="open, expired, discarded, running or finished")
    created_by: str
    created_at: Instant
    expires_at: Instant
    workflows: list[str]
    request: dict[str, Any]
    count: int
    sample: list[PreviewItemView]
    left_out: dict[str, int]
    reason: str
    committed_by: str | None
    committed_at: Instant | None
    finished_at: Instant | None
    done: int
    updated: list[str]
    refused: dict[str, str]


class CommitBody(ApiBody):
    """The commit of a preview by an operator who saw this many items."""

    count: int = Field(ge=0, le=10_000)
    reason: Reason


# -- the rest


class AuditView(ApiModel):
    """One act, what it was about, and its evidence."""

    id: AuditIdText
    at: Instant
    actor: str
    act: str
    claimed: bool = Field(description="Whether the actor named itself; no login, token or proxy did.")
    workflow: str | None
    run_id: UUID | None
    mutation_id: UUID | None
    event_id: EventIdText | None
    reason: str
    evidence: Any = Field(description="Null unless `fields=evidence` was asked for.")


class EvidenceView(ApiModel):
    """What is known about the outcome of a mutation: calls, reconcile attempts, and acts with their evidence."""

    attempts: int
    reconcile_attempts: int
    error: str | None = Field(description="The last verdict about its outcome.")
    quiet_until: Instant | None
    idempotency_key: str
    look_up: str
    acts: list[AuditView] = Field(description="Newest first, at most 200.")


class SearchHitView(ApiModel):
    """A thing that a text identifies."""

    kind: str = Field(description="How it was found: event, message, run, mutation, key, external or workflow.")
    noun: str = Field(description="event, run, mutation or workflow")
    id: str
    workflow: str
    description: str
    status: str


class SearchView(ApiModel):
    """Everything that a text identifies."""

    text: str
    hits: list[SearchHitView]
    recent: int = Field(description="Results were searched in so many of the newest mutations.")


class HistoryPointView(ApiModel):
    """How a workflow did in one span of time. Rates are per second."""

    at: Instant
    published: float
    committed: float
    stopped: float
    backlog: int
    oldest_age: float
    uncertain_share: float | None
    unresolved: int


class HistoryView(ApiModel):
    """How a workflow did over time."""

    workflow: str
    since: Instant
    until: Instant
    step: Seconds
    points: list[HistoryPointView]


class GraphNodeView(ApiModel):
    """A topic, a handler or an operation."""

    id: str
    kind: str
    name: str


class GraphEdgeView(ApiModel):
    """A connection between two nodes."""

    source: str
    target: str
    kind: str


class GraphView(ApiModel):
    """The topics, handlers and operations of a workflow, and how events pass between them."""

    workflow: str
    nodes: list[GraphNodeView]
    edges: list[GraphEdgeView]


class HealthView(ApiModel):
    """Whether workers, sweeps and doctor are well."""

    at: Instant
    workers: int
    gone_workers: int
    late_sweeps: list[str]
    doctor_at: Instant | None
    broken: int
    last_act_at: Instant | None


class WorkerView(ApiModel):
    """A worker and when it was last seen."""

    name: str
    host: str
    pid: int
    pool: str
    concurrency: int
    queues: list[str]
    workflows: dict[str, int]
    code_version: str
    package_version: str
    started_at: Instant
    seen_at: Instant
    is_gone: bool


class SweepView(ApiModel):
    """A sweep and when it last ran."""

    name: str
    period: Seconds
    last_run_at: Instant | None
    due_at: Instant | None
    is_late: bool
    report: dict[str, int]


class SettingView(ApiModel):
    """A setting of the process that answers; secrets are masked."""

    variable: str
    value: str
    default: str
    description: str


class UnsafeSettingView(ApiModel):
    """A setting of Postgres that risks commits."""

    subject: str
    detail: str
    advice: str


class SystemView(ApiModel):
    """Workers, sweeps, queues, versions and settings."""

    health: HealthView
    workers: list[WorkerView]
    releases: list[ReleaseView]
    sweeps: list[SweepView]
    schema_version: str
    expected_schema_version: str
    versions: dict[str, str]
    settings: list[SettingView] = Field(
        description="secrets are masked; empty for viewers and callers of some workflows"
    )
    unsafe_settings: list[UnsafeSettingView]
    queues: dict[str, int] | None = Field(description="Waiting messages by queue; null: the broker was not asked.")


class SavedViewBody(ApiBody):
    """A filter to keep under a name."""

    page: str = Field(min_length=1, max_length=255, examples=["inbox"])
    query: str = Field(max_length=4_000, examples=["kind=approval&workflow=shop"])


class SavedViewView(ApiModel):
    """A page with its filter, under a name."""

    name: str
    page: str
    query: str
    saved_at: Instant


class OperationView(ApiModel):
    """An operation as a worker registered it."""

    connector: str
    operation: str
    is_mutation: bool
    grade: str | None
    keyed: bool
    can_reconcile: bool
    can_fetch: bool
    timeout: Seconds
    settle: Seconds
    look_up: str
    four_eyes_above: Decimal | None
    registered_at: Instant


class BreakerView(ApiModel):
    """An open circuit breaker: no new mutation of its operation starts."""

    connector: str
    operation: str
    reason: str
    opened_by: str | None = Field(description="The operator; null: it opened by itself.")
    opened_at: Instant
    probe_at: Instant | None


class FindingView(ApiModel):
    """A rule of the tables that is broken, or a sweep that is overdue."""

    invariant: str
    severity: str
    subject: str
    detail: str
    sentence: str
    advice: str


class DoctorView(ApiModel):
    """What the doctor found."""

    is_healthy: bool
    findings: list[FindingView]


class DeadLetterView(ApiModel):
    """A message that workers refused, without its payloads."""

    id: str
    kind: str
    reason: str
    workflow: str
    events: int
    message_ids: list[str]
    task: str
    content_type: str
    size: int


class DeadLettersView(ApiModel):
    """The messages that workers refused."""

    items: list[DeadLetterView]
