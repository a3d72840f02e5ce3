"""The processes of a chaos run, and what is done to them.

The ChaosMonkey kills and freezes workers. A killed process is started again, as a supervisor would. Outages are outside
the workers: beat, Postgres and Redis are killed, Redis is emptied, messages are lost or repeated. The supervisor of the
embedded servers starts Postgres and Redis again. All processes end with this one, however it ends.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import redis

from pipeline.chaos.faults import random_fraction
from pipeline.domain.states import PhaseTask
from pipeline.embedded import processes, servers

_STOP_TIMEOUT = 30.0
#: A disruption waits until requests are in progress, at most so long; then a random moment more.
_MAX_WAIT, _MAX_DELAY = 2.0, 0.3


class Disruption(StrEnum):
    """What is done to a worker."""

    CHILD = "a pool process killed"
    WORKER = "a worker killed with all its processes"
    PARENT = "a worker killed, its pool processes orphaned"
    FREEZE = "a worker frozen past its lease"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDisruption:
    """A disruption, its time in seconds from the start, and its worker."""

    at: float
    disruption: Disruption
    worker: int
    delay: float  #: how long to wait once requests are in progress


class NodeProcess:
    """A process in a session of its own, with its pool."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.command, self.environ, self.log = name, command, environ, log
        self.frozen_until: float | None = None
        self.process = self._start()

    def restart(self) -> None:
        """Start it again, as a supervisor would. Orphaned pool processes end by themselves."""
        self.process, self.frozen_until = self._start(), None

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def children(self) -> list[int]:
        """Return the living processes of the pool."""
        return processes.child_pids(self.process.pid)

    def disrupt(self, disruption: Disruption, fraction: float, freeze_for: float) -> list[int]:
        """Disrupt the node and return the pool processes that it hit. None: it cannot be disrupted now."""
        children = [] if self.has_ended or self.frozen_until is not None else self.children()
        if not children:
            return []
        if disruption is Disruption.CHILD:
            children = [children[int(fraction * len(children))]]
            _signal(os.kill, children[0], signal.SIGKILL)
        elif disruption is Disruption.FREEZE:
            _signal(os.killpg, self.process.pid, signal.SIGSTOP)
            self.frozen_until = time.monotonic() + freeze_for
        else:
            _signal(os.kill if disruption is Disruption.PARENT else os.killpg, self.process.pid, signal.SIGKILL)
        return children

    def resume(self) -> None:
        """Let a frozen node continue."""
        _signal(os.killpg, self.process.pid, signal.SIGCONT)
        self.frozen_until = None

    def ask_to_stop(self) -> None:
        """Ask it to finish its work and begin nothing more."""
        if self.frozen_until is not None:
            self.resume()
        self.process.terminate()

    def wait_and_end(self) -> None:
        """Wait until it has stopped, for a limited time, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_STOP_TIMEOUT)
        self.end()

    def end(self) -> None:
        """Kill it and all its processes."""
        _signal(os.killpg, self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_tail(self) -> str:
        """Return the end of its log."""
        return processes.tail(self.log)

    def _start(self) -> subprocess.Popen[bytes]:
        return processes.start(
            self.command,
            log=self.log,
            end_signal=signal.SIGKILL,
            folder=self.log.parent,
            environ=self.environ,
        )


#: Is told each fault when it is caused, with the processes that it hit.
RecordFault = Callable[[str, Sequence[int]], object]


def record_nothing(_fault: str, _pids: Sequence[int]) -> None:
    """Record no fault: they are counted only."""


class ChaosMonkey:
    """Disrupts workers as planned, resumes frozen ones, and restarts ended ones."""

    def __init__(
        self,
        workers: Sequence[NodeProcess],
        planned: Sequence[PlannedDisruption],
        is_busy: Callable[[], bool],
        *,
        freeze_for: float,
        rest: float = 0.0,
        record: RecordFault = record_nothing,
    ) -> None:
        """``rest``: seconds that every worker must have its pool before one is disrupted again."""
        self.workers, self.planned, self.is_busy, self.freeze_for = workers, list(planned), is_busy, freeze_for
        self.rest, self.record = rest, record
        self._whole_since: float | None = None
        self.disruption_counts: Counter[Disruption] = Counter()
        self.restarts = 0
        self._begun = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether no disruption is left and no worker is frozen."""
        return not self.planned and all(node.frozen_until is None for node in self.workers)

    def step(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for node in self.workers:
            if node.frozen_until is not None and node.frozen_until <= now:
                node.resume()
            if node.has_ended:
                node.restart()
                self.restarts += 1
        if not self.planned or now < self._begun + self.planned[0].at:
            return
        due = self._rested_at(now)
        if due is not None and now >= due and (now >= due + _MAX_WAIT or self.is_busy()):
            threading.Event().wait(self.planned[0].delay)
            if self._disrupt(self.planned[0]):
                self.planned.pop(0)

    def _rested_at(self, now: float) -> float | None:
        """Return when every worker will have had its pool for long enough; None if one has no pool.

        On a slow machine, too, a disruption then hits workers that work.
        """
        if not self.rest:
            return self._begun + self.planned[0].at
        if any(node.has_ended or node.frozen_until is not None or not node.children() for node in self.workers):
            self._whole_since = None
        elif self._whole_since is None:
            self._whole_since = now
        return (
            None if self._whole_since is None else max(self._whole_since + self.rest, self._begun + self.planned[0].at)
        )

    def _disrupt(self, planned: PlannedDisruption) -> bool:
        """Disrupt the planned worker, or the next one that can be. False: it stays due."""
        fraction = planned.delay / _MAX_DELAY
        for turn in range(len(self.workers)):
            node = self.workers[(planned.worker + turn) % len(self.workers)]
            if hit := node.disrupt(planned.disruption, fraction, self.freeze_for):
                self.disruption_counts[planned.disruption] += 1
                self.record(planned.disruption, hit)
                self._whole_since = None
                return True
        return False


def plan_disruptions(seed: int, *, waves: int, gap: float, workers: int) -> list[PlannedDisruption]:
    """Plan one disruption after each wave. Every kind comes once before any is repeated."""
    found: list[PlannedDisruption] = []
    for wave in range(waves):
        kinds = sorted(Disruption, key=lambda kind: random_fraction(seed, "act", wave // len(Disruption), kind))
        worker = int(random_fraction(seed, "worker", wave) * workers)
        delay = _MAX_DELAY * random_fraction(seed, "moment", wave)
        found.append(
            PlannedDisruption(at=wave * gap, disruption=kinds[wave % len(Disruption)], worker=worker, delay=delay)
        )
    return found


def celery_command(name: str, *arguments: str, app: str = "pipeline") -> list[str]:
    """Return the command of a node."""
    return [sys.executable, "-W", "ignore", "-m", "celery", "-A", app, name, "-l", "WARNING", *arguments]


def _signal(send: Callable[[int, int], None], pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        send(pid, what)


QUEUES = (PhaseTask.MUTATE.value, PhaseTask.NEXT.value, PhaseTask.PREPARE.value)
UNACKNOWLEDGED = "unacked"  #: where Celery keeps the messages that a worker has and has not acknowledged
_MESSAGES = 3  #: dropped or repeated at once, at most
_MESSAGE_WAIT = 1.0  #: seconds to wait for one


class Outage(StrEnum):
    """What is done to beat, the servers or their messages."""

    BEAT = "beat killed"
    POSTGRES = "Postgres killed"
    REDIS = "Redis killed"
    EMPTY = "Redis emptied"
    DROP = "messages dropped"
    REPEAT = "messages delivered twice"


_KILLED_SERVERS = {Outage.POSTGRES: "postgres", Outage.REDIS: "redis"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOutage:
    """An outage, and its time in seconds from the start."""

    at: float
    outage: Outage


def plan_outages(seed: int, *, waves: int, gap: float) -> list[PlannedOutage]:
    """Plan one outage between two waves, and each kind at least once. Every kind comes before any is repeated."""
    found: list[PlannedOutage] = []
    for number in range(max(waves, len(Outage))):
        kinds = sorted(Outage, key=lambda kind: random_fraction(seed, "outage", number // len(Outage), kind))
        found.append(PlannedOutage(at=(number + 0.5) * gap, outage=kinds[number % len(Outage)]))
    return found


class Outages:
    """Cause the planned outages. One that cannot be caused now stays due."""

    def __init__(
        self,
        home: Path,
        beat: NodeProcess | None,
        broker_url: str,
        planned: Sequence[PlannedOutage],
        *,
        queues: Sequence[str] = QUEUES,
        record: RecordFault = record_nothing,
    ) -> None:
        self.home, self.beat, self.broker_url, self.queues, self.record = home, beat, broker_url, queues, record
        self.planned = [each for each in planned if beat is not None or each.outage is not Outage.BEAT]
        self.counts: Counter[str] = Counter()
        self.emptied_messages = 0  #: that were in Redis when it was emptied
        self._begun = time.monotonic()

    @property
    def is_done(self) -> bool:
        return not self.planned

    def step(self) -> None:
        """Cause the outage that is due, and start beat again if it has ended."""
        if self.beat is not None and self.beat.has_ended:
            self.beat.restart()
        if self.planned and time.monotonic() - self._begun >= self.planned[0].at:
            count = self._cause(self.planned[0].outage)
            if count:
                outage = self.planned.pop(0).outage
                self.counts[outage] += count
                for _ in range(count):
                    self.record(outage, ())

    def _cause(self, outage: Outage) -> int:
        """Return how often it was caused."""
        if outage is Outage.BEAT:
            assert self.beat is not None
            self.beat.end()
            return 1
        if outage is Outage.EMPTY:
            return self._empty_redis()
        if outage in _KILLED_SERVERS:
            return self._kill_server(_KILLED_SERVERS[outage])
        return self._take_messages(is_repeated=outage is Outage.REPEAT)

    def _kill_server(self, name: str) -> int:
        found = servers.status(self.home)
        if found is None:
            return 0
        with suppress(ProcessLookupError):
            os.kill(found.pids[name], signal.SIGKILL)
            return 1
        return 0

    def _empty_redis(self) -> int:
        with (
            suppress(redis.RedisError),
            redis.Redis.from_url(self.broker_url, socket_timeout=_MESSAGE_WAIT * 3) as client,
        ):
            kept = client.hlen(UNACKNOWLEDGED)
            held = sum(cast(int, client.llen(queue)) for queue in self.queues) + cast(int, kept)
            client.flushall()
            self.emptied_messages += held
            return 1
        return 0

    def _take_messages(self, *, is_repeated: bool) -> int:
        """Take messages out of the queues of the phases before a worker does; return how many."""
        taken = 0
        with (
            suppress(redis.RedisError),
            redis.Redis.from_url(self.broker_url, socket_timeout=_MESSAGE_WAIT * 3) as client,
        ):
            while taken < _MESSAGES:
                found = cast(Any, client.brpop(list(self.queues), timeout=_MESSAGE_WAIT))
                if found is None:
                    break
                taken += 1
                if is_repeated:
                    queue, message = found
                    client.rpush(queue, message, message)
        return taken
