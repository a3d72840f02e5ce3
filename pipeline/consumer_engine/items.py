"""The steps of one item, from its first attempt to the handler that settles it.

This generator alone chooses an item's next step; no timeout starts a second one beside it. So exactly
one handler settles an item, and the exception handler is entered at most once.
"""

import functools
import logging
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.consumer_engine.attempts import (
    EngineContext,
    Request,
    StepResult,
    StepSpec,
    StepTarget,
    attempt_again,
    begin_attempt,
    end_attempt,
    run_attempts,
)
from pipeline.consumer_engine.bounded import CallResult, InFlight
from pipeline.consumer_engine.errors import ExceptionType, TransactionException, failure_description, printable_id
from pipeline.consumer_engine.lifecycle import (
    ItemOutcome,
    ItemStatus,
    Step,
    final_status,
    next_step,
    retry_of,
)
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.transactions import Transaction

log = logging.getLogger("pipeline.consumer_engine")

ItemGenerator = Generator[Request, Any, ItemOutcome]
StepsGenerator = Generator[Request, Any, tuple[ItemStatus, TransactionException | None]]


@dataclass(slots=True)
class ConsumerSetup:
    """The functions that the engine calls, with their policy and context."""

    context: EngineContext
    policy: ConsumerPolicy
    in_flight: InFlight
    steps: Mapping[Step, StepSpec]
    transaction_timeout: float | None
    #: whether attempts to process an item and to settle its success have no limits, and nothing observes them
    is_plain: bool = False
    has_success_handler: bool = True  #: False if the default one has nothing to do
    acknowledge: StepSpec | None = None  #: how the engine acknowledges the succeeded items of a batch

    @classmethod
    def of(
        cls,
        context: EngineContext,
        policy: ConsumerPolicy,
        in_flight: InFlight,
        calls: Mapping[Step, Callable[..., Any]],
    ) -> "ConsumerSetup":
        """Build the setup of a task, each step with its policy."""
        specs = {
            step: StepSpec(
                step=step,
                function=functools.partial(function, **policy.steps.fetch.extra) if step is Step.FETCH else function,
                retry=retry_of(policy.steps, step),
                always_begins=step is Step.EXCEPTION,
                is_stoppable=step is Step.FETCH,
            )
            for step, function in calls.items()
        }
        limits = [policy.loop.transaction_timeout, specs[Step.PROCESS].retry.timeout, specs[Step.SUCCESS].retry.timeout]
        is_observed = context.observer.is_traced or context.observer.is_metered
        is_plain = not is_observed and all(limit is None for limit in limits)
        return cls(context, policy, in_flight, specs, policy.loop.transaction_timeout, is_plain)


@dataclass(slots=True)
class Batch:
    """A batch as the source gave it."""

    open: int  #: items that have not ended
    succeeded: list[Transaction] = field(default_factory=list)


class WorkItem(StepTarget):
    """An item in progress, and its state so far."""

    __slots__ = (
        "_claimed",
        "_in_flight",
        "attempts",
        "batch",
        "begun_at",
        "cut",
        "failure",
        "is_past_deadline",
        "is_started",
        "transaction",
        "value",
    )

    def __init__(self, transaction: Transaction, in_flight: InFlight, batch: "Batch | None" = None) -> None:
        self.transaction, self.batch = transaction, batch
        self.transaction_id = transaction.transaction_id
        self.ends_at = None
        self.attempts: dict[Step, int] = {}
        self.value: Any = None
        self.failure: TransactionException | None = None
        self.cut: Step | None = None
        self.begun_at: float | None = None  #: on the clock of the context
        self.is_started = self.is_past_deadline = False
        self._claimed = threading.Lock()
        self._in_flight = in_flight

    def begin(self, now: float) -> float:
        """Note that a worker has started on the item, and return the time."""
        self.is_started, self.begun_at = True, now
        return now

    def claim(self) -> bool:
        """Return whether the caller is the first to settle the item.

        Either its worker claims it by entering a handler, or the loop by giving it up. No other claim succeeds.
        """
        return self._claimed.acquire(blocking=False)

    def hold_until_ended(self) -> Callable[[], None]:
        """Keep the id taken until the abandoned call has ended."""
        return self._in_flight.hold_abandoned(self.transaction.transaction_id)


def run_item(setup: ConsumerSetup, item: WorkItem) -> ItemGenerator:
    """Process an item whose id was taken, and release the id at the end."""
    observer = setup.context.observer
    return _run_observed(setup, item) if observer.is_traced or observer.is_metered else _run_timed(setup, item)


def _run_timed(setup: ConsumerSetup, item: WorkItem) -> ItemGenerator:
    clock = setup.context.clock
    begun = item.begin(clock())
    if setup.transaction_timeout is not None:
        item.ends_at = begun + setup.transaction_timeout
    steps = _run_plain_steps if setup.is_plain else _run_steps
    try:
        status, unhandled = yield from steps(setup, item)
    finally:
        setup.in_flight.release(item.transaction.transaction_id)
    seconds = clock() - begun
    return ItemOutcome(item.transaction, status, item.attempts, item.value, item.failure, unhandled, seconds, item.cut)


def _run_observed(setup: ConsumerSetup, item: WorkItem) -> ItemGenerator:
    """Process an item in a span and count it. The loop counts items that it gave up."""
    observer = setup.context.observer
    observer.count("pipeline.consumer_engine.in_flight", 1)
    try:
        with observer.item(item.transaction) as span:
            outcome = yield from _run_timed(setup, item)
            observer.mark_ended(span, outcome.status.value, outcome.error)
    finally:
        observer.count("pipeline.consumer_engine.in_flight", -1)
    if outcome.status is not ItemStatus.UNFINISHED:
        observer.count("pipeline.consumer_engine.transactions", status=outcome.status.value)
        observer.count("pipeline.consumer_engine.transaction.duration", outcome.seconds, status=outcome.status.value)
    return outcome


