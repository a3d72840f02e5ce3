"""Faults of a chaos run outside the workers: beat, Postgres and Redis are killed, messages are lost or repeated.

The supervisor of the embedded servers starts Postgres and Redis again. Beat is started again here.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import redis

from pipeline.chaos.faults import random_fraction
from pipeline.chaos.nodes import NodeProcess
from pipeline.domain.states import PhaseTask
from pipeline.embedded import servers

_QUEUES = (PhaseTask.MUTATE.value, PhaseTask.NEXT.value, PhaseTask.PREPARE.value)
_MESSAGES = 3  #: dropped or repeated at once, at most
_MESSAGE_WAIT = 1.0  #: seconds to wait for one


class Outage(StrEnum):
    """What is done to beat, the servers or their messages."""

    BEAT = "beat killed"
    POSTGRES = "Postgres killed"
    REDIS = "Redis killed"
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

    def __init__(self, home: Path, beat: NodeProcess, broker_url: str, planned: Sequence[PlannedOutage]) -> None:
        self.home, self.beat, self.broker_url, self.planned = home, beat, broker_url, list(planned)
        self.counts: Counter[str] = Counter()
        self._begun = time.monotonic()

    @property
    def is_done(self) -> bool:
        return not self.planned

    def step(self) -> None:
        """Cause the outage that is due, and start beat again if it has ended."""
        if self.beat.has_ended:
            self.beat.restart()
        if self.planned and time.monotonic() - self._begun >= self.planned[0].at:
            count = self._cause(self.planned[0].outage)
            if count:
                self.counts[self.planned.pop(0).outage] += count

    def _cause(self, outage: Outage) -> int:
        """Return how often it was caused."""
        if outage is Outage.BEAT:
            self.beat.end()
            return 1
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

    def _take_messages(self, *, is_repeated: bool) -> int:
        """Take messages out of the queues of the phases before a worker does; return how many."""
        taken = 0
        with (
            suppress(redis.RedisError),
            redis.Redis.from_url(self.broker_url, socket_timeout=_MESSAGE_WAIT * 3) as client,
        ):
            while taken < _MESSAGES:
                found = cast(Any, client.brpop(list(_QUEUES), timeout=_MESSAGE_WAIT))
                if found is None:
                    break
                taken += 1
                if is_repeated:
                    queue, message = found
                    client.rpush(queue, message, message)
        return taken
