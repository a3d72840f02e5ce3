"""Decide what follows when a run stops: classification, status and consequences. Pure: no I/O.

``decide`` is the whole of it: from a failure and the facts of the run to the values that the stop
verb writes. Nothing else in the project decides what a failure means.
"""

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from pathlib import PurePath
from typing import assert_never

from pipeline.domain.boundary import Disposition, InputAction, Side, disposition_of, side_of
from pipeline.domain.errors import AuthError, EventError, LogicError, PipelineError, ReservationError, TransientError
from pipeline.domain.ids import EventId
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import AfterFailedMutation, BlockKind, OnLogicError, OnUncertain


class FailureKind(StrEnum):
    """The classes of failure that are followed up differently."""

    TRANSIENT = "transient"  #: an outside system failed for now
    LOGIC = "logic"  #: the workflow's code is wrong
    AUTH = "auth"  #: credentials or permissions need an operator
    INTERNAL = "internal"  #: the host failed
    CRASH = "crash"  #: the worker vanished
    VOID = "void"  #: the approved request is not what would be sent now


#: What Python raises when the code is wrong.
_LOGIC_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
_TRANSIENT_CATEGORIES = ("system", "timeout")  #: categories of the consumer engine that another run may not meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A classified error, with a message for operators."""

    kind: FailureKind
    message: str
    error_type: str = ""
    retry_after: timedelta = timedelta(0)  #: how long the outside system asks to be left alone
    quiet_period: timedelta = timedelta(
        0
    )  #: how long a call that did not return by its deadline may still do something
    culprits: tuple[EventId, ...] = ()  #: events known to be the cause, of a run that sees more than one
    cost: Decimal | None = None  #: of the phase that failed, until then


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run at the moment it stops."""

    phase: Phase
    outcome: MutationOutcome
    mutation: MutationStatus | None
    can_reconcile: bool  #: the operation in the ledger knows how to ask the outside system
    has_inputs: bool  #: events were reserved by it or offered to it alone
    earlier_failures: int  #: how often this work failed in a row before
    after_failed: AfterFailedMutation
    on_uncertain: OnUncertain
    on_logic_error: OnLogicError


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDecision:
    """Everything a stop writes besides the error itself."""

    status: RunStatus
    disposition: Disposition
    block: BlockKind | None = None
    maintenance: bool = False
    quarantine: bool = False  #: released inputs are set aside instead of becoming pending
    delay: timedelta = timedelta(0)  #: how long the next run waits
    doubt: MutationStatus | None = None  #: where an in-flight ledger row goes


def classify(error: BaseException) -> Failure:
    """Classify an exception. An unknown exception is a transient failure of an outside system.

    An error of this package that is not a ``HandlerError`` means the handler broke a rule of the
    host, and the same code would break it again.
    """
    match error:
        case TransientError() | ReservationError(is_race=True):
            kind = FailureKind.TRANSIENT
        case PipelineError() if getattr(error, "category", None) in _TRANSIENT_CATEGORIES:
            kind = FailureKind.TRANSIENT
        case AuthError():
            kind = FailureKind.AUTH
        case LogicError() | PipelineError():
            kind = FailureKind.LOGIC
        case OSError():  # of the network or the disk, also one that is a ValueError too, as of an expired certificate
            kind = FailureKind.TRANSIENT
        case _ if isinstance(error, _LOGIC_ERRORS):
            kind = FailureKind.LOGIC
        case MemoryError():
            kind = FailureKind.INTERNAL
        case _:
            kind = FailureKind.TRANSIENT
    culprits = (error.event_id,) if isinstance(error, EventError) and hasattr(error, "event_id") else ()
    return Failure(kind=kind, message=_message(error), error_type=type(error).__qualname__, culprits=culprits)


def _message(error: BaseException) -> str:
    """The message of an error, even if ``str`` fails. One that is not ours gets its name and its line."""
    try:
        message, name = str(error), type(error).__qualname__
        if isinstance(error, PipelineError):
            return message
        return f"{name}: {message}{error_location(error)}" if message else f"{error!r}{error_location(error)}"
    except Exception:  # noqa: BLE001 - the error is the handler's, and so is its __str__
        return f"{type(error).__qualname__}, which cannot say what happened"


def error_location(error: BaseException) -> str:
    """The file and the line where an error was raised, in brackets. Empty for an error that was not raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""


