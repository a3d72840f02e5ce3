"""The life of one item, from the first attempt at it to the handler that settles it. A generator, like its attempts.

There is one place where an item's next step is chosen, and it is here: no timeout starts a second
life beside the first. So exactly one handler settles an item, and the exception handler is entered
once at most.
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
    """What the engine calls of a task, and what it must obey while it does."""

    context: EngineContext
    policy: ConsumerPolicy
    in_flight: InFlight
    steps: Mapping[Step, StepSpec]
    transaction_timeout: float | None

    @classmethod
    def of(
        cls, host: EngineContext, policy: ConsumerPolicy, in_flight: InFlight, calls: Mapping[Step, Callable[..., Any]]
    ) -> "ConsumerSetup":
        """The hooks of a task, each with its policy."""
        works = {
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
        return cls(host, policy, in_flight, works, policy.loop.transaction_timeout)


class WorkItem(StepTarget):
    """An item somebody works on, and what is known of it so far."""

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
        """Whether the caller is the first who wants to settle it: its worker, by entering a handler, or the loop,
        by giving it up. Nobody else ever is."""
        return self._claimed.acquire(blocking=False)

    def hold_until_ended(self) -> Callable[[], None]:
        """Keeps the id taken until code that was left behind has ended."""
        return self._in_flight.hold_abandoned(self.transaction.transaction_id)


def run_item(hooks: ConsumerSetup, item: WorkItem) -> ItemGenerator:
    """Live the life of an item whose id was taken; gives the id back at its end."""
    observer = hooks.context.observer
    return _run_observed(hooks, item) if observer.is_traced or observer.is_metered else _run_timed(hooks, item)


def _run_timed(hooks: ConsumerSetup, item: WorkItem) -> ItemGenerator:
    clock = hooks.context.clock
    item.is_started, begun = True, clock()
    if hooks.transaction_timeout is not None:
        item.ends_at = begun + hooks.transaction_timeout
    try:
        status, unhandled = yield from _run_steps(hooks, item)
    finally:
        hooks.in_flight.release(item.transaction.transaction_id)
    return ItemOutcome(item.transaction, status, item.attempts, item.value, item.failure, unhandled, clock() - begun)


def _run_observed(hooks: ConsumerSetup, item: WorkItem) -> ItemGenerator:
    """The same, seen as a span and counted. What was left is counted by the loop that gave it up."""
    observer = hooks.context.observer
    observer.count("pipeline.consumer_engine.in_flight", 1)
    try:
        with observer.item(item.transaction) as span:
            outcome = yield from _run_timed(hooks, item)
            observer.mark_ended(span, outcome.status.value, outcome.error)
    finally:
        observer.count("pipeline.consumer_engine.in_flight", -1)
    if outcome.status is not ItemStatus.UNFINISHED:
        observer.count("pipeline.consumer_engine.transactions", status=outcome.status.value)
        observer.count("pipeline.consumer_engine.transaction.duration", outcome.seconds, status=outcome.status.value)
    return outcome


def _run_steps(
    hooks: ConsumerSetup, item: WorkItem
) -> Generator[Request, Any, tuple[ItemStatus, TransactionException | None]]:
    """One step after the other, until one settles the item."""
    step = Step.PROCESS
    while True:
        ended = yield from run_attempts(hooks.context, hooks.steps[step], _arguments(item, step), item)
        item.attempts[step] = ended.attempts
        if ended.is_stopped:
            return ItemStatus.UNFINISHED, None
        if step is Step.EXCEPTION:
            _log_failure(hooks, item, ended.failure)
            return final_status(step, failed=True, is_time_up=item.is_past_deadline), ended.failure
        failed = ended.failure is not None or ended.is_past_deadline
        if failed:
            _record_failure(hooks, item, ended)
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


def _record_failure(hooks: ConsumerSetup, item: WorkItem, ended: StepResult) -> None:
    """Remember why a step failed, for the handler that follows it."""
    item.failure = ended.failure
    if ended.is_past_deadline:
        who, limit = printable_id(item.transaction.transaction_id), hooks.transaction_timeout
        words = f"{who} was not done within {limit:g} s, the time of a transaction"
        if ended.failure is not None and ended.error is not None:  # who only sees a timeout looks for something slow
            words = f"{words}; the last attempt: {failure_description(ended.failure)}"
        item.is_past_deadline = True
        item.failure = TransactionException(words, ExceptionType.TIMEOUT, item.transaction_id, cause=ended.failure)
        hooks.context.observer.count("pipeline.consumer_engine.timeouts", scope="transaction")


def _log_failure(hooks: ConsumerSetup, item: WorkItem, unhandled: TransactionException | None) -> None:
    """Say in the log that an item failed; nothing of its payload is known here."""
    assert item.failure is not None
    task, who = hooks.context.observer.task, printable_id(item.transaction.transaction_id)
    for failure, level, words in (
        (item.failure, logging.WARNING, "%s: transaction %s failed (%s): %s"),
        (unhandled, logging.ERROR, "%s: the exception handler failed for transaction %s (%s): %s"),
    ):
        if failure is not None and log.isEnabledFor(level):
            log.log(level, words, task, who, failure.category.value, failure_description(failure))
            log.debug("%s: transaction %s, where it failed:\n%s", task, who, _traceback_text(failure))


def _traceback_text(failure: TransactionException) -> str:
    """The lines an error came through. Not its own words: those were said, and their long form may show a payload."""
    raised: BaseException = failure
    for _ in range(2):  # the time of the item is around the kind of the error, and that around the error itself
        if isinstance(raised, TransactionException) and raised.__cause__ is not None:
            raised = raised.__cause__
    return "".join(traceback.format_tb(raised.__traceback__))
