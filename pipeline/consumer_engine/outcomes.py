"""What became of an item, and of a whole loop."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pipeline.consumer_engine.errors import ExceptionType, TransactionException
from pipeline.consumer_engine.lifecycle import Ending, Status, Step
from pipeline.consumer_engine.transactions import Transaction


class Outcome(NamedTuple):
    """How one item ended."""

    transaction: Transaction
    status: Status
    attempts: Mapping[Step, int]  #: how often each step was attempted
    value: Any = None  #: what processing returned
    error: TransactionException | None = None  #: why it failed, as the exception handler saw it
    unhandled: TransactionException | None = None  #: why the exception handler itself failed, attempts and all
    seconds: float = 0.0  #: from the moment a worker started on it


@dataclass(slots=True)
class Report:
    """How far a loop got. Counts only: a loop that streams for a year must not remember its items."""

    taken: int = 0  #: items the source gave
    succeeded: int = 0
    failed: int = 0
    timed_out: int = 0
    left: int = 0  #: given up, unacknowledged
    in_doubt: int = 0  #: of those left, the ones that a handler had begun to settle and may settle yet
    unhandled: int = 0  #: of the failed and timed out, those whose exception handler failed too
    step_timeouts: int = 0  #: of the failed, those whose last attempt at a step was not in time
    batches: int = 0
    ending: Ending | None = None  #: None while the loop runs, and when it failed

    @property
    def processed(self) -> int:
        """Items that were settled, one way or the other."""
        return self.succeeded + self.failed + self.timed_out

    def add(self, outcome: Outcome) -> None:
        """Count one more item."""
        match outcome.status:
            case Status.SUCCESS:
                self.succeeded += 1
            case Status.EXCEPTION:
                self.failed += 1
                self.step_timeouts += outcome.error is not None and outcome.error.category is ExceptionType.TIMEOUT
            case Status.TIMEOUT:
                self.timed_out += 1
            case Status.LEFT:
                self.left += 1
        self.unhandled += outcome.unhandled is not None

    def as_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {"processed": self.processed, **asdict(self)}
