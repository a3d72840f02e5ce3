"""Ids and states of runs, mutations and deliveries, and the moves between them."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NewType
from uuid import UUID

RunId = NewType("RunId", UUID)
MutationId = NewType("MutationId", UUID)
SessionId = NewType("SessionId", UUID)
EventId = NewType("EventId", int)
HandlerId = NewType("HandlerId", int)
Fence = NewType("Fence", int)


class Phase(StrEnum):
    """How far a run got. Members stand in the order a run passes through them."""

    PENDING = "pending"  #: created by the scheduler; no worker has begun
    PREPARING = "preparing"  #: a worker is selecting inputs (or, for a producer, producing)
    PREPARED = "prepared"  #: inputs are reserved and the plan is saved; no request has left
    MUTATING = "mutating"  #: the ledger holds the mutation; the outside system may have seen it
    MUTATED = "mutated"  #: the mutate phase is over and its outcome is known
    EMITTING = "emitting"  #: downstream events and state are being made
    COMMITTED = "committed"  #: inputs consumed, outputs published, state saved, in one transaction

    @property
    def rank(self) -> int:
        """Position in the only direction there is."""
        return PHASES.index(self)


PHASES: tuple[Phase, ...] = tuple(Phase)

PHASE_TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.PREPARING}),
    Phase.PREPARING: frozenset({Phase.PREPARED, Phase.COMMITTED}),  # a producer commits from here
    Phase.PREPARED: frozenset({Phase.MUTATING, Phase.MUTATED, Phase.EMITTING}),
    Phase.MUTATING: frozenset({Phase.MUTATED}),
    Phase.MUTATED: frozenset({Phase.EMITTING}),
    Phase.EMITTING: frozenset({Phase.COMMITTED}),
    Phase.COMMITTED: frozenset(),
}


class PhaseTask(StrEnum):
    """The tasks that move runs, in the order of their phases. A task calls the handler's method of the same name."""

    PREPARE = "pipeline.prepare"
    MUTATE = "pipeline.mutate"
    NEXT = "pipeline.next"
    PRODUCE = "pipeline.produce"  #: of a producer, instead of the other three

    @property
    def method(self) -> str:
        """The handler's method that the task calls."""
        return self.value.removeprefix("pipeline.")


#: Which task a run of a consumer waits for, by the phase it is in.
PHASE_TASKS: Mapping[Phase, PhaseTask] = {
    Phase.PENDING: PhaseTask.PREPARE,
    Phase.PREPARING: PhaseTask.PREPARE,
    Phase.PREPARED: PhaseTask.MUTATE,
    Phase.MUTATING: PhaseTask.MUTATE,
    Phase.MUTATED: PhaseTask.NEXT,
    Phase.EMITTING: PhaseTask.NEXT,
}
#: The tasks of a consumer's run, in order.
CONSUMER_TASKS: tuple[PhaseTask, ...] = tuple(dict.fromkeys(PHASE_TASKS.values()))


def chained_tasks(task: PhaseTask) -> tuple[PhaseTask, ...]:
    """A task and those that follow it in one chain."""
    return CONSUMER_TASKS[CONSUMER_TASKS.index(task) :] if task in CONSUMER_TASKS else (task,)


#: Where a run may come into being: fresh, or as a retry of a stopped run.
INITIAL_PHASES: frozenset[Phase] = frozenset({Phase.PENDING, Phase.PREPARED, Phase.EMITTING})


class RunStatus(StrEnum):
    """Whether a run is moving, and why not."""

    ACTIVE = "active"  #: a worker holds it, or the scheduler will send it to one
    PAUSED_TRANSIENT = "paused:transient"  #: an outside system failed for now; another run follows after a delay
    PAUSED_APPROVAL = "paused:approval"  #: an operator must approve a request, or repair credentials
    PAUSED_RECONCILIATION = "paused:reconciliation"  #: the mutation is in doubt
    FAILED_LOGIC = "failed:logic"  #: the workflow's code is wrong; the same code would fail again
    FAILED_INTERNAL = "failed:internal"  #: retries are exhausted, or the host itself failed
    COMMITTED = "committed"  #: done
    CRASHED = "crashed"  #: its worker vanished; recovery has put its inputs where they belong


class MutationOutcome(StrEnum):
    """What became of the run's mutation, as the run remembers it."""

    NONE = ""  #: no mutation was asked for, or none is decided yet
    SUCCESS = "success"  #: it happened
    FAILURE = "failure"  #: it did not happen
    SKIPPED = "skipped"  #: an operator chose to go on without it


#: A status leaves ``active`` once. The way back exists only for a run whose approval was granted.
RUN_STATUS_TRANSITIONS: Mapping[RunStatus, frozenset[RunStatus]] = {
    RunStatus.ACTIVE: frozenset(RunStatus) - {RunStatus.ACTIVE},
    RunStatus.PAUSED_APPROVAL: frozenset({RunStatus.ACTIVE}),
    **{status: frozenset() for status in RunStatus if status not in (RunStatus.ACTIVE, RunStatus.PAUSED_APPROVAL)},
}


class MutationStatus(StrEnum):
    """Where one external effect stands."""

    PENDING = "pending"  #: recorded with its exact request, waiting for an operator's approval
    IN_FLIGHT = "in_flight"  #: committed to the ledger right before it was sent
    APPLIED = "applied"  #: it happened
    FAILED = "failed"  #: it did not happen, or an operator decided to go on without it
    NEEDS_RECONCILE = "needs_reconcile"  #: in doubt; the background reconciles it
    INDETERMINATE = "indeterminate"  #: reconciling found nothing out; an operator must resolve it


