"""``pipeline chaos``: the promise, proved on this installation with faults, and judged from outside.

Orders are published in waves. Real workers on servers of their own carry them out against a world that
times out, resets, answers 5xx, commits late or says 429, while workers are killed and frozen. At the end
the ledger is compared with what the world counted, row by row. The seed repeats faults and acts.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlalchemy import text

from pipeline.chaos import records
from pipeline.chaos.faults import operation_of
from pipeline.chaos.judge import Entry, Facts, Problem, judge
from pipeline.chaos.nodes import Monkey, Node, celery, plan
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.values import NewEvent
from pipeline.embedded import servers
from pipeline.embedded.servers import Servers
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.transitions import events

WORKFLOW = "chaos"
LEASE = 3.0
#: Everything that waits in production waits seconds here.
PACE = {
    "PIPELINE_LEASE": f"{LEASE:g}s",
    "PIPELINE_HEARTBEAT": "1s",
    "PIPELINE_SILENCE": "2s",
    "PIPELINE_TICK": "500ms",
    "PIPELINE_STALL": "15s",
    "PIPELINE_COHORT": "20",
    "PIPELINE_WORKFLOWS": "pipeline.chaos.workflow",
}
_WAVE_EVERY = 2.0
_LOOK_EVERY = 0.1
_BUSY = 2  #: requests in the world's hands, from which on a kill is worth it
_STARTS_WITHIN = 60.0


class ChaosError(PipelineError):
    """The run could not be made, which says nothing about the promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run."""

    mutations: int = 1000
    seed: int = field(default_factory=lambda: secrets.randbelow(10**6))
    workers: int = 2
    home: Path | None = None
    tell: Callable[[str], None] = lambda _: None

    @property
    def waves(self) -> int:
        """How often orders are published, and how often harm is done: at least once of each kind."""
        return 4 + self.mutations // 150

    @property
    def within(self) -> float:
        """How long it may take: longer for more orders, and generous on a busy machine."""
        return 120.0 + self.waves * _WAVE_EVERY + 0.3 * self.mutations


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run."""

    options: Options
    facts: Facts
    problems: Sequence[Problem]
    unfinished: Sequence[str]
    compared: Sequence[records.Seen]
    looks: Mapping[str, int]
    acts: Mapping[str, int]
    lost: tuple[int, int]  #: runs that lost their worker, and those of them whose mutation was in the ledger
    seconds: float
    home: Path | None  #: where everything is kept; None when it went well and was cleared away

    @property
    def is_good(self) -> bool:
        return not self.problems and not self.unfinished

    @property
    def questions(self) -> list[Entry]:
        """What a person would be asked."""
        return self.facts.questions


def run(options: Options) -> Result:
    """Make a run and judge it."""
    _require(options)
    if options.home is not None:
        options.home.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.home)).resolve()
    clean = {name: value for name, value in os.environ.items() if not name.endswith(("_DATABASE_URL", "_BROKER_URL"))}
    with ExitStack() as stack:
        urls = stack.enter_context(servers.running(home, clean))
        db = Database.connect(urls.database_url, pool_size=2)
        stack.callback(db.dispose)
        migrate.upgrade(db)
        result = _Run(options, home, db, stack).result(urls)
    if result.home is None:
        servers.remove(home)
    return result


