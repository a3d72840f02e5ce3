"""What a worker says about itself, and when it counts as gone. Pure: no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

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
