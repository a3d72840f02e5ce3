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
from pipeline.domain.errors import (
    AuthError,
    EventError,
    LogicError,
    PipelineError,
    ReservationError,
    TamperedError,
    TransientError,
)
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import EventId, MutationOutcome, MutationStatus, Phase, RunStatus
from pipeline.domain.workflows import AfterFailedMutation, BlockKind, OnExhausted, OnLogicError, OnUncertain


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
    frames: str = ""  #: where it was raised: the last lines of the traceback, without the message
    retry_after: timedelta = timedelta(0)  #: how long the outside system asks to be left alone
    quiet_period: timedelta = timedelta(
        0
    )  #: how long a call that did not return by its deadline may still do something
    culprits: tuple[EventId, ...] = ()  #: events known to be the cause, of a run that sees more than one
    cost: Decimal | None = None  #: of the phase that failed, until then
    shown: tuple[EventId, ...] = ()  #: events that a prepare was shown which owns none and chooses among all


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run at the moment it stops."""

    phase: Phase
    outcome: MutationOutcome
    mutation: MutationStatus | None
    can_reconcile: bool  #: the operation in the ledger knows how to ask the outside system
    blamed_events: int  #: events that the failure is put down to: named, reserved, offered or shown
    earlier_failures: int  #: how often these events, or the plan of this run, failed before
    after_failed: AfterFailedMutation
    on_uncertain: OnUncertain
    on_logic_error: OnLogicError
    on_exhausted: OnExhausted
    slice_limit: int | None = None  #: the largest slice in which these events may be offered; None: not narrowed yet
    can_be_narrowed: bool = True  #: they neither stay together nor were declined in a smaller slice
    handler_failures: int = 0  #: failed runs in a row of a handler that runs alone
    has_later_commit: bool = False  #: a run that began after these events first failed has committed others
    has_other_failures: bool = False  #: since the handler's last commit, runs without these events failed too


@dataclass(frozen=True, slots=True, kw_only=True)
class StopDecision:
    """Everything a stop writes besides the error itself."""

    status: RunStatus
    disposition: Disposition
    block: BlockKind | None = None
    maintenance: bool = False
    quarantine: bool = False  #: released inputs are set aside instead of becoming pending
    slice_limit: int | None = None  #: released inputs are offered in slices of at most this size; no failure is counted
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
    culprits = (error.event_id,) if isinstance(error, EventError | TamperedError) and hasattr(error, "event_id") else ()
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

    1. An unresolved mutation outranks every kind of failure: it must be reconciled first.
    2. A failure of several events is narrowed down: they are offered again in halves, and none is counted.
    3. An event that failed alone as often as the policy allows is set aside, or the workflow is blocked.
    """
    side = side_of(facts.phase, facts.outcome, facts.mutation)
    disposition = disposition_of(side, facts.outcome, facts.after_failed)
    if side is Side.UNKNOWN:
        return _uncertain(facts, disposition)
    match failure.kind:
        case FailureKind.LOGIC:
            return _logic(failure, facts, disposition, policy, jitter)
        case FailureKind.AUTH:
            return StopDecision(status=RunStatus.PAUSED_APPROVAL, disposition=disposition, block=BlockKind.APPROVAL)
        case FailureKind.INTERNAL if facts.on_exhausted is OnExhausted.BLOCK:
            return _blocked(disposition)
        case FailureKind.TRANSIENT | FailureKind.CRASH | FailureKind.INTERNAL:
            return _transient(failure, facts, disposition, policy, jitter)
        case FailureKind.VOID:  # no code failed: a fresh run asks again, at once
            return StopDecision(status=RunStatus.PAUSED_TRANSIENT, disposition=disposition)
        case _ as never:
            assert_never(never)


