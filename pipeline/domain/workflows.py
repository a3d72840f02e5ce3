"""Switches of a workflow, and the one status that operators are shown.

Two writers that never overwrite each other: an operator's wish (``DesiredStatus``) and the system's blocks,
one per cause. Maintenance is a flag of its own. What is shown is derived here and stored nowhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

#: More runs or events at once than this is a mistake, not a plan.
MAX_AT_ONCE = 100_000


def count_problem(value: int) -> str | None:
    """What is expected instead of this number of runs or events at once; None if the number is fine."""
    if value < 1:
        return "expected at least 1"
    return f"expected at most {MAX_AT_ONCE}" if value > MAX_AT_ONCE else None


class DesiredStatus(StrEnum):
    """What an operator wants of the workflow."""

    ACTIVE = "active"
    PAUSED = "paused"


class BlockKind(StrEnum):
    """Why the system holds a workflow back."""

    APPROVAL = "approval"  #: credentials or permissions need an operator
    INTERNAL = "internal"  #: retries are exhausted or the host failed
    RECONCILIATION = "reconciliation"  #: a mutation's outcome is unknown


#: Blocks that an operator lifts with ``resume``. The third kind lifts only when its mutation is resolved.
CLEARED_BY_RESUME: frozenset[BlockKind] = frozenset({BlockKind.APPROVAL, BlockKind.INTERNAL})


class WorkflowStatus(StrEnum):
    """The one status shown to operators."""

    ACTIVE = "active"
    PAUSED = "paused"
    ERROR = "error"


class HandlerKind(StrEnum):
    """What a handler does."""

    CONSUMER = "consumer"
    PRODUCER = "producer"


class OnUncertain(StrEnum):
    """How far an unknown outcome reaches."""

    PAUSE = "pause"  #: the workflow stops until the mutation is resolved
    CONTAIN = "contain"  #: only the run's own events are held


def can_overtake(concurrency: int, on_uncertain: str) -> bool:
    """Whether a run of a workflow may end after one that began later. What such runs return as state must be merged."""
    return concurrency > 1 or on_uncertain == OnUncertain.CONTAIN


class OnLogicError(StrEnum):
    """How far wrong code reaches."""

    MAINTENANCE = "maintenance"  #: the workflow stops until its code changes
    QUARANTINE = "quarantine"  #: the events that meet it are set aside, the others go on


class OnExhausted(StrEnum):
    """How far a failure reaches that repeats until the allowed failures are used up."""

    BLOCK = "block"  #: the workflow stops until an operator resumes it
    QUARANTINE = "quarantine"  #: the event is set aside if others succeed; if everything fails the workflow stops


def default_on_exhausted(on_logic_error: str) -> OnExhausted:
    """What follows exhausted failures if the author does not choose: the same as after wrong code, if that is near."""
    return OnExhausted.QUARANTINE if on_logic_error == OnLogicError.QUARANTINE else OnExhausted.BLOCK


class AfterFailedMutation(StrEnum):
    """Where the next run starts once a mutation definitely did not happen."""

    PREPARE = "prepare"  #: inputs are released and a fresh run selects again
    MUTATE = "mutate"  #: the same plan is tried again with the same inputs


class StartAt(StrEnum):
    """What a consumer that joins a topic later gets to see."""

    LATEST = "latest"
    EARLIEST = "earliest"


class SessionResult(StrEnum):
    """How a group of runs ended."""

    COMPLETED = "completed"
    FAILED = "failed"


def workflow_status(desired: DesiredStatus, blocks: Iterable[BlockKind]) -> WorkflowStatus:
    """The status to show: an operator's pause first, then what needs an operator, then what the background does."""
    kinds = frozenset(blocks)
    if desired is DesiredStatus.PAUSED:
        return WorkflowStatus.PAUSED
    if kinds & CLEARED_BY_RESUME:
        return WorkflowStatus.ERROR
    if BlockKind.RECONCILIATION in kinds:
        return WorkflowStatus.PAUSED
    return WorkflowStatus.ACTIVE


#: How often the main process of a worker records that it runs.
WORKER_HEARTBEAT = timedelta(seconds=20)
#: How long a worker that is gone is shown.
WORKER_KEPT = timedelta(days=1)
_MISSED_HEARTBEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as its main process describes it."""

    name: str
    host: str
    pid: int
    pool: str
    concurrency: int
    queues: tuple[str, ...]
    workflows: Mapping[str, int]  #: versions by name
    code_version: str
    package_version: str


def is_worker_gone(seen_at: datetime, now: datetime) -> bool:
    """Return whether a worker missed so many heartbeats that it counts as gone."""
    return now - seen_at > WORKER_HEARTBEAT * _MISSED_HEARTBEATS
