"""Types of the rows that statements return and that are no row of one table: joins, and parts of rows.

The types of whole rows are in ``schema.py``, each beside its table. A join adds its columns to the type of the table
whose rows it returns.
"""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from pipeline.domain.states import EventId, Fence, MutationId, RunId, SessionId
from pipeline.store.schema import (
    AccessTokenRow,
    AfterFailedMutationText,
    BreakerRow,
    DeliveryRow,
    DeliveryStatusText,
    DesiredStatusText,
    EventRow,
    HandlerKindText,
    HandlerRow,
    LoginRow,
    MutationOutcomeText,
    MutationRow,
    MutationStatusText,
    OnExhaustedText,
    OnLogicErrorText,
    OnUncertainText,
    PhaseText,
    RunRow,
    RunStatusText,
    SessionRow,
    TopicRow,
    WorkflowRow,
)

# Parts of rows


class NameRow(Protocol):
    """The name of a workflow, a handler or a sweep."""

    name: str


class UuidRow(Protocol):
    """An id of any kind."""

    id: UUID


class NumberIdRow(Protocol):
    """An id that is a number."""

    id: int


class FoundIdRow(Protocol):
    """An id that is a number; None if the table is empty."""

    id: int | None


class RunIdRow(Protocol):
    """The id of a run."""

    id: RunId


class RunRecordRow(Protocol):
    """What is too long for a list of runs."""

    prepare_result: Any
    error_frames: str | None


class MutationIdRow(Protocol):
    """The id of a mutation."""

    id: MutationId


class DueMutationRow(MutationIdRow, Protocol):
    """A mutation whose next reconcile attempt is due."""

    is_first: bool


class SessionIdRow(Protocol):
    """The id of a session."""

    id: SessionId


class CountRow(Protocol):
    """How many rows there are."""

    number: int


# Runs


class LeasedRunRow(RunRow, Protocol):
    """A run, and whether a worker holds its lease now."""

    is_leased: bool


class ClaimedRunRow(RunRow, Protocol):
    """A run that was claimed, with what its phase needs of the handler and of the mutation."""

    handler: str
    handler_uid: UUID
    inputs: Any  #: uids of topics and message ids of the pinned events, for the mutate task
    offered_events: Any  #: the slice of the run, for the prepare task (``work.offered_events``)
    handler_state: Any
    ordered: bool
    low_watermark: int
    next_run_at: datetime | None
    is_unclaimed: bool
    mutation_status: MutationStatusText | None
    mutation_result: Any
    now: datetime


class DispatchableRunRow(RunRow, Protocol):
    """A run, with what its message says of its handler."""

    handler: str
    kind: HandlerKindText


class StartedRunRow(DispatchableRunRow, Protocol):
    """A new run, whether one of its inputs was in a run whose process died, and whether more runs could start."""

    suspect: bool
    has_more: bool


class CommittedRunRow(RunRow, Protocol):
    """A run that was committed, with the number of events it published."""

    published_count: int


class NamedRunRow(RunRow, Protocol):
    """A run, with the name of its handler."""

    handler: str


class RunWithMutationRow(RunRow, Protocol):
    """A run, with the status of its mutation."""

    mutation_status: MutationStatusText | None


class RunFactsRow(RunWithMutationRow, Protocol):
    """A run that is being stopped, with what the decision needs to know."""

    reconcilable: bool | None
    after_failed_mutation: AfterFailedMutationText
    failure_policy: Any
    consecutive_failures: int
    on_uncertain: OnUncertainText
    on_logic_error: OnLogicErrorText
    on_exhausted: OnExhaustedText
    concurrency: int
    handler_failing_since: datetime | None  #: the first failure after the last commit
    failing_events: list[EventId] | None  #: events that all these failures have in common
    input_failures: int
    input_slice_limit: int | None
    can_narrow_inputs: bool
    input_failing_since: datetime | None
    handler: str
    now: datetime