def decide(failure: Failure, facts: RunFacts, policy: FailurePolicy, *, jitter: float = 0.0) -> StopDecision:
    """What follows when this run stops with this failure.

    An unresolved mutation outranks every kind of failure: it must be reconciled first.
    """
    side = side_of(facts.phase, facts.outcome, facts.mutation)
    disposition = disposition_of(side, facts.outcome, facts.after_failed)
    if side is Side.UNKNOWN:
        return _uncertain(facts, disposition)
    match failure.kind:
        case FailureKind.TRANSIENT | FailureKind.CRASH:
            return _transient(failure, facts, disposition, policy, jitter)
        case FailureKind.LOGIC:
            return _logic(facts, disposition, policy, jitter)
        case FailureKind.AUTH:
            return StopDecision(status=RunStatus.PAUSED_APPROVAL, disposition=disposition, block=BlockKind.APPROVAL)
        case FailureKind.INTERNAL:
            return _exhausted(disposition)
        case FailureKind.VOID:  # no code failed: a fresh run asks again, at once
            return StopDecision(status=RunStatus.PAUSED_TRANSIENT, disposition=disposition)
        case _ as never:
            assert_never(never)


def _uncertain(standing: RunFacts, disposition: Disposition) -> StopDecision:
    doubt = None
    if standing.mutation is MutationStatus.IN_FLIGHT:
        doubt = MutationStatus.NEEDS_RECONCILE if standing.can_reconcile else MutationStatus.INDETERMINATE
    pauses = standing.on_uncertain is OnUncertain.PAUSE
    return StopDecision(
        status=RunStatus.PAUSED_RECONCILIATION,
        disposition=disposition,
        block=BlockKind.RECONCILIATION if pauses else None,
        doubt=doubt,
    )


def _transient(
    failure: Failure,
    standing: RunFacts,
    disposition: Disposition,
    policy: FailurePolicy,
    jitter: float,
) -> StopDecision:
    """Another run follows after a pause. A first crash is followed at once: no code was at fault."""
    crashed = failure.kind is FailureKind.CRASH
    failures = standing.earlier_failures + 1
    if failures >= policy.max_failures:
        return _exhausted(disposition)
    attempt = failures - 1 if crashed else failures
    return StopDecision(
        status=RunStatus.CRASHED if crashed else RunStatus.PAUSED_TRANSIENT,
        disposition=disposition,
        delay=max(failure.retry_after, policy.backoff.delay(attempt, jitter=jitter) if attempt else timedelta(0)),
    )


def _logic(standing: RunFacts, disposition: Disposition, policy: FailurePolicy, jitter: float) -> StopDecision:
    """Maintenance stops the workflow; quarantine sets the inputs aside once they failed often enough.

    Only inputs that go back can be set aside. A run that must be carried forward is tried again
    until its budget is spent; a run without inputs of its own leaves nothing to set aside.
    """
    failures = standing.earlier_failures + 1
    if standing.on_logic_error is OnLogicError.MAINTENANCE or not standing.has_inputs:
        return StopDecision(status=RunStatus.FAILED_LOGIC, disposition=disposition, maintenance=True)
    releases = disposition.inputs is InputAction.RELEASE
    spent = failures >= (policy.quarantine_after if releases else policy.max_failures)
    if not spent:
        return StopDecision(
            status=RunStatus.FAILED_LOGIC,
            disposition=disposition,
            delay=policy.backoff.delay(failures, jitter=jitter),
        )
    return StopDecision(
        status=RunStatus.FAILED_LOGIC,
        disposition=disposition,
        quarantine=releases,
        block=None if releases else BlockKind.INTERNAL,
    )


def _exhausted(disposition: Disposition) -> StopDecision:
    return StopDecision(status=RunStatus.FAILED_INTERNAL, disposition=disposition, block=BlockKind.INTERNAL)
