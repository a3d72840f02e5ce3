"""What became of an item, and of a whole loop."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.lifecycle import Ending, ItemStatus, Step
from pipeline.consumer_engine.transactions import Transaction


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