class ShownEventsRow(Protocol):
    """A run that chooses among all events, and those that it could see first."""

    id: RunId
    shown: list[EventId]


# Mutations


class RunMutationRow(MutationRow, Protocol):
    """A mutation, with the state of its run and the registered version of its workflow."""

    run_status: RunStatusText
    run_phase: PhaseText
    fence: Fence
    traceparent: str | None
    workflow_version: int


class SentMutationRow(MutationRow, Protocol):
    """A mutation that was put in flight, with the fence of its run."""

    fence: Fence


class FailedMutationRow(MutationRow, Protocol):
    """A mutation that failed, with what happens to the inputs of its run."""

    run: RunId
    handler_id: int
    event_ids: list[EventId]
    fence: Fence | None
    after_failed_mutation: AfterFailedMutationText


class BookedMutationRow(MutationRow, Protocol):
    """A mutation whose reconcile attempt begins now."""

    reconcile_started_at: datetime


class ReplacementRunRow(Protocol):
    """The run that owns the inputs of another run now, with its mutation."""

    run_id: RunId
    mutation_id: MutationId | None
    status: RunStatusText
    mutation_status: MutationStatusText | None
    connector: str | None
    operation: str | None
    idempotency_key: str | None
    sent_at: datetime | None
    result: Any


# Events and deliveries


class PublishAnswerRow(Protocol):
    """An event that was published or replaced. A row without an id: nothing was, a topic is not as it was given."""

    id: EventId | None
    topic: str
    message_id: str
    is_new: bool


class PendingEventRow(EventRow, Protocol):
    """An event that a run may reserve, with its failures so far."""

    failures: int


class OfferedEvent(NamedTuple):
    """An event of the slice that a run was offered, as its claim returns it."""

    id: EventId
    topic: str
    message_id: str
    key: str | None
    title: str | None
    payload: Any
    traceparent: str | None
    created_at: datetime
    failures: int


class OfferedEventRow(PendingEventRow, Protocol):
    """An event of the slice that a run was offered."""

    run_id: RunId


class RefusedInputRow(Protocol):
    """An event that could not be reserved: the topic that was asked for, and what was found."""

    event_id: EventId
    found_topic: str | None
    status: DeliveryStatusText | None
    run_id: RunId | None
    offered_to: RunId | None
    topic: str


class NamedDeliveryRow(DeliveryRow, Protocol):
    """A delivery, with the name of its handler and the event's message id and payload."""

    workflow: str
    message_id: str
    payload: Any
    handler: str


class ReleasedInputRow(Protocol):
    """An input that a stopped run gave back."""

    event_id: EventId
    status: DeliveryStatusText
    run: RunId


class EventIdRow(Protocol):
    """The id of an event of a delivery."""

    event_id: EventId


# Handlers and workflows


class HandlerIdRow(Protocol):
    """The id of a handler."""

    id: int


class HandlerStateRow(HandlerIdRow, Protocol):
    """The state of a handler."""

    state: Any


class SharedStateRow(Protocol):
    """A handler whose workflow may run several of its runs at a time."""

    workflow: str
    name: str


class WorkflowFactsRow(Protocol):
    """What decides whether a workflow may start a run."""

    workflow: str
    desired: DesiredStatusText
    maintenance: bool
    concurrency: int
    blocks: int
    active_runs: int
    turns: list[int]
    has_waiting: bool


class HandlerFactsRow(WorkflowFactsRow, Protocol):
    """What the scheduler's decisions need to know of a handler and of its workflow."""

    id: int
    name: str
    kind: HandlerKindText
    retry_at: datetime | None
    wake_at: datetime | None
    next_run_at: datetime | None
    batch: int
    ordered: bool
    low_watermark: int
    has_unseen: bool
    retryable: list[str]
    slice_limit: int | None
    is_unclaimed: bool
    has_probe_run: bool
    now: datetime


