"""Metrics of a worker: its children count, its main process adds up and answers.

The channel between them is made before the first child is. A child that is recycled hands over the rest when it ends;
one that is killed takes its last second along, and nothing else.
"""

from pipeline.config import Settings
from pipeline.runtime.gauges import Gauges
from pipeline.store.database import Database
from pipeline.tasks import refusals
from pipeline.telemetry.meters import Meters, require

_meters: Meters | None = None


def open_(settings: Settings, pool: str) -> None:
    """When the worker starts, before its pool does. What is not installed is said now."""
    global _meters
    require(settings)
    _meters = Meters(settings, forks="prefork" in pool)
    _meters.open()


def begin(settings: Settings) -> None:
    """In the main process, once it is ready: add up, and answer whoever asks."""
    meters = _meters or Meters(settings)
    if meters.is_wanted:
        meters.begin(Gauges(Database.connect(settings.database_url, pool_size=1)).register)
        refusals.count_none()


def begin_child() -> None:
    """In a process of the pool."""
    if _meters is not None:
        _meters.begin_child()


def end() -> None:
    """Let the last numbers of this process out."""
    if _meters is not None:
        _meters.end()
