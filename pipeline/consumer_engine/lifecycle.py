"""The decisions of the engine and the states of items and loops. No clock, no threads, no I/O.

Both variants call these functions, so that neither has a rule of its own. An item goes

    process ──returned──> success ──returned──> done
       │                     │
       └─────── failed ──────┴────> exception ──> done

and each step is attempted by its own policy before it counts as failed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.policies import ConsumerLoopPolicy, ConsumerSteps, RetryPolicy
from pipeline.consumer_engine.transactions import Transaction

GRACE = 1.0  #: seconds that a bounded fetch, or a handler that has begun, gets when the loop must end
MIN_ID_WAIT = 10.0  #: seconds, at least, that an item waits for an abandoned call on its id
MIN_ABANDONED_LIMIT = 100  #: abandoned calls that are always allowed; more with a high concurrency


class Step(StrEnum):
    """Calls of the engine to a task or a source, each with its own attempts."""

    FETCH = "fetch"
    PROCESS = "process"
    SUCCESS = "success"
    EXCEPTION = "exception"


class ItemStatus(StrEnum):
    """How an item ended."""

    SUCCESS = "success"  #: processed, and the success handler returned
    EXCEPTION = "exception"  #: failed, and the exception handler was called
    TIMEOUT = "timeout"  #: not done within the transaction's time; `ItemOutcome.cut` is the step that ran then
    UNFINISHED = "unfinished"  #: left unacknowledged: the loop ended, or an abandoned call holds its id


class Ending(StrEnum):
    """Why a loop ended that did not fail."""

    NOTHING_LEFT = "nothing left"
    LIMIT = "limit reached"
    STOPPED = "stopped"


def retry_of(steps: ConsumerSteps, step: Step) -> RetryPolicy:
    """Return the retry policy of a step."""
    policy: RetryPolicy = getattr(steps, step.value).retry
    return policy


def pause_before_next(retry: RetryPolicy, attempt: int, category: ExceptionType) -> float | None:
    """Return the seconds to wait after failed attempt ``attempt`` (from 1), or None.

    None means that there is no other attempt.
    """
    if category is ExceptionType.BUSINESS or attempt >= retry.max_attempts:
        return None
    return retry.pause(attempt - 1)


def next_step(step: Step, *, failed: bool, is_cut: bool = False) -> Step | None:
    """Return the step after this one, or None when the item is done.

    ``is_cut``: the transaction's timeout ended a running attempt. No other handler follows a success
    handler that was cut: it may have settled the item, and the item would end twice.
    """
    if is_cut and step is not Step.PROCESS:
        return None
    if step is Step.PROCESS and not failed:
        return Step.SUCCESS
    if step in (Step.PROCESS, Step.SUCCESS) and failed:
        return Step.EXCEPTION
    return None


def final_status(step: Step, *, failed: bool, is_time_up: bool) -> ItemStatus:
    """Return how an item ended whose last step was this one.

    ``is_time_up``: the item failed because the time of its transaction was up.
    """
    if step is Step.SUCCESS and not failed:
        return ItemStatus.SUCCESS
    return ItemStatus.TIMEOUT if is_time_up else ItemStatus.EXCEPTION


def fetch_size(loop: ConsumerLoopPolicy, taken: int) -> int:
    """Return how many items to fetch: a whole batch, or the rest of the limit; 0 to end."""
    return loop.batch.size if loop.limit is None else min(loop.batch.size, max(0, loop.limit - taken))


def pause_when_empty(loop: ConsumerLoopPolicy, empties: int) -> float | None:
    """Return the pause after empty fetch ``empties`` in a row (from 1); None to end the loop."""
    return loop.empty_queue.pause(empties - 1) if loop.streaming else None


def pause_when_stuck(loop: ConsumerLoopPolicy, times: int) -> float:
    """Return the pause after ``times`` batches in a row (from 1) without a finished item."""
    return loop.empty_queue.pause(times - 1)


def wait_ends_at(ends_at: float, now: float, *, is_bounded: bool, is_immediate: bool) -> float:
    """Return when the wait for a running fetch ends after a stop request.

    A fetch without a limit is waited for: the source may not give its items out again.
    """
    if is_immediate:
        return now
    return min(ends_at, now + GRACE) if is_bounded else ends_at


def max_id_wait(loop: ConsumerLoopPolicy) -> float:
    """Return the seconds that items wait for an abandoned call on their id."""
    return max(MIN_ID_WAIT, loop.transaction_timeout or 0.0)


def max_abandoned_calls(loop: ConsumerLoopPolicy) -> int:
    """Return how many abandoned calls may still run before the loop ends with an error."""
    return max(MIN_ABANDONED_LIMIT, 10 * loop.concurrency.value)


class ItemOutcome(NamedTuple):
    """How one item ended."""

    transaction: Transaction
    status: ItemStatus
    attempts: Mapping[Step, int]  #: how often each step was attempted
    value: Any = None  #: what processing returned
    error: TransactionException | None = None  #: why it failed, as passed to the exception handler
    handler_error: TransactionException | None = None  #: why the exception handler itself failed in its last attempt
    seconds: float = 0.0  #: from the moment a worker started on it
    cut: Step | None = None  #: the step that was running when the transaction's time was up

    @property
    def is_in_doubt(self) -> bool:
        """Whether a handler was cut: it may have settled the item, or may still do so."""
        return self.cut is not None and self.cut is not Step.PROCESS


@dataclass(slots=True)
class LoopReport:
    """Counts of a loop. It keeps no items: a loop may stream for a year."""

    fetched: int = 0  #: items from the source
    succeeded: int = 0
    failed: int = 0
    timed_out: int = 0
    unfinished: int = 0  #: left unacknowledged
    in_doubt: int = 0  #: of the timed out and unfinished, those whose handler had begun and may still settle them
    handler_failures: int = 0  #: of the failed and timed out, those whose exception handler failed too
    step_timeouts: int = 0  #: of the failed, those whose last attempt timed out
    batches: int = 0
    cut: dict[Step, int] = field(default_factory=dict)  #: of the timed out, those cut while this step ran
    ending: Ending | None = None  #: None while the loop runs, and when it failed

    @property
    def processed(self) -> int:
        """Items that ended, in doubt or not; the unfinished ones are not among them."""
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
        self.in_doubt += outcome.is_in_doubt
        if outcome.cut is not None:
            self.cut[outcome.cut] = self.cut.get(outcome.cut, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {"processed": self.processed, **asdict(self)}