class HorizonRow(Protocol):
    """The last event id that was given out, and whether the transaction has no id of its own yet."""

    last_value: int
    is_first: bool


class SubscribedHandlerRow(Protocol):
    """Which handler is subscribed to a topic."""

    topic: str
    handler_id: int


class NamedTopicRow(TopicRow, Protocol):
    """A topic, the names that it had before, and the isolation level of the transaction that reads it."""

    former_names: list[str]
    isolation: str


class LockedWorkflowRow(NameRow, Protocol):
    """A workflow that is locked now, and how many were to be."""

    wanted: int


class PresentNameRow(Protocol):
    """A former name, and the one that has taken its place."""

    former: str
    name: str


class OpenBackfillRow(SubscribedHandlerRow, Protocol):
    """A consumer that is yet to be handed earlier events of a topic, and how far that has come."""

    workflow: str
    backfill_until: EventId
    backfill_after: str


class BackfillRow(Protocol):
    """What a page of a backfill has delivered, and whether it was the last."""

    delivered: int
    is_done: bool


class MaintenanceTaskIdRow(Protocol):
    """The id of a maintenance task."""

    id: int


class UnclaimedRunRow(RunIdRow, Protocol):
    """A run that no worker took, and its handler."""

    handler_id: int


class RunOfWorkflowRow(RunIdRow, Protocol):
    """A run and its workflow."""

    workflow: str


class LapsedRunRow(RunOfWorkflowRow, Protocol):
    """A run whose lease has lapsed, or ends later than it can."""

    is_in_future: bool


class RetriedRunRow(Protocol):
    """A run that another run retries."""

    retry_of: RunId


class SweepAgeRow(Protocol):
    """How long ago a sweep ran."""

    name: str
    age: timedelta


class SlotRow(Protocol):
    """A slot that was taken: how long after the sweep ran before, and the report of that run."""

    pause: timedelta | None
    report: Any


# Retention


class RetentionRow(Protocol):
    """The shortest time for which any workflow keeps what is done, and its ledger."""

    done: timedelta | None
    ledger: timedelta | None


class CursorRow(Protocol):
    """Where a walk through a table goes on."""

    position: str


class ChainedRow(Protocol):
    """The head of the chain over the audit, and how many acts were chained just now."""

    position: int
    hash: str
    acts: int


class PageRow(Protocol):
    """How many rows a page had, how many of them were deleted, and where it ended."""

    dropped: int
    seen: int
    position: int | str | None
    is_young: bool


# The ledger, as operators and the reconciler read it


class OpenBreakerRow(BreakerRow, Protocol):
    """An open circuit breaker, and whether its probe is due."""

    is_due: bool


class OperationNameRow(Protocol):
    """An operation of a connector."""

    connector: str
    operation: str


class ListedMutationRow(MutationRow, Protocol):
    """A mutation, with its run and its handler."""

    run_status: RunStatusText
    run_phase: PhaseText
    event_ids: list[EventId]
    handler: str
    is_quiet: bool | None


class LedgerPageRow(ListedMutationRow, Protocol):
    """A mutation in a list, with the class of the error that stopped its run."""

    error_type: str | None


class UnresolvedMutationRow(MutationRow, Protocol):
    """A mutation that an operator may resolve, with the events that it is about."""

    event_ids: list[EventId]
    handler: str
    run_status: RunStatusText
    after_failed_mutation: AfterFailedMutationText
    retired: bool
    is_quiet: bool | None
    error_type: str | None


class IncidentRow(OperationNameRow, Protocol):
    """Unknown outcomes that an operator must resolve and that are alike."""

    error_class: str
    number: int
    first_at: datetime
    last_at: datetime
    workflows: list[str]
    headlines: list[str]  #: of the oldest
    mutation_ids: list[UUID]  #: oldest first; empty unless asked for


class LateEffectRow(MutationRow, Protocol):
    """A mutation with a late effect, and what that means."""

    advice: str | None


