"""One mutation that is being sent: its state, its call, and its outcome for the ledger."""

import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from pipeline.connectors import event_loop
from pipeline.connectors.sdk import Call, Connector, Operation
from pipeline.consumer_engine.bounded import FinishedCall, StepRunner
from pipeline.domain.errors import TransientError
from pipeline.domain.failures import Failure
from pipeline.domain.reconciliation import CallDecision, CallEnd, NextAction
from pipeline.domain.states import Fence, MutationId, Resolver
from pipeline.domain.values import AppliedMutation, FailedMutation, Limits, RunFailure, RunLease, total_cost
from pipeline.store.rows import SentMutationRow
from pipeline.telemetry import metrics, spans
from pipeline.transitions.breakers import OperationName
from pipeline.worker.outcomes import RECONCILE_OPTION, reported_cost, storable_result, verdict_label


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """One mutation in flight, being reconciled, or waiting for its next attempt."""

    lease: RunLease
    mutation: SentMutationRow
    connector: Connector
    operation: Operation[Any]
    ends_at: float  #: on the monotonic clock; nothing may be sent after it, whatever froze this process meanwhile
    suspended_before: float  #: ``suspended_seconds()`` when that time began
    committed_at: float  #: on the monotonic clock, when its commit had returned: never earlier than ``sent_at``
    #: of its reconcile attempt, by the database's clock, rather too early than too late
    reconcile_started_at: datetime | None = None
    is_overdue: bool = False
    is_unsent: bool = False  #: refused here, before anything left
    is_probe: bool = False  #: let through by an open breaker, to see whether an answer comes back
    is_reconcile: bool = False
    doubt_reason: str = ""
    doubt_type: str = ""
    started_at: float = 0.0  #: on the monotonic clock, of the call or reconcile attempt in flight
    call: Call | None = None  #: of the call or reconcile attempt in flight
    cost: Decimal | None = None  #: of the calls and reconcile attempts that ended and are not recorded yet
    span: Any = None  #: of the call or reconcile attempt in flight, when spans are on

    @property
    def operation_name(self) -> OperationName:
        return self.mutation.connector, self.mutation.operation

    @property
    def is_late(self) -> bool:
        """Whether the time to send it has passed, counting what the machine slept meanwhile."""
        return time.monotonic() + suspended_seconds() - self.suspended_before >= self.ends_at


def suspended_seconds() -> float:
    """For how many seconds this machine was suspended since it booted, which the monotonic clock does not count.

    Zero where the platform does not tell.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()


def call_provider(function: Callable[..., Any], pending: PendingCall, call: Call) -> Any:
    """Call the outside system, unless the time for it has passed."""
    if _is_out_of_time(pending, call):
        refuse_late()
    with spans.activate(pending.span):
        answer = function(pending.connector, call, **pending.operation.arguments(pending.mutation.params))
        return event_loop.await_result(_await_in_time(answer, pending, call) if inspect.isawaitable(answer) else answer)


def call_within(ask: Callable[[], Any], call: Call, limit: timedelta, what: str) -> FinishedCall:
    """Ask the outside system something, for a limited time. Its error is returned, whatever it is."""
    steps = StepRunner()
    try:
        value = steps.run(
            lambda: event_loop.await_result(ask(), limit), limit=limit, what=what, option=RECONCILE_OPTION
        )
        return FinishedCall(call.idempotency_key, value=value)
    except BaseException as error:  # noqa: BLE001 - a question that fails is not answered, whatever it raised
        return FinishedCall(call.idempotency_key, error=error)
    finally:
        steps.close()


async def _await_in_time(answer: Awaitable[Any], pending: PendingCall, call: Call) -> Any:
    """The same at the moment at which the loop comes to it: nothing of an async call was sent before."""
    if _is_out_of_time(pending, call):
        getattr(answer, "close", refuse_late)()
        refuse_late()
    return await answer


def _is_out_of_time(pending: PendingCall, call: Call) -> bool:
    """Whether the time for a call or a reconcile attempt has passed."""
    return not call.remaining or (not pending.is_reconcile and pending.is_late)


def count_cost(pending: PendingCall) -> None:
    """Add what the call or reconcile attempt that ended has cost. What it reports later is not counted."""
    if pending.call is not None:
        suffix = ".reconcile" if pending.is_reconcile else ""
        cost = reported_cost(pending.call, ".".join(pending.operation_name) + suffix)
        pending.call, pending.cost = None, total_cost([pending.cost, cost])


def record_metrics(pending: PendingCall, judged: CallDecision, end: CallEnd) -> None:
    """Count how a call or a reconcile attempt ended. A request that was refused here, unsent, is neither."""
    if pending.is_unsent or not metrics.is_on():
        return
    about = {"connector": pending.mutation.connector, "operation": pending.mutation.operation}
    if pending.is_reconcile:
        metrics.record("pipeline.reconcile.attempts", {**about, "verdict": verdict_label(end)})
    else:
        seconds = time.monotonic() - pending.started_at
        metrics.record("pipeline.mutation.duration", {**about, "outcome": _OUTCOME_LABELS[judged.action]}, seconds)


#: What a call came to, in one word.
_OUTCOME_LABELS = {
    NextAction.APPLIED: "applied",
    NextAction.FAILED: "failed",
    NextAction.RETRY: "retry",
    NextAction.RECONCILE: "unknown",
    NextAction.DOUBT: "unknown",
}


def refuse_lost(*_: Any, **__: Any) -> Any:
    """Take the place of a call whose run belongs to another worker."""
    raise TransientError("the run was taken over before its mutation was sent")


def refuse_late(*_: Any, **__: Any) -> Any:
    """Take the place of a call that comes too late."""
    raise TransientError("the time for its mutation had passed before anything was sent")


def is_approved(pending: PendingCall) -> bool:
    """Whether an operator approved it, however long ago it was requested."""
    return pending.mutation.approved_at is not None


def is_applied(judged: CallDecision) -> bool:
    """Whether it happened."""
    return judged.action is NextAction.APPLIED


def applied_mutation(pending: PendingCall, judged: CallDecision, limits: Limits) -> AppliedMutation:
    """The record that it happened, with a result that can be stored."""
    result = storable_result(judged.result, limits, ".".join(pending.operation_name))
    return AppliedMutation(
        mutation_id=MutationId(pending.mutation.id),
        result=result,
        fence=Fence(pending.lease.fence),
        resolved_by=_resolver(pending),
        cost=pending.cost,
        workflow=pending.mutation.workflow,
    )


def failed_mutation(pending: PendingCall, judged: CallDecision) -> FailedMutation:
    """The record that it did not happen: it was refused, or not found."""
    mutation_id = MutationId(pending.mutation.id)
    fence, reconcile_started_at = pending.lease.fence, pending.reconcile_started_at
    return FailedMutation(
        mutation_id=mutation_id,
        error=judged.reason,
        evidence=judged.evidence,
        reconcile_started_at=reconcile_started_at,
        fence=fence,
        resolved_by=_resolver(pending),
    )


def run_failure(pending: PendingCall, failure: Failure) -> RunFailure:
    """The record that its run cannot go on, with what its calls have cost."""
    return RunFailure(lease=pending.lease, failure=replace(failure, cost=pending.cost))


def _resolver(pending: PendingCall) -> Resolver:
    """What resolved it: its call, or the reconcile attempt right after it."""
    return Resolver.RECONCILE if pending.is_reconcile else Resolver.CALL