def _run_plain_steps(setup: ConsumerSetup, item: WorkItem) -> StepsGenerator:
    """Do what `_run_steps` does, for less, as long as the first attempts return."""
    context, args = setup.context, _arguments(item, Step.PROCESS)
    for step in (Step.PROCESS, Step.SUCCESS):
        if context.is_over:
            return (yield from _run_steps(setup, item, step))
        if step is Step.PROCESS or setup.has_success_handler:
            attempt, token = begin_attempt(context, step, 1, item.transaction_id, None)
            try:
                value, error = yield setup.steps[step].function, args
            finally:
                end_attempt(attempt, token)
            if error is not None:
                return (yield from _run_steps(setup, item, step, CallResult(error=error)))
        item.attempts[step] = 1
        if step is Step.PROCESS:
            item.value, args = value, (item.transaction, value)
            if not item.claim():
                return ItemStatus.UNFINISHED, None  # the loop gave the item up first
    return ItemStatus.SUCCESS, None


def _run_steps(
    setup: ConsumerSetup, item: WorkItem, step: Step = Step.PROCESS, first: CallResult | None = None
) -> StepsGenerator:
    """Run one step after the other, until one settles the item or its time is up.

    ``first`` is how the first attempt of the first of these steps ended, if it was made.
    """
    while True:
        if step is Step.EXCEPTION:
            _extend_deadline(setup, item)
        spec, args = setup.steps[step], _arguments(item, step)
        attempts = (
            run_attempts(setup.context, spec, args, item)
            if first is None
            else attempt_again(setup.context, spec, args, item, first)
        )
        ended, first = (yield from attempts), None
        item.attempts[step] = ended.attempts
        if ended.is_stopped:
            return ItemStatus.UNFINISHED, None
        failure = _failure(setup, item, step, ended)
        following = next_step(step, failed=failure is not None, is_cut=ended.is_cut)
        if step is not Step.EXCEPTION:
            _record(item, step, ended.value, failure)
        if following is None:
            return _end(setup, item, step, failure)
        if step is Step.PROCESS and not item.claim():
            return ItemStatus.UNFINISHED, None  # the loop gave the item up first
        step = following


def _record(item: WorkItem, step: Step, value: Any, failure: TransactionException | None) -> None:
    """Keep the result or the failure of a step for the handler that follows."""
    if failure is not None:
        item.failure = failure
    elif step is Step.PROCESS:
        item.value = value


def _end(
    setup: ConsumerSetup, item: WorkItem, step: Step, failure: TransactionException | None
) -> tuple[ItemStatus, TransactionException | None]:
    """Return how an item ended with this step, and why its exception handler failed."""
    unhandled = failure if step is Step.EXCEPTION else None
    if item.failure is not None:
        _log_failure(setup, item, unhandled)
    return final_status(step, failed=failure is not None, is_time_up=item.is_past_deadline), unhandled


def _extend_deadline(setup: ConsumerSetup, item: WorkItem) -> None:
    """Give the exception handler of an item whose time is up the same time again."""
    now = setup.context.clock()
    if setup.transaction_timeout is not None and item.ends_at is not None and now >= item.ends_at:
        item.ends_at = now + setup.transaction_timeout


def _arguments(item: WorkItem, step: Step) -> tuple[Any, ...]:
    if step is Step.PROCESS:
        return (item.transaction,)
    return item.transaction, item.value if step is Step.SUCCESS else item.failure


def _failure(setup: ConsumerSetup, item: WorkItem, step: Step, ended: StepResult) -> TransactionException | None:
    """Return why a step failed. A timeout of the transaction is counted, with the step that ran then."""
    if not ended.is_past_deadline:
        return ended.failure
    item.is_past_deadline = True
    if ended.is_cut:
        item.cut = step
    setup.context.observer.count("pipeline.consumer_engine.timeouts", scope="transaction", step=str(step))
    item_id, limit = printable_id(item.transaction.transaction_id), setup.transaction_timeout
    message = f"{item_id} was not done within {limit:g} s, the timeout of a transaction"
    if ended.is_cut and step is not Step.PROCESS:
        message = f"{message}; its {step} handler was cut and may have settled it, or may still do so"
    if ended.failure is not None and ended.error is not None:  # the timeout alone would hide the failures
        message = f"{message}; the last attempt: {failure_description(ended.failure)}"
    return TransactionException(message, ExceptionType.TIMEOUT, item.transaction_id, cause=ended.failure)


def _log_failure(setup: ConsumerSetup, item: WorkItem, unhandled: TransactionException | None) -> None:
    """Log that an item failed, without its payload."""
    assert item.failure is not None
    task, item_id = setup.context.observer.task, printable_id(item.transaction.transaction_id)
    for failure, level, message in (
        (item.failure, logging.WARNING, "%s: transaction %s failed (%s): %s"),
        (unhandled, logging.ERROR, "%s: the exception handler failed for transaction %s (%s): %s"),
    ):
        if failure is not None and log.isEnabledFor(level):
            log.log(level, message, task, item_id, failure.category.value, failure_description(failure))
            log.debug("%s: transaction %s, where it failed:\n%s", task, item_id, _traceback_text(failure))


def _traceback_text(failure: TransactionException) -> str:
    """Return the traceback lines without the message, whose long form may show a payload."""
    raised: BaseException = failure
    for _ in range(2):  # a transaction timeout wraps the failure, which wraps the error itself
        if isinstance(raised, TransactionException) and raised.__cause__ is not None:
            raised = raised.__cause__
    return "".join(traceback.format_tb(raised.__traceback__))
