"""The steps of one item, from its first attempt to the handler that settles it.

This generator alone chooses an item's next step; no timeout starts a second one beside it. So exactly
one handler settles an item, and the exception handler is entered at most once.
"""

import functools
import logging
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.consumer_engine.attempts import EngineContext, Request, StepResult, StepSpec, StepTarget, run_attempts
from pipeline.consumer_engine.bounded import InFlight
from pipeline.consumer_engine.errors import ExceptionType, TransactionException, failure_description, printable_id
from pipeline.consumer_engine.lifecycle import (
    ItemOutcome,
    ItemStatus,
    Step,
    can_start_after_deadline,
    final_status,
    is_cut_at_deadline,
    next_step,
    retry_of,
)
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.transactions import Transaction

log = logging.getLogger("pipeline.consumer_engine")

ItemGenerator = Generator[Request, Any, ItemOutcome]


@dataclass(slots=True)
class ConsumerSetup:
    """The functions that the engine calls, with their policy and context."""

    context: EngineContext
    policy: ConsumerPolicy
    in_flight: InFlight
    steps: Mapping[Step, StepSpec]
    transaction_timeout: float | None

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
                is_timed=not can_start_after_deadline(step),
                is_cut_at_deadline=is_cut_at_deadline(step),
                is_stoppable=step is Step.FETCH,
            )
            for step, function in calls.items()
        }
        return cls(context, policy, in_flight, specs, policy.loop.transaction_timeout)


class WorkItem(StepTarget):
    """An item in progress, and its state so far."""

    __slots__ = (
        "_claimed",
        "_in_flight",
        "attempts",
        "failure",
        "is_past_deadline",
        "is_started",
        "transaction",
        "value",
    )

    def __init__(self, transaction: Transaction, in_flight: InFlight) -> None:
        self.transaction = transaction
        self.transaction_id = transaction.transaction_id
        self.ends_at = None
        self.attempts: dict[Step, int] = {}
        self.value: Any = None
        self.failure: TransactionException | None = None
        self.is_started = self.is_past_deadline = False
        self._claimed = threading.Lock()
        self._in_flight = in_flight

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
    item.is_started, begun = True, clock()
    if setup.transaction_timeout is not None:
        item.ends_at = begun + setup.transaction_timeout
    try:
        status, unhandled = yield from _run_steps(setup, item)
    finally:
        setup.in_flight.release(item.transaction.transaction_id)
    return ItemOutcome(item.transaction, status, item.attempts, item.value, item.failure, unhandled, clock() - begun)


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


def _run_steps(
    setup: ConsumerSetup, item: WorkItem
) -> Generator[Request, Any, tuple[ItemStatus, TransactionException | None]]:
    """Run one step after the other, until one settles the item."""
    step = Step.PROCESS
    while True:
        ended = yield from run_attempts(setup.context, setup.steps[step], _arguments(item, step), item)
        item.attempts[step] = ended.attempts
        if ended.is_stopped:
            return ItemStatus.UNFINISHED, None
        if step is Step.EXCEPTION:
            _log_failure(setup, item, ended.failure)
            return final_status(step, failed=True, is_time_up=item.is_past_deadline), ended.failure
        failed = ended.failure is not None or ended.is_past_deadline
        if failed:
            _record_failure(setup, item, ended)
        elif step is Step.PROCESS:
            item.value = ended.value
        following = next_step(step, failed=failed)
        if following is None:
            return final_status(step, failed=failed, is_time_up=item.is_past_deadline), None
        if step is Step.PROCESS and not item.claim():
            return ItemStatus.UNFINISHED, None  # the loop gave the item up first
        step = following


def _arguments(item: WorkItem, step: Step) -> tuple[Any, ...]:
    if step is Step.PROCESS:
        return (item.transaction,)
    return item.transaction, item.value if step is Step.SUCCESS else item.failure


def _record_failure(setup: ConsumerSetup, item: WorkItem, ended: StepResult) -> None:
    """Remember why a step failed, for the handler that follows."""
    item.failure = ended.failure
    if ended.is_past_deadline:
        item_id, limit = printable_id(item.transaction.transaction_id), setup.transaction_timeout
        message = f"{item_id} was not done within {limit:g} s, the timeout of a transaction"
        if ended.failure is not None and ended.error is not None:  # the timeout alone would hide the failures
            message = f"{message}; the last attempt: {failure_description(ended.failure)}"
        item.is_past_deadline = True
        item.failure = TransactionException(message, ExceptionType.TIMEOUT, item.transaction_id, cause=ended.failure)
        setup.context.observer.count("pipeline.consumer_engine.timeouts", scope="transaction")


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