class _Run:
    """One run, from the first process to the verdict."""

    def __init__(self, options: Options, home: Path, db: Database, stack: ExitStack) -> None:
        self.options, self.home, self.db, self.stack = options, home, db, stack
        self.orders = [f"order {n}" for n in range(options.mutations)]
        self.stands_still: str | None = None
        self.begun = time.monotonic()

    def result(self, urls: Servers) -> Result:
        world = self.stack.enter_context(_world(self.home, self.options.seed))
        nodes = self._nodes(urls, world)
        self._wait(nodes, self._is_registered, "the workers to start")
        monkey = self._work(nodes, world)
        unfinished = records.unfinished(self.db, WORKFLOW)
        if self.stands_still:
            unfinished.insert(0, f"the whole workflow stands still: {self.stands_still}")
        for node in nodes:
            node.ask_to_stop()
        for node in nodes:
            node.wait_and_end()
        _wait_until_idle(world)
        found = records.facts(self.db, WORKFLOW, self.home, self.orders)
        problems = judge(found)
        keeps = self.options.home is not None or problems or unfinished
        return Result(
            options=self.options,
            facts=found,
            problems=problems,
            unfinished=unfinished,
            compared=records.compared(found, self.home),
            looks=records.looks(self.home),
            acts={
                **{str(act): count for act, count in monkey.done.items()},
                "processes started again": monkey.started_again,
            },
            lost=records.lost(self.db, WORKFLOW),
            seconds=time.monotonic() - self.begun,
            home=self.home if keeps else None,
        )

    def _nodes(self, urls: Servers, world: str) -> list[Node]:
        """Workers and, last, beat."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
        environ = {
            **ours,
            **PACE,
            "PIPELINE_DATABASE_URL": urls.database_url,
            "PIPELINE_BROKER_URL": urls.broker_url,
            "CHAOS_WORLD": world,
        }
        commands = {
            f"worker{n}": celery("worker", f"--hostname=worker{n}@chaos", "--pool=prefork", "--concurrency=2")
            for n in range(self.options.workers)
        }
        commands["beat"] = celery("beat", "--schedule", str(self.home / "beat-schedule"))
        nodes = [Node(name, command, environ, self.home / f"{name}.log") for name, command in commands.items()]
        for node in nodes:
            self.stack.callback(node.end)
        return nodes

    def _work(self, nodes: Sequence[Node], world: str) -> Monkey:
        """Publish in waves, do harm after each, and wait until every order is done or a question."""
        options = self.options
        planned = plan(options.seed, waves=options.waves, gap=_WAVE_EVERY, workers=options.workers)
        size = -(-options.mutations // options.waves)
        waves = [self.orders[start : start + size] for start in range(0, options.mutations, size)]
        monkey = Monkey(nodes[:-1], planned, lambda: _in_hand(world) > _BUSY, freeze_for=LEASE + 2.0)
        begun, told, pause = time.monotonic(), 0.0, threading.Event()
        while True:
            now = time.monotonic() - begun
            if waves and now >= _WAVE_EVERY * (options.waves - len(waves)):
                self._publish(waves.pop(0))
            monkey.step()
            stands = records.progress(self.db, WORKFLOW)
            if now - told >= 5.0:
                told = now
                options.tell(f"{now:.0f} s: {stands.done} done, {stands.asked} questions, {stands.unsettled} unsettled")
            if (monkey.is_done and stands.is_over(options.mutations)) or now > options.within or stands.stands_still:
                self.stands_still = stands.stands_still
                return monkey
            pause.wait(_LOOK_EVERY)

    def _publish(self, orders: Sequence[str]) -> None:
        """As a service would, in its own transaction. The next tick finds them."""
        new = [
            NewEvent(topic=operation_of(self.options.seed, order), message_id=order, payload={"order": order})
            for order in orders
        ]
        with self.db.transaction() as tx:
            events.publish(tx, WORKFLOW, new)

    def _is_registered(self) -> bool:
        with self.db.transaction() as tx:
            return tx.first(text("SELECT true FROM pipeline.workflows WHERE name = :name"), name=WORKFLOW) is not None

    def _wait(self, nodes: Sequence[Node], condition: Callable[[], bool], what: str) -> None:
        deadline, pause = time.monotonic() + _STARTS_WITHIN, threading.Event()
        while not condition():
            for node in nodes:
                if node.has_ended:
                    raise ChaosError(f"{node.name} ended while it was waited for {what}:\n{node.last_words()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"waited {_STARTS_WITHIN:g} s in vain for {what}; see the logs in {self.home}")
            pause.wait(_LOOK_EVERY)


@contextmanager
def _world(home: Path, seed: int) -> Iterator[str]:
    """The outside world in a process of its own; its address."""
    command = [sys.executable, "-m", "pipeline.chaos.world", str(home), str(seed)]
    with (
        (home / "world.log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def _wait_until_idle(world: str) -> None:
    """Until the world has nothing in hand any more: what it does late still counts."""
    pause, quiet = threading.Event(), 0
    deadline = time.monotonic() + _STARTS_WITHIN
    while quiet < 3 and time.monotonic() < deadline:
        quiet = 0 if _in_hand(world) else quiet + 1
        pause.wait(_LOOK_EVERY)


def _in_hand(world: str) -> int:
    """How many requests the world has not come to an end with."""
    with urllib.request.urlopen(f"{world}/-", timeout=10) as answer:  # noqa: S310 - our own process
        return int(json.load(answer)["in_hand"])


def _require(options: Options) -> None:
    if find_spec("httpx") is None:
        raise ChaosError("chaos needs httpx, which is not installed: pip install 'pipeline[http]'")
    for name, least in (("mutations", 1), ("workers", 1)):
        if getattr(options, name) < least:
            raise InvalidInputError(f"{name} is {getattr(options, name)}; expected at least {least}.")


def as_dict(result: Result) -> dict[str, Any]:
    """A result for programs."""
    found = result.facts
    return {
        "ok": result.is_good,
        "seed": result.options.seed,
        "mutations": result.options.mutations,
        "seconds": round(result.seconds, 1),
        "rows": len(found.ledger),
        "effects": len(found.effects),
        "consumed": sum(delivery.status == "consumed" for delivery in found.deliveries),
        "questions": [
            {
                "order": entry.order,
                "key": entry.key,
                "operation": entry.operation,
                "status": entry.status,
                "surfaced": entry.has_surfaced,
                "effects": len(found.by_key.get(entry.key, ())),
            }
            for entry in result.questions
        ],
        "problems": [str(problem) for problem in result.problems],
        "unfinished": list(result.unfinished),
        "world": [
            {name: getattr(seen, name) for name in ("world", "requests", "done", "applied", "failed", "asked")}
            for seen in result.compared
        ],
        "looks": dict(result.looks),
        "acts": dict(result.acts),
        "lost_their_worker": {"runs": result.lost[0], "with a mutation": result.lost[1]},
        "home": str(result.home) if result.home else None,
    }
