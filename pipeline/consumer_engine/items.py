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

from pipeline.consumer_engine.attempts import Host, Request, Subject, Tried, Work, tried
from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.guard import InFlight
from pipeline.consumer_engine.lifecycle import (
    Status,
    Step,
    begins_after_time,
    ended_as,
    follows,
    is_cut_by_time,
    retry_of,
)
from pipeline.consumer_engine.outcomes import Outcome
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.transactions import Transaction
from pipeline.consumer_engine.words import described, named

log = logging.getLogger("pipeline.engine")

Living = Generator[Request, Any, Outcome]


@dataclass(slots=True)
class Hooks:
    """What the engine calls of a task, and what it must obey while it does."""

    host: Host
    policy: ConsumerPolicy
    in_flight: InFlight
    works: Mapping[Step, Work]
    transaction_timeout: float | None

    @classmethod
    def of(
        cls, host: Host, policy: ConsumerPolicy, in_flight: InFlight, calls: Mapping[Step, Callable[..., Any]]
    ) -> "Hooks":
        """The hooks of a task, each with its policy."""
        works = {
            step: Work(
                step=step,
                function=functools.partial(function, **policy.steps.fetch.extra) if step is Step.FETCH else function,
                retry=retry_of(policy.steps, step),
                is_timed=not begins_after_time(step),
                is_cut=is_cut_by_time(step),
                ends_when_asked=step is Step.FETCH,
            )
            for step, function in calls.items()
        }
        return cls(host, policy, in_flight, works, policy.loop.transaction_timeout)


class Item(Subject):
    """An item somebody works on, and what is known of it so far."""

    __slots__ = ("_claimed", "_in_flight", "attempts", "failure", "is_begun", "is_time_up", "transaction", "value")

    def __init__(self, transaction: Transaction, in_flight: InFlight) -> None:
        self.transaction = transaction
        self.transaction_id = transaction.transaction_id
        self.ends_at = None
        self.attempts: dict[Step, int] = {}
        self.value: Any = None
        self.failure: TransactionException | None = None
        self.is_begun = self.is_time_up = False
        self._claimed = threading.Lock()
        self._in_flight = in_flight

    def claim(self) -> bool:
        """Whether the caller is the first who wants to settle it: its worker, by entering a handler, or the loop,
        by giving it up. Nobody else ever is."""
        return self._claimed.acquire(blocking=False)

    def left(self) -> Callable[[], None]:
        """Keeps the id taken until code that was left behind has ended."""
        return self._in_flight.share(self.transaction.transaction_id)


def lived(hooks: Hooks, item: Item) -> Living:
    """Live the life of an item whose id was taken; gives the id back at its end."""
    observer = hooks.host.observer
    return _observed(hooks, item) if observer.is_traced or observer.is_metered else _lived(hooks, item)


def _lived(hooks: Hooks, item: Item) -> Living:
    clock = hooks.host.clock
    item.is_begun, begun = True, clock()
    if hooks.transaction_timeout is not None:
        item.ends_at = begun + hooks.transaction_timeout
    try:
        status, unhandled = yield from _settled(hooks, item)
    finally:
        hooks.in_flight.release(item.transaction.transaction_id)
    return Outcome(item.transaction, status, item.attempts, item.value, item.failure, unhandled, clock() - begun)


def _observed(hooks: Hooks, item: Item) -> Living:
    """The same, seen as a span and counted. What was left is counted by the loop that gave it up."""
    observer = hooks.host.observer
    observer.count("pipeline.engine.in_flight", 1)
    try:
        with observer.item(item.transaction) as span:
            outcome = yield from _lived(hooks, item)
            observer.mark_ended(span, outcome.status.value, outcome.error)
    finally:
        observer.count("pipeline.engine.in_flight", -1)
    if outcome.status is not Status.LEFT:
        observer.count("pipeline.consumer_engine.transactions", status=outcome.status.value)
        observer.count("pipeline.engine.transaction.duration", outcome.seconds, status=outcome.status.value)
    return outcome


def _settled(hooks: Hooks, item: Item) -> Generator[Request, Any, tuple[Status, TransactionException | None]]:
    """One step after the other, until one settles the item."""
    step = Step.PROCESS
    while True:
        ended = yield from tried(hooks.host, hooks.works[step], _arguments(item, step), item)
        item.attempts[step] = ended.attempts
        if ended.is_given_up:
            return Status.LEFT, None
        if step is Step.EXCEPTION:
            _tell(hooks, item, ended.failure)
            return ended_as(step, failed=True, is_time_up=item.is_time_up), ended.failure
        failed = ended.failure is not None or ended.is_time_up
        if failed:
            _note(hooks, item, ended)
        elif step is Step.PROCESS:
            item.value = ended.value
        following = follows(step, failed=failed)
        if following is None:
            return ended_as(step, failed=failed, is_time_up=item.is_time_up), None
        if step is Step.PROCESS and not item.claim():
            return Status.LEFT, None  # the loop gave the item up first
        step = following


def _arguments(item: Item, step: Step) -> tuple[Any, ...]:
    if step is Step.PROCESS:
        return (item.transaction,)
    return item.transaction, item.value if step is Step.SUCCESS else item.failure


def _note(hooks: Hooks, item: Item, ended: Tried) -> None:
    """Remember why a step failed, for the handler that follows it."""
    item.failure = ended.failure
    if ended.is_time_up:
        who, limit = named(item.transaction.transaction_id), hooks.transaction_timeout
        words = f"{who} was not done within {limit:g} s, the time of a transaction"
        if ended.failure is not None and ended.error is not None:  # who only sees a timeout looks for something slow
            words = f"{words}; the last attempt: {described(ended.failure)}"
        item.is_time_up = True
        item.failure = TransactionException(words, ExceptionType.TIMEOUT, item.transaction_id, cause=ended.failure)
        hooks.host.observer.count("pipeline.engine.timeouts", scope="transaction")


def _tell(hooks: Hooks, item: Item, unhandled: TransactionException | None) -> None:
    """Say in the log that an item failed; nothing of its payload is known here."""
    assert item.failure is not None
    task, who = hooks.host.observer.task, named(item.transaction.transaction_id)
    for failure, level, words in (
        (item.failure, logging.WARNING, "%s: transaction %s failed (%s): %s"),
        (unhandled, logging.ERROR, "%s: the exception handler failed for transaction %s (%s): %s"),
    ):
        if failure is not None and log.isEnabledFor(level):
            log.log(level, words, task, who, failure.category.value, described(failure))
            log.debug("%s: transaction %s, where it failed:\n%s", task, who, _way(failure))


def _way(failure: TransactionException) -> str:
    """The lines an error came through. Not its own words: those were said, and their long form may show a payload."""
    raised: BaseException = failure
    for _ in range(2):  # the time of the item is around the kind of the error, and that around the error itself
        if isinstance(raised, TransactionException) and raised.__cause__ is not None:
            raised = raised.__cause__
    return "".join(traceback.format_tb(raised.__traceback__))
