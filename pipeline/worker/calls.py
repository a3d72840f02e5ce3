"""One mutation on its way: what is known of it, how it is called, and its outcome as the ledger takes it."""

import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row

from pipeline.connectors import event_loop
from pipeline.connectors.sdk import Call, Connector, Operation
from pipeline.consumer_engine.calls import Finished
from pipeline.domain.errors import TransientError
from pipeline.domain.ids import Fence, MutationId
from pipeline.domain.states import Evidence
from pipeline.domain.values import Applied, Failed, Held, Limits
from pipeline.telemetry import metrics
from pipeline.telemetry.tracing import spans
from pipeline.transitions.breakers import OperationName
from pipeline.worker.outcomes import Judged, Step, storable, told


@dataclass(slots=True, kw_only=True)
class Flight:
    """One mutation in the air, being looked for, or waiting for its next attempt."""

    held: Held
    mutation: Row[Any]
    connector: Connector
    operation: Operation[Any]
    ends_at: float  #: on the monotonic clock; nothing may be sent after it, whatever froze this process meanwhile
    asleep: float  #: what ``asleep`` said when that time began
    landed_at: float  #: on the monotonic clock, when its commit had returned: never earlier than ``sent_at``
    asked_at: datetime | None = None  #: of its look, by the database's clock, rather too early than too late
    overdue: bool = False
    unsent: bool = False  #: refused here, before anything left
    probes: bool = False  #: let through by an open breaker, to see whether an answer comes back
    looks: bool = False
    doubt: str = ""
    launched_at: float = 0.0  #: on the monotonic clock, of the call or look that is in the air
    span: Any = None  #: of the call or look that is in the air, when somebody listens

    @property
    def name(self) -> OperationName:
        return self.mutation.connector, self.mutation.operation

    @property
    def is_late(self) -> bool:
        """Whether the time to send it has passed, counting what the machine slept meanwhile."""
        return time.monotonic() + asleep() - self.asleep >= self.ends_at


def asleep() -> float:
    """For how many seconds this machine was suspended since it booted, which the monotonic clock does not count.

    Zero where the platform does not tell.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock) - time.monotonic()


def called(function: Callable[..., Any], flight: Flight, call: Call) -> Any:
    """Call the outside system, unless the time for it has passed."""
    if _is_over(flight, call):
        refuse_late()
    with spans.inside(flight.span):
        answer = function(flight.connector, call, **flight.operation.given(flight.mutation.params))
        return event_loop.answered(_in_time(answer, flight, call) if inspect.isawaitable(answer) else answer)


async def _in_time(answer: Awaitable[Any], flight: Flight, call: Call) -> Any:
    """The same at the moment at which the loop comes to it: nothing of an async call was sent before."""
    if _is_over(flight, call):
        getattr(answer, "close", refuse_late)()
        refuse_late()
    return await answer


def _is_over(flight: Flight, call: Call) -> bool:
    """Whether the time for a call or a look has passed."""
    return not call.remaining or (not flight.looks and flight.is_late)


def counted(flight: Flight, judged: Judged, finished: Finished) -> None:
    """Count how a call or a look ended. What was refused here before anything left is neither."""
    if flight.unsent or not metrics.is_on():
        return
    about = {"connector": flight.mutation.connector, "operation": flight.mutation.operation}
    if flight.looks:
        metrics.note("pipeline.reconcile.looks", {**about, "verdict": told(finished.value)})
    else:
        seconds = time.monotonic() - flight.launched_at
        metrics.note("pipeline.mutation.duration", {**about, "outcome": _OUTCOMES[judged.step]}, seconds)


#: What a call came to, in one word.
_OUTCOMES = {
    Step.APPLIED: "applied",
    Step.FAILED: "failed",
    Step.AGAIN: "again",
    Step.LOOK: "unknown",
    Step.DOUBT: "unknown",
}


def refuse_lost(*_: Any, **__: Any) -> Any:
    """In the place of a call whose run is somebody else's."""
    raise TransientError("the run was taken over before its mutation was sent")


def refuse_late(*_: Any, **__: Any) -> Any:
    """In the place of a call that comes too late."""
    raise TransientError("the time for its mutation had passed before anything was sent")


def is_approved(flight: Flight) -> bool:
    """Whether a person allowed it, however long ago it was asked for."""
    return flight.mutation.approved_at is not None


def is_applied(judged: Judged) -> bool:
    """Whether it happened."""
    return judged.step is Step.APPLIED


def applied(flight: Flight, judged: Judged, limits: Limits) -> Applied:
    """It happened, whatever its result looks like."""
    result = storable(judged.result, limits, ".".join(flight.name))
    return Applied(mutation_id=MutationId(flight.mutation.id), result=result, fence=Fence(flight.held.fence))


def failed(flight: Flight, judged: Judged) -> Failed:
    """It did not happen: somebody said so, or it was not found."""
    evidence = Evidence.DEFINITE if judged.step is Step.FAILED else Evidence.ABSENCE
    mutation_id = MutationId(flight.mutation.id)
    fence, asked_at = flight.held.fence, flight.asked_at
    return Failed(mutation_id=mutation_id, error=judged.reason, evidence=evidence, asked_at=asked_at, fence=fence)
