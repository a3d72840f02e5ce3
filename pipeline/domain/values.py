"""Values that callers hand to transitions and that a claim hands to a worker, costs among them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from decimal import Context, Decimal
from typing import Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from pipeline.domain.codec import Codec
from pipeline.domain.errors import LogicError
from pipeline.domain.failures import Failure
from pipeline.domain.payloads import checked_json, checked_name, checked_text
from pipeline.domain.policies import FailurePolicy, Retention, WakePolicy
from pipeline.domain.states import EventId, Evidence, Fence, MutationId, Resolver, RunId
from pipeline.domain.workflows import (
    AfterFailedMutation,
    HandlerKind,
    OnExhausted,
    OnLogicError,
    OnUncertain,
    StartAt,
)


class Limits(BaseModel):
    """Bounds that keep a cohort's statement small enough to stay fast."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    payload: int = Field(default=262_144, ge=1)
    prepare_result: int = Field(default=1_048_576, ge=1)
    params: int = Field(default=262_144, ge=1)
    result: int = Field(default=262_144, ge=1)
    state: int = Field(default=65_536, ge=1)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The operator or sweep that acts, with the reason. It is stored in the audit, so it must be storable."""

    name: str
    reason: str = ""
    evidence: Mapping[str, Any] | None = None
    is_claimed: bool = False  #: the name is what the caller says; nothing authenticated it

    def __post_init__(self) -> None:
        checked_name(self.name, what="the name of the actor")
        checked_text(self.reason, what=f"the reason {self.name} gives")
        checked_json(self.evidence, what=f"the evidence {self.name} gives", limit=DEFAULT_LIMITS.payload)


@dataclass(frozen=True, slots=True)
class RunLease:
    """A run as its worker holds it. Every write by that worker carries the fence."""

    run_id: RunId
    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHeader:
    """Describe an event without its payload. Every value that describes an event derives from this one.

    A field that is added here is checked, stored, read, given to handlers and shown to operators. It needs a column of
    the same name in ``store/schema.py`` and a migration.
    """

    topic: str
    message_id: str
    key: str | None = None
    title: str | None = field(default=None, metadata={"check": checked_text})


HEADER_FIELDS = tuple(each.name for each in fields(EventHeader))
#: Of each field: its name, its name in messages, how it is checked, and whether it may be None.
_HEADER_CHECKS: tuple[tuple[str, str, Callable[..., str], bool], ...] = tuple(
    (each.name, each.name.replace("_", " "), each.metadata.get("check", checked_name), each.default is None)
    for each in fields(EventHeader)
)


def header_of(row: object) -> dict[str, Any]:
    """The header's fields of a row or of another value, to make a value that derives from the header."""
    return {name: getattr(row, name) for name in HEADER_FIELDS}