def narrowed_limit(failure: Failure, facts: RunFacts, disposition: Disposition) -> int | None:
    """The size of the slices in which released inputs are tried again; None if they cannot be narrowed down.

    Half of them, or one by one after a crash: each further crash would take other runs along. The limit shrinks with
    every round, so that the rounds are bounded by the logarithm of the slice. Inputs that are together again in spite
    of their limit, such as one event of each of two topics, cannot be narrowed down. Nor can inputs that stay together:
    a request for them may have happened in spite of its verdict, and a part of them would be sent under another
    idempotency key.
    """
    if facts.blamed_events < 2 or not facts.can_be_narrowed or disposition.inputs is InputAction.KEEP:
        return None
    limit = 1 if failure.kind is FailureKind.CRASH else -(-facts.blamed_events // 2)
    return limit if facts.slice_limit is None or limit < facts.slice_limit else None


def is_own_trouble(facts: RunFacts) -> bool:
    """Whether exhausted events fail by themselves. If not, everything fails, such as while a provider is away.

    | a later run committed | runs without these events failed | own trouble |
    |---|---|---|
    | yes | any | yes: others succeed while these fail |
    | no | no | yes: all failures have these events in common |
    | no | yes | no: the failures have nothing in common |
    """
    return facts.has_later_commit or not facts.has_other_failures


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
    facts: RunFacts,
    disposition: Disposition,
    policy: FailurePolicy,
    jitter: float,
) -> StopDecision:
    """Another run follows after a pause, until the failures are exhausted."""
    status = RunStatus.CRASHED if failure.kind is FailureKind.CRASH else RunStatus.PAUSED_TRANSIENT
    limit = narrowed_limit(failure, facts, disposition)
    if limit is None and (ended := _exhausted(failure, facts, disposition, policy)):
        return ended
    failures = max(facts.earlier_failures, facts.handler_failures) + 1
    return StopDecision(
        status=status,
        disposition=disposition,
        slice_limit=limit,
        delay=_pause(failure, policy, 1 if limit else failures, jitter),
    )


def _exhausted(
    failure: Failure, facts: RunFacts, disposition: Disposition, policy: FailurePolicy
) -> StopDecision | None:
    """What follows when the allowed failures are used up; None while some are left.

    A handler that runs alone also blocks after as many failures in a row that have nothing in common.
    """
    is_spent = facts.earlier_failures + 1 >= policy.max_failures
    can_set_aside = facts.blamed_events > 0 and disposition.side is Side.BEFORE
    if facts.on_exhausted is OnExhausted.QUARANTINE and can_set_aside and is_own_trouble(facts):
        return _set_aside(failure, facts, RunStatus.FAILED_INTERNAL) if is_spent else None
    return _blocked(disposition) if is_spent or facts.handler_failures + 1 >= policy.max_failures else None


def _logic(
    failure: Failure, facts: RunFacts, disposition: Disposition, policy: FailurePolicy, jitter: float
) -> StopDecision:
    """Maintenance stops the workflow; quarantine sets the inputs aside once they failed often enough.

    Only inputs whose mutation did not happen can be set aside. A run that waits for a retry is tried again
    until its budget is spent; a run without inputs of its own leaves nothing to set aside.
    """
    failures, status = facts.earlier_failures + 1, RunStatus.FAILED_LOGIC
    if facts.on_logic_error is OnLogicError.MAINTENANCE or not facts.blamed_events:
        return StopDecision(status=status, disposition=disposition, maintenance=True)
    limit = narrowed_limit(failure, facts, disposition)
    releases = disposition.inputs is InputAction.RELEASE
    if limit or failures < (policy.quarantine_after if releases else policy.max_failures):
        delay = _pause(failure, policy, 1 if limit else failures, jitter)
        return StopDecision(status=status, disposition=disposition, slice_limit=limit, delay=delay)
    if disposition.side is Side.BEFORE:
        return _set_aside(failure, facts, status)
    return StopDecision(status=status, disposition=disposition, block=BlockKind.INTERNAL)


def _set_aside(failure: Failure, facts: RunFacts, status: RunStatus) -> StopDecision:
    """Quarantine the inputs, also those of a plan that is tried again. Several inputs of it are narrowed down first."""
    released = Disposition(side=Side.BEFORE, inputs=InputAction.RELEASE)
    limit = narrowed_limit(failure, facts, released)
    return StopDecision(status=status, disposition=released, quarantine=limit is None, slice_limit=limit)


def _pause(failure: Failure, policy: FailurePolicy, failures: int, jitter: float) -> timedelta:
    """The pause before the next run. A first crash is followed at once: no code was at fault."""
    attempt = failures - 1 if failure.kind is FailureKind.CRASH else failures
    return max(failure.retry_after, policy.backoff.delay(attempt, jitter=jitter) if attempt else timedelta(0))


def _blocked(disposition: Disposition) -> StopDecision:
    return StopDecision(status=RunStatus.FAILED_INTERNAL, disposition=disposition, block=BlockKind.INTERNAL)
