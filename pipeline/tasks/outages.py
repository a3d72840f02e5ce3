"""Report a lost database once per outage of a worker, instead of once per task, heartbeat and sweep.

All processes of a worker share one token, a byte in a pipe. The process that takes it reports the outage. The watchdog
puts it back when the database answers again, and reports how long the outage was. Records about the lost connection
are dropped in between, unless the level of the logger ``pipeline`` is DEBUG.
"""

import logging
import mmap
import os
import select
import struct
import time
from collections.abc import Iterator

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from pipeline.store.database import describe_error, is_disconnected

log = logging.getLogger(__name__)

#: An error that soon after the end of an outage belongs to it: a call that had begun before.
_AFTERMATH = 15.0  #: seconds
_CELERY = "celery.app.trace"  #: logs every task that failed, with its traceback
#: Loggers of what uses the database in a worker.
_LOGGERS = (
    _CELERY,
    "pipeline.background.rescuer",
    "pipeline.background.scheduler",
    "pipeline.tasks.publish",
    "pipeline.tasks.signals",
    "pipeline.tasks.watchdog",
    "pipeline.worker.leases",
    "pipeline.worker.runner",
    "pipeline.worker.sender",
)
_TOKEN = b"."
_TIMES = struct.Struct("dd")  #: when the last outage began and ended, on the monotonic clock


class Outages:
    """The outages of one worker, shared with the processes that it forks."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.write(self._write, _TOKEN)
        self._times = mmap.mmap(-1, _TIMES.size)

    @property
    def is_on(self) -> bool:
        """Whether an outage was reported and has not ended."""
        return not select.select([self._read], [], [], 0)[0]

    def begin(self, error: DBAPIError) -> None:
        """Report an outage, unless a process has done so or it has just ended."""
        _, ended = _TIMES.unpack(self._times)
        now = time.monotonic()
        if ended and now - ended < _AFTERMATH:
            return
        try:
            os.read(self._read, len(_TOKEN))
        except BlockingIOError:  # another process has reported it
            return
        self._times[:] = _TIMES.pack(now, 0.0)
        log.error(
            "the database is lost; this worker goes on when it is back, and nothing is lost meanwhile: %s",
            describe_error(error).partition("\n")[0],
        )

    def end(self) -> None:
        """Report the end of an outage: the database has answered."""
        if not self.is_on:
            return
        now = time.monotonic()
        began, _ = _TIMES.unpack(self._times)
        self._times[:] = _TIMES.pack(began, now)
        os.write(self._write, _TOKEN)
        log.warning("the database is back after %.1f s", now - began if began else 0.0)


class OutageFilter(logging.Filter):
    """Drop records about a lost connection to the database, and report the outage once."""

    def __init__(self, outages: Outages) -> None:
        super().__init__()
        self.outages = outages

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be logged."""
        if record.name == _CELERY and not _is_our_task(record):
            return True
        lost = next(_lost_connections(record), None)
        if lost is None:
            return True
        self.outages.begin(lost)
        return logging.getLogger("pipeline").isEnabledFor(logging.DEBUG)


def report_once() -> Outages:
    """Install the filter in this process, before it forks. Installing it again changes nothing."""
    for each in logging.getLogger(_CELERY).filters:
        if isinstance(each, OutageFilter):
            return each.outages
    outages = Outages()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(OutageFilter(outages))
    return outages


def _lost_connections(record: logging.LogRecord) -> Iterator[DBAPIError]:
    """Yield the exceptions about a lost connection that a record carries: its own, and its arguments."""
    given = record.args.values() if isinstance(record.args, dict) else record.args or ()
    for error in (record.exc_info[1] if record.exc_info else None, *given):
        if isinstance(error, OperationalError | InterfaceError) and is_disconnected(error):
            yield error


def _is_our_task(record: logging.LogRecord) -> bool:
    """Return whether a record of Celery is about a task of ours; those of the app stay as they are."""
    data = getattr(record, "data", None)
    return isinstance(data, dict) and str(data.get("name", "")).startswith("pipeline.")
