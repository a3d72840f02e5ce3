"""What follows what: every decision of the engine, from facts alone. No clock, no threads, no I/O.

Both variants ask here, so that neither has a rule of its own. An item goes

    process ──returned──> success ──returned──> done
       │                     │
       └─────── failed ──────┴────> exception ──> done

and each step is attempted by its own policy before it counts as failed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.policies import ConsumerLoopPolicy, ConsumerSteps, RetryPolicy
from pipeline.consumer_engine.transactions import Transaction

GRACE = 1.0  #: seconds for a bounded fetch, or a handler that has begun, when the loop is to end
MIN_ID_WAIT = 10.0  #: seconds, at least, that items wait for code that was left behind on their id
MIN_ABANDONED_LIMIT = 100  #: calls that may be left behind at least; more where many items are worked on at once


class Step(StrEnum):
    """What the engine calls of a task or a source, each with attempts of its own."""

    FETCH = "fetch"
    PROCESS = "process"
    SUCCESS = "success"
    EXCEPTION = "exception"


class ItemStatus(StrEnum):
    """How an item ended."""

    SUCCESS = "success"  #: processed, and the success handler returned
    EXCEPTION = "exception"  #: failed, and the exception handler was called
    TIMEOUT = "timeout"  #: not done within the transaction's time; the exception handler was called
    UNFINISHED = "left"  #: given up, unacknowledged: the loop ended, or code that was left behind holds its id


class Ending(StrEnum):
    """Why a loop ended that did not fail."""

    NOTHING_LEFT = "nothing left"
    LIMIT = "limit reached"
    STOPPED = "stopped"


def retry_of(steps: ConsumerSteps, step: Step) -> RetryPolicy:
    """The budget of a step, and of no other."""
    policy: RetryPolicy = getattr(steps, step.value).retry
    return policy


def pause_before_next(retry: RetryPolicy, attempt: int, category: ExceptionType) -> float | None:
    """Seconds to wait after failed attempt number ``attempt`` (from 1), or None when there is no other attempt."""
    if category is ExceptionType.BUSINESS or attempt >= retry.max_attempts:
        return None
    return retry.pause(attempt - 1)


def next_step(step: Step, *, failed: bool) -> Step | None:
    """The step of an item after this one, whose attempts are over; None when the item is done."""
    if step is Step.PROCESS and not failed:
        return Step.SUCCESS
    if step in (Step.PROCESS, Step.SUCCESS) and failed:
        return Step.EXCEPTION
    return None


def is_cut_at_deadline(step: Step) -> bool:
    """Whether a running attempt of this step ends when the time above it is up: the loop's, or the transaction's.

    A handler that has begun settles the item: cut in the middle and followed by the other one, the
    item could end twice. It is bounded by the timeout of its own policy.
    """
    return step in (Step.FETCH, Step.PROCESS)


def can_start_after_deadline(step: Step) -> bool:
    """Whether attempts of this step begin also after the time above it is up: only those that settle a failure."""
    return step is Step.EXCEPTION


def final_status(step: Step, *, failed: bool, is_time_up: bool) -> ItemStatus:
    """How an item ended whose last step was this one; ``is_time_up`` when its clock made it fail."""
    if step is Step.SUCCESS and not failed:
        return ItemStatus.SUCCESS
    return ItemStatus.TIMEOUT if is_time_up else ItemStatus.EXCEPTION


def fetch_size(loop: ConsumerLoopPolicy, taken: int) -> int:
    """How many items to fetch after so many were taken: a whole batch, or what the limit leaves; 0 to end."""
    return loop.batch.size if loop.limit is None else min(loop.batch.size, max(0, loop.limit - taken))


def pause_when_empty(loop: ConsumerLoopPolicy, empties: int) -> float | None:
    """Seconds to rest after empty fetch number ``empties`` in a row (from 1); None when the loop ends instead."""
    return loop.empty_queue.pause(empties - 1) if loop.streaming else None


def pause_when_stuck(loop: ConsumerLoopPolicy, times: int) -> float:
    """Seconds to rest after batch number ``times`` in a row (from 1) of which nothing could be worked on."""
    return loop.empty_queue.pause(times - 1)


def wait_ends_at(ends_at: float, now: float, *, is_bounded: bool, is_immediate: bool) -> float:
    """When the wait for a fetch ends that the task was asked to end in: at once, or soon if it has a limit anyway.

    A fetch that nobody limited is waited for: what it brings may not be given out again.
    """
    if is_immediate:
        return now
    return min(ends_at, now + GRACE) if is_bounded else ends_at


def max_id_wait(loop: ConsumerLoopPolicy) -> float:
    """Seconds that items wait for code that was left behind on their id: as long as one item may take, at least."""
    return max(MIN_ID_WAIT, loop.transaction_timeout or 0.0)


def max_abandoned_calls(loop: ConsumerLoopPolicy) -> int:
    """How many calls may be left behind and still run before the loop ends with an error."""
    return max(MIN_ABANDONED_LIMIT, 10 * loop.concurrency.value)


class ItemOutcome(NamedTuple):
    """How one item ended."""

    transaction: Transaction
    status: ItemStatus
    attempts: Mapping[Step, int]  #: how often each step was attempted
    value: Any = None  #: what processing returned
    error: TransactionException | None = None  #: why it failed, as the exception handler saw it
    handler_error: TransactionException | None = None  #: why the exception handler itself failed, attempts and all
    seconds: float = 0.0  #: from the moment a worker started on it


@dataclass(slots=True)
class LoopReport:
    """How far a loop got. Counts only: a loop that streams for a year must not remember its items."""

    fetched: int = 0  #: items the source gave
    succeeded: int = 0
    failed: int = 0
    timed_out: int = 0
    unfinished: int = 0  #: given up, unacknowledged
    in_doubt: int = 0  #: of those left, the ones that a handler had begun to settle and may settle yet
    handler_failures: int = 0  #: of the failed and timed out, those whose exception handler failed too
    step_timeouts: int = 0  #: of the failed, those whose last attempt at a step was not in time
    batches: int = 0
    ending: Ending | None = None  #: None while the loop runs, and when it failed

    @property
    def processed(self) -> int:
        """Items that were settled, one way or the other."""
        return self.succeeded + self.failed + self.timed_out

    def add(self, outcome: ItemOutcome) -> None:
        """Count one more item."""
        match outcome.status:
            case ItemStatus.SUCCESS:
                self.succeeded += 1
            case ItemStatus.EXCEPTION:
                self.failed += 1
                self.step_timeouts += outcome.error is not None and outcome.error.category is ExceptionType.TIMEOUT
            case ItemStatus.TIMEOUT:
                self.timed_out += 1
            case ItemStatus.UNFINISHED:
                self.unfinished += 1
        self.handler_failures += outcome.handler_error is not None

    def as_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {"processed": self.processed, **asdict(self)}