MUTATION_TRANSITIONS: Mapping[MutationStatus, frozenset[MutationStatus]] = {
    MutationStatus.PENDING: frozenset({MutationStatus.IN_FLIGHT, MutationStatus.FAILED}),
    MutationStatus.IN_FLIGHT: frozenset(
        {
            MutationStatus.APPLIED,
            MutationStatus.FAILED,
            MutationStatus.NEEDS_RECONCILE,
            MutationStatus.INDETERMINATE,
        }
    ),
    MutationStatus.NEEDS_RECONCILE: frozenset(
        {MutationStatus.APPLIED, MutationStatus.FAILED, MutationStatus.INDETERMINATE}
    ),
    MutationStatus.INDETERMINATE: frozenset(
        {MutationStatus.APPLIED, MutationStatus.FAILED, MutationStatus.NEEDS_RECONCILE}
    ),
    MutationStatus.APPLIED: frozenset(),
    MutationStatus.FAILED: frozenset(),
}

#: The outside system may or may not have seen it.
UNRESOLVED: frozenset[MutationStatus] = frozenset(
    {MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE}
)

#: Nothing more will happen to it.
RESOLVED: frozenset[MutationStatus] = frozenset({MutationStatus.APPLIED, MutationStatus.FAILED})


class Resolver(StrEnum):
    """Who resolved a mutation."""

    CALL = "call"  #: the outside system answered the call itself
    RECONCILE = "reconcile"  #: the outside system was asked afterwards
    OPERATOR = "operator"  #: an operator stated what happened
    OPERATOR_SKIP = "operator_skip"  #: an operator decided to go on without it
    VOID = "void"  #: it was approved, but its run stopped before it was sent


class Evidence(StrEnum):
    """The evidence that a mutation did not happen."""

    REFUSED = "refused"  #: the outside system itself refused the request: a repeat gets a new idempotency key
    DEFINITE = "definite"  #: it was not sent, not let in, or not taken now: it cannot arrive any more
    ABSENCE = "absence"  #: it was not found: the request may still be on its way


def quiet_until(send_deadline: datetime, settle: timedelta) -> datetime:
    """The end of the quiet period: absence is evidence from here, since no request can be on its way."""
    return send_deadline + settle


class DeliveryStatus(StrEnum):
    """Where one event stands for one consumer."""

    PENDING = "pending"  #: waits to be selected by a prepare
    RESERVED = "reserved"  #: reserved as an input of exactly one run
    CONSUMED = "consumed"  #: its run committed
    SKIPPED = "skipped"  #: an operator chose to go on without it
    QUARANTINED = "quarantined"  #: set aside with the error that its runs met


DELIVERY_TRANSITIONS: Mapping[DeliveryStatus, frozenset[DeliveryStatus]] = {
    DeliveryStatus.PENDING: frozenset({DeliveryStatus.RESERVED, DeliveryStatus.SKIPPED, DeliveryStatus.QUARANTINED}),
    DeliveryStatus.RESERVED: frozenset(
        {
            DeliveryStatus.CONSUMED,
            DeliveryStatus.SKIPPED,
            DeliveryStatus.PENDING,
            DeliveryStatus.QUARANTINED,
        }
    ),
    DeliveryStatus.QUARANTINED: frozenset({DeliveryStatus.PENDING, DeliveryStatus.SKIPPED}),
    DeliveryStatus.CONSUMED: frozenset(),
    DeliveryStatus.SKIPPED: frozenset(),
}


class Sequel(StrEnum):
    """What became of a run that stopped."""

    NONE = ""  #: it has not stopped, or it is committed
    RETRIED = "retried"  #: a retry continued it
    RELEASED = "inputs released"  #: it is over; its inputs went back for another run, or were quarantined
    ENDED = "ended"  #: it is over; it had no inputs, or they are settled
    WAITS_FOR_APPROVAL = "waits for approval"  #: an operator approves or rejects its request
    WAITS_FOR_RECONCILE = "waits for reconcile"  #: its mutation is in doubt
    WAITS_FOR_OPERATOR = "waits for an operator"  #: its mutation is indeterminate
    WAITS_FOR_RETRY = "waits for a retry"  #: its outcome is known, and a new run continues from there


def sequel_of(
    status: RunStatus,
    outcome: MutationOutcome,
    mutation: MutationStatus | None,
    *,
    has_inputs: bool,
    is_retry_pending: bool,
    is_retried: bool,
) -> Sequel:
    """Return what became of a run, from its own row, its mutation, and whether a retry exists."""
    if status in (RunStatus.ACTIVE, RunStatus.COMMITTED):
        return Sequel.NONE
    if is_retried:
        return Sequel.RETRIED
    if mutation is MutationStatus.PENDING:
        return Sequel.WAITS_FOR_APPROVAL
    if mutation is MutationStatus.INDETERMINATE:
        return Sequel.WAITS_FOR_OPERATOR
    if mutation in UNRESOLVED:
        return Sequel.WAITS_FOR_RECONCILE
    return _after_resolution(outcome, has_inputs=has_inputs, is_retry_pending=is_retry_pending)


def _after_resolution(outcome: MutationOutcome, *, has_inputs: bool, is_retry_pending: bool) -> Sequel:
    if is_retry_pending:
        return Sequel.WAITS_FOR_RETRY
    is_settled = outcome in (MutationOutcome.SUCCESS, MutationOutcome.SKIPPED)
    return Sequel.RELEASED if has_inputs and not is_settled else Sequel.ENDED