class ParameterValueRow(MutationIdRow, Protocol):
    """One parameter of a mutation; None if the mutation cannot have happened."""

    run_id: RunId
    value: Any
    params: Any  #: all of them, if they are encrypted


class MutationOfRunRow(MutationIdRow, Protocol):
    """A mutation and its run."""

    run_id: RunId


# Lists for operators


class ListedWorkflowRow(WorkflowRow, Protocol):
    """A workflow, with its open maintenance task."""

    task_id: int | None
    task_opened_at: datetime | None


class ListedHandlerRow(HandlerRow, Protocol):
    """A handler, with the number of events and runs that wait for it."""

    waiting: int
    reserved: int
    quarantined: int
    quarantined_id: EventId | None
    oldest_id: EventId | None
    oldest_at: datetime | None
    stopped: int
    stopped_at: datetime | None
    is_unclaimed: bool
    active_runs: int
    subscribes: list[str]


class CapacityRow(Protocol):
    """Runs that hold the capacity of a workflow without moving on."""

    workflow: str
    unsent: int
    approval_run_id: RunId | None
    approval_since: datetime | None


class EventHeadRow(Protocol):
    """An event without its payload."""

    id: EventId
    workflow: str
    topic: str
    message_id: str
    key: str | None
    title: str | None
    caused_by: list[EventId]
    created_by_run_id: RunId | None
    created_at: datetime


class ListedEventRow(EventHeadRow, Protocol):
    """An event, with its status for each consumer."""

    deliveries: list[str] | None


class EventWithPayloadRow(ListedEventRow, Protocol):
    """An event with its payload and its status for each consumer."""

    payload: Any


class HandlerDeliveryRow(DeliveryRow, Protocol):
    """A delivery, with the name of its handler."""

    handler: str
    workflow: str
    retired: bool


class EventDeliveryRow(EventHeadRow, Protocol):
    """An event as it is delivered to one handler."""

    handler: str
    retired: bool
    failures: int
    failing_since: datetime | None
    error: str | None


class QuarantinedEventRow(EventDeliveryRow, Protocol):
    """A quarantined event, with the id of its consumer."""

    handler_id: int


class EventDeliveryStatusRow(EventDeliveryRow, Protocol):
    """An event as it is delivered to one handler, with the status of the delivery."""

    status: DeliveryStatusText


class ListedRunRow(Protocol):
    """A run, with the name and kind of its handler."""

    id: RunId
    workflow: str
    handler: str
    kind: HandlerKindText
    phase: PhaseText
    status: RunStatusText
    mutation_outcome: MutationOutcomeText
    mutation_id: MutationId | None
    attempt: int
    retry_of: RunId | None
    retry_pending: bool
    retry_at: datetime | None
    error: str | None
    error_type: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    event_ids: list[EventId]
    worker: str | None
    lease_expires_at: datetime | None
    is_leased: bool
    title: str | None
    cost: Decimal | None
    session_id: SessionId
    traceparent: str | None
    mutation_status: MutationStatusText | None
    retried_by: RunId | None


class SessionCostRow(SessionRow, Protocol):
    """A session, with what its runs have cost as far as they are kept."""

    runs_cost: Decimal | None


class UnsentRunRow(Protocol):
    """A run that has sent nothing yet, with the request that it wrote to the ledger."""

    id: RunId
    workflow: str
    handler_id: int
    run_id: RunId  #: of the request
    phase: PhaseText
    event_ids: list[EventId]
    prepare_result: Any
    connector: str | None
    operation: str | None
    params: Any
    approved_at: datetime | None
    message_ids: list[str] | None


class RunInputsRow(RunIdRow, Protocol):
    """The inputs of a run."""

    handler_id: int
    event_ids: list[EventId]


class NoticeRow(Protocol):
    """A thing that needs an operator."""

    kind: str
    subject: str
    workflow: str
    headline: str
    reason: str
    since: datetime


