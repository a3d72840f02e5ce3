"""The processes of a chaos run: real workers and beat, and the world; and somebody who kills them.

What is killed is started again, as a supervisor would. Everything ends with us, however we end.
"""

import ctypes
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

from pipeline.chaos.faults import random_fraction
from pipeline.embedded.processes import PR_SET_PDEATHSIG, tail

_STOP_TIMEOUT = 30.0
#: An act waits until requests are on their way, and not longer than that; then a moment more, by chance.
_MAX_WAIT, _MAX_DELAY = 2.0, 0.3


class Disruption(StrEnum):
    """What is done to a worker."""

    CHILD = "a pool process killed"
    WORKER = "a worker killed with all its processes"
    PARENT = "a worker killed, its pool processes orphaned"
    FREEZE = "a worker frozen past its lease"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDisruption:
    """An act, its time in seconds from the start, and to which worker it is done."""

    at: float
    disruption: Disruption
    worker: int
    delay: float  #: how long to wait once requests are on their way


class NodeProcess:
    """A process in a session of its own, with its pool."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.command, self.environ, self.log = name, command, environ, log
        self.frozen_until: float | None = None
        self.process = self._start()

    def restart(self) -> None:
        """As a supervisor would. Whatever is left of the old one was orphaned on purpose and ends by itself."""
        self.process, self.frozen_until = self._start(), None

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def children(self) -> list[int]:
        """The living processes of the pool."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return sorted(found)

    def disrupt(self, disruption: Disruption, fraction: float, freeze_for: float) -> bool:
        """Do this to the node. False when it is not at work: ended, frozen, or still without a pool."""
        children = [] if self.has_ended or self.frozen_until is not None else self.children()
        if not children:
            return False
        if disruption is Disruption.CHILD:
            _signal(os.kill, children[int(fraction * len(children))], signal.SIGKILL)
        elif disruption is Disruption.FREEZE:
            _signal(os.killpg, self.process.pid, signal.SIGSTOP)
            self.frozen_until = time.monotonic() + freeze_for
        else:
            _signal(os.kill if disruption is Disruption.PARENT else os.killpg, self.process.pid, signal.SIGKILL)
        return True

    def resume(self) -> None:
        """Let a frozen node go on as if nothing had been."""
        _signal(os.killpg, self.process.pid, signal.SIGCONT)
        self.frozen_until = None

    def ask_to_stop(self) -> None:
        """Ask it to end what it is doing and to begin nothing more."""
        if self.frozen_until is not None:
            self.resume()
        self.process.terminate()

    def wait_and_end(self) -> None:
        """Until it has stopped, and not for ever."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_STOP_TIMEOUT)
        self.end()

    def end(self) -> None:
        """Away with it and all its processes, whatever it does."""
        _signal(os.killpg, self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log_tail(self) -> str:
        """The end of its log."""
        return tail(self.log)

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self.command,
                cwd=self.log.parent,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )


class ChaosMonkey:
    """Does planned harm to workers, thaws what it froze, and lets what has ended be started again."""

    def __init__(
        self,
        workers: Sequence[NodeProcess],
        planned: Sequence[PlannedDisruption],
        is_busy: Callable[[], bool],
        *,
        freeze_for: float,
    ) -> None:
        self.workers, self.planned, self.is_busy, self.freeze_for = workers, list(planned), is_busy, freeze_for
        self.disruption_counts: Counter[Disruption] = Counter()
        self.restarts = 0
        self._begun = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Nothing more is planned, and nobody is frozen any more."""
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
        due = self._begun + self.planned[0].at if self.planned else now + 1.0
        if now >= due and (now >= due + _MAX_WAIT or self.is_busy()):
            threading.Event().wait(self.planned[0].delay)
            if self._disrupt(self.planned[0]):
                self.planned.pop(0)

    def _disrupt(self, planned: PlannedDisruption) -> bool:
        """Do it to the worker it is meant for, or to the next one that can suffer it. False: it stays due."""
        lot = planned.delay / _MAX_DELAY
        for turn in range(len(self.workers)):
            node = self.workers[(planned.worker + turn) % len(self.workers)]
            if node.disrupt(planned.disruption, lot, self.freeze_for):
                self.disruption_counts[planned.disruption] += 1
                return True
        return False


def plan_disruptions(seed: int, *, waves: int, gap: float, workers: int) -> list[PlannedDisruption]:
    """One act after each wave of orders. Every kind of act comes before any comes again."""
    found: list[PlannedDisruption] = []
    for wave in range(waves):
        acts = sorted(Disruption, key=lambda act: random_fraction(seed, "act", wave // len(Disruption), act))
        worker = int(random_fraction(seed, "worker", wave) * workers)
        moment = _MAX_DELAY * random_fraction(seed, "moment", wave)
        found.append(
            PlannedDisruption(at=wave * gap, disruption=acts[wave % len(Disruption)], worker=worker, delay=moment)
        )
    return found


def celery_command(name: str, *arguments: str) -> list[str]:
    """The command of a node."""
    return [sys.executable, "-W", "ignore", "-m", "celery", "-A", "pipeline", name, "-l", "WARNING", *arguments]


def _signal(send: Callable[[int, int], None], pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        send(pid, what)


def _die_with_parent() -> Callable[[], None] | None:
    """What the child does first, so that the kernel ends it when we die."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)) and None