def checked_header(header: EventHeader) -> dict[str, Any]:
    """The header's fields as they are stored. Raise ``PayloadError`` if one cannot be stored."""
    return {
        name: None if (value := getattr(header, name)) is None and is_optional else check(value, what=spoken)
        for name, spoken, check, is_optional in _HEADER_CHECKS
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent(EventHeader):
    """An event to publish. The first write under a message id wins."""

    payload: Any
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Events of one topic that a run reserves as its inputs."""

    topic: str
    ids: tuple[EventId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """What a prepare decided."""

    lease: RunLease
    reservations: tuple[Reservation, ...] = ()
    data: Any = None
    ui: Any = None
    wake_at: datetime | None = None
    needs_approval: bool = False
    cost: Decimal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The one mutation a run asks for, exactly as it will be sent."""

    lease: RunLease
    connector: str
    operation: str
    params: Any
    request_hash: str
    effect_id: UUID  #: of ``domain.idempotency``; the idempotency key is made of it
    timeout: timedelta
    settle: timedelta = timedelta(0)
    monitor_after: timedelta | None = (
        None  #: when it is checked for a late effect after it was resolved on weak evidence
    )
    reconcilable: bool = False
    keyed: bool = False  #: the outside system honours the idempotency key
    key_lifetime: timedelta | None = None  #: how long it keeps a key; None: not declared
    needs_approval: bool = False
    cost: Decimal | None = None  #: of the phase that asked for it
    passes_breaker: bool = False  #: it is sent although a breaker may be open, which the sender has asked
    headline: str = ""  #: one redacted line that says what it does
    message_ids: tuple[str, ...] = ()  #: of its inputs
    four_eyes_value: Decimal | None = None  #: two people must decide about it, because of this value


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedMutation:
    """It happened. With a fence when the worker that sent it says so, without when found out later."""

    mutation_id: MutationId
    result: Any = None
    fence: Fence | None = None
    resolved_by: Resolver = Resolver.CALL
    cost: Decimal | None = None  #: of its calls, as far as it is not recorded yet
    workflow: str = ""  #: whose codec seals the result


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMutation:
    """A mutation that did not happen, with the evidence."""

    mutation_id: MutationId
    error: str
    evidence: Evidence
    reconcile_started_at: datetime | None = (
        None  #: when the reconcile attempt began that did not find it; None: just now
    )
    fence: Fence | None = None
    resolved_by: Resolver = Resolver.CALL


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """A run that cannot go on, and why."""

    lease: RunLease
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput:
    """What ``next`` (or a producer) produced. ``state`` counts only when ``has_state`` is set."""

    lease: RunLease
    events: tuple[NewEvent, ...] = ()
    state: Any = None
    has_state: bool = False
    sealed_state: Any = None  #: the state as it is written for the run; None: as it is
    next_run_at: datetime | None = None
    cost: Decimal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic as its workflow declares it."""

    name: str
    schema: Any = None
    renamed_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """Options that every handler takes."""

    renamed_from: str = ""
    failures: FailurePolicy = field(default_factory=FailurePolicy, metadata={"column": "failure_policy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions(HandlerOptions):
    """Options of a consumer, declared once: types and defaults are taken from here.

    An option that the database needs is a column of ``handlers`` in ``store/schema.py``, and is written when the
    workflow is registered. The others are read by the worker from its own code.
    """

    batch: int = 1
    ordered: bool = False
    requires_approval: bool = False
    after_failed_mutation: AfterFailedMutation = AfterFailedMutation.PREPARE
    start_at: StartAt = StartAt.LATEST
    wake: WakePolicy = field(default_factory=WakePolicy)


def options_of(consumer: ConsumerOptions) -> dict[str, Any]:
    """The options of a consumer, to make another value that has them."""
    return {each.name: getattr(consumer, each.name) for each in fields(ConsumerOptions)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec(ConsumerOptions):
    """A handler as its workflow declares it. A producer has the failure policy only."""

    name: str
    kind: HandlerKind = HandlerKind.CONSUMER
    subscribes: tuple[str, ...] = ()
    publishes: tuple[str, ...] = ()
    schedule: str | None = None  #: of a producer: when it changes, the next slot is booked anew
    first_run_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSpec:
    """A workflow as its code declares it."""

    name: str
    topics: tuple[TopicSpec, ...]
    handlers: tuple[HandlerSpec, ...]
    version: int = 1
    fingerprint: str = ""
    concurrency: int = 1
    on_uncertain: OnUncertain = OnUncertain.PAUSE
    on_logic_error: OnLogicError = OnLogicError.MAINTENANCE
    on_exhausted: OnExhausted = OnExhausted.BLOCK
    retention: Retention = field(default_factory=Retention)
    renamed_from: str = ""
    codec: Codec | None = None


DIGITS_BEFORE_POINT = 12
DIGITS_AFTER_POINT = 12

_EXACT = Context(prec=60)  #: of our own: a handler may have set another precision for its thread


def checked_cost(amount: Any) -> Decimal:
    """Return an amount as it is stored. Raise ``LogicError`` if it is not a cost."""
    if problem := _problem(amount):
        raise LogicError(
            f"add_cost was given {problem}; expected a Decimal or an int that is not negative, with at most "
            f"{DIGITS_BEFORE_POINT} digits before the point and {DIGITS_AFTER_POINT} after it"
        )
    return Decimal(amount).copy_abs()  # without the sign of a negative zero


def total_cost(amounts: Iterable[Decimal | None]) -> Decimal | None:
    """Return the exact sum; None if nothing was reported."""
    total: Decimal | None = None
    for amount in amounts:
        if amount is not None:
            total = amount if total is None else _EXACT.add(total, amount)
    return total


def session_cost(kept: Decimal | None, of_runs: Decimal | None, *, is_over: bool) -> Decimal | None:
    """Return the cost of a session from its own row and from its runs that are still there.

    The row of an open session has the cost of the runs that retention has deleted. The row of a session that is over
    has what its runs had reported until then; some may have reported more since, others may be deleted.
    """
    if is_over:
        return max((cost for cost in (kept, of_runs) if cost is not None), default=None)
    return total_cost([kept, of_runs])


def _problem(amount: Any) -> str:
    if isinstance(amount, bool) or not isinstance(amount, int | Decimal):
        return f"a {type(amount).__name__}"
    number = Decimal(amount)
    if not number.is_finite() or number < 0:
        return "a number that is negative or not finite"
    if number.adjusted() >= DIGITS_BEFORE_POINT:
        return "a number with too many digits before the point"
    if -int(number.as_tuple().exponent) > DIGITS_AFTER_POINT:
        return "a number with too many digits after the point"
    return ""
