"""Adding up what several processes counted, and carrying it from one to another.

A process hands over what it has counted since it last did, and forgets it only once that is out. Whoever adds up never
hears the same thing twice, and its sums never go back when a process ends and another takes its place.
"""

import errno
import json
import logging
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

SUM, UP_DOWN, HISTOGRAM = "sum", "level", "histogram"
#: Series that are kept at most. Ours are far fewer: it is for what handlers count by themselves.
MAX_SERIES = 20_000
#: Bytes of one datagram; a system that takes less says so, and it is sent in halves.
MAX_DATAGRAM_BYTES = 64 * 1024

Labels = tuple[tuple[str, str], ...]
Buckets = tuple[float, float, tuple[float, ...]]  #: count, sum, and how many in each bucket


class MetricPoint(NamedTuple):
    """One series: what it is, and its number. A level is one that also goes down, such as work in flight."""

    name: str
    kind: str
    unit: str
    description: str
    bounds: tuple[float, ...]
    labels: Labels
    value: float | Buckets

    def plus(self, other: "MetricPoint") -> "MetricPoint":
        """Both together."""
        return self._replace(value=_sum(self.value, other.value))


def _sum(a: Any, b: Any) -> Any:
    if not isinstance(a, tuple):
        return a + b
    return a[0] + b[0], a[1] + b[1], tuple(x + y for x, y in zip(a[2], b[2], strict=True))


class MetricTotals:
    """Sums by series. Levels are kept by process too, and those of a process that is gone are dropped."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], MetricPoint] = {}
        self._lock = threading.Lock()
        self._is_full = False

    def add(self, rows: Iterable[MetricPoint], pid: int = 0) -> None:
        """Add what somebody counted."""
        with self._lock:
            for row in rows:
                key = (row.name, row.kind, row.bounds, row.labels, pid if row.kind == UP_DOWN else 0)
                before = self._rows.get(key)
                if before is not None:
                    self._rows[key] = before.plus(row)
                elif len(self._rows) < MAX_SERIES:
                    self._rows[key] = row
                elif not self._is_full:
                    self._is_full = True
                    log.warning("more than %d series are counted: new ones, such as %s, are not", MAX_SERIES, row.name)

    def take(self) -> list[MetricPoint]:
        """Everything, and begin anew."""
        with self._lock:
            rows, self._rows = list(self._rows.values()), {}
        return rows

    def points(self) -> list[MetricPoint]:
        """Everything so far."""
        with self._lock:
            self._rows = {key: row for key, row in self._rows.items() if row.kind != UP_DOWN or _is_alive(key[-1])}
            kept = list(self._rows.items())
        added: dict[tuple[Any, ...], MetricPoint] = {}
        for key, row in kept:
            added[key[:-1]] = added[key[:-1]].plus(row) if key[:-1] in added else row
        return list(added.values())


class MetricChannel:
    """From the processes of a pool to the one that started them: made before they are, one datagram at a time."""

    def __init__(self) -> None:
        self.sender, self.receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sender.setblocking(False)

    def send(self, rows: Sequence[MetricPoint]) -> list[MetricPoint]:
        """Hand rows over without waiting. Returns those that did not get out: the other end is busy, or gone."""
        message = json.dumps([os.getpid(), rows]).encode()
        if len(message) > MAX_DATAGRAM_BYTES and len(rows) > 1:
            return self._send_in_halves(rows)
        try:
            self.sender.send(message)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return self._send_in_halves(rows) if len(rows) > 1 else []
            return list(rows)
        return []

    def _send_in_halves(self, rows: Sequence[MetricPoint]) -> list[MetricPoint]:
        middle = len(rows) // 2
        return [*self.send(rows[:middle]), *self.send(rows[middle:])]

    def close_receiver(self) -> None:
        """In a process that only sends: the other end is not its own, and is gone when its owner is."""
        self.receiver.close()

    def receive(self, totals: MetricTotals) -> None:
        """Add up what comes, until the channel is closed."""
        while True:
            try:
                message = self.receiver.recv(MAX_DATAGRAM_BYTES * 2)
            except OSError:
                return
            if not message:
                return
            pid, rows = json.loads(message)
            totals.add(map(_decoded_point, rows), pid)

    def close(self) -> None:
        """Nothing comes any more."""
        for end in (self.receiver, self.sender):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # the other end is gone already
                log.debug("a channel was closed before", exc_info=True)
            end.close()


def _decoded_point(given: Sequence[Any]) -> MetricPoint:
    """A row as it was before it was written as JSON."""
    name, kind, unit, words, bounds, labels, value = given
    read = (value[0], value[1], tuple(value[2])) if isinstance(value, list) else value
    return MetricPoint(name, kind, unit, words, tuple(bounds), tuple((label, of) for label, of in labels), read)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