class UnsafeSettingRow(Protocol):
    """A setting of Postgres with which a crash may forget a commit."""

    name: str
    found: str
    expected: str


class FindingRow(Protocol):
    """A row that breaks an invariant."""

    subject: str
    detail: str


# Gauges


class RunCountRow(CountRow, Protocol):
    """Number of runs of a workflow in one phase and status."""

    workflow: str
    phase: PhaseText
    status: RunStatusText


class LeaseCountRow(Protocol):
    """Number of leases that are held, and that lapsed."""

    held: int
    lapsed: int


class MutationCountRow(CountRow, Protocol):
    """Number of mutations of an operation in one status, and the age of the oldest in seconds."""

    connector: str
    operation: str
    status: MutationStatusText
    oldest: Decimal
    awaiting_approval: int


class BreakerGaugeRow(OperationNameRow, Protocol):
    """Whether the circuit breaker of an operation is open."""

    is_open: bool


class WorkflowGaugeRow(Protocol):
    """What the status of a workflow is derived from."""

    workflow: str
    desired: DesiredStatusText
    maintenance: bool
    blocks: list[str]


class SweepGaugeRow(Protocol):
    """How many seconds ago a sweep ran, and its report."""

    name: str
    age: Decimal
    report: Any


class AttentionCountRow(Protocol):
    """How many things need an operator, by kind."""

    late_effect: int
    blocked: int
    quarantined: int
    retired: int
    unclaimed: int


class BacklogRow(CountRow, Protocol):
    """Number and age in seconds of the events of a topic that wait for a handler."""

    workflow: str
    topic: str
    handler: str
    age: Decimal
    declined_age: Decimal


class RunLatencyRow(Protocol):
    """Seconds from the publishing of a run's oldest input to its commit."""

    workflow: str
    handler: str
    seconds: Decimal


class RunThroughputRow(Protocol):
    """Runs of a workflow that ended lately, and how far back the count reaches, in seconds."""

    workflow: str
    committed: int
    stopped: int
    oldest_age: Decimal
    rows_read: Decimal


class EventThroughputRow(Protocol):
    """Events of a workflow that were published lately, and how far back the count reaches, in seconds."""

    workflow: str
    published: int
    oldest_age: Decimal
    rows_read: Decimal


# Callers of the API


class LiveTokenRow(AccessTokenRow, Protocol):
    """An API token that can be used, and whether its last use is to be recorded again."""

    is_use_stale: bool


class LiveLoginRow(LoginRow, Protocol):
    """An open login, and whether its last use is to be recorded again."""

    is_use_stale: bool


class ExistsRow(Protocol):
    """Whether any row was found."""

    is_found: bool


class BucketRow(Protocol):
    """The samples of a workflow in one span of time."""

    workflow: str
    at: datetime
    span: timedelta
    published: int
    committed: int
    stopped: int
    mutated: int
    uncertain: int
    backlog: int
    oldest_age: timedelta | None
    unresolved: int


# The installation


class SweepRunRow(Protocol):
    """When a sweep ran last, and what it did."""

    name: str
    last_run_at: datetime
    report: Any


class ServerRow(Protocol):
    """The version of Postgres, and of the schema."""

    server_version: str
    schema_version: str


class LastActRow(Protocol):
    """When an operator or a sweep acted last; None: never."""

    at: datetime | None


class CalledOperationRow(OperationNameRow, Protocol):
    """An operation that a handler called, as the ledger shows."""

    handler: str
    number: int


class WaitingCountRow(Protocol):
    """How many items of one kind wait for operators in one workflow."""

    kind: str
    workflow: str
    number: int


class HighWaterRow(Protocol):
    """How the installation stands, in a few values that change when something does."""

    now: datetime
    act_id: int | None
    waiting: int
    oldest_at: datetime | None
    digest: str


class WatchedItemRow(Protocol):
    """Something whose changes operators see at once."""

    kind: str
    id: str
    workflow: str
    fingerprint: int
