"""Real workers and beats as processes, and the questions a test asks about what they did.

An installation has a database and a Redis of its own, so that it may be flushed and killed without
harm to others. Everything is asked of Postgres and of the recorder; nothing is believed because a
process said so.
"""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from pipeline.background.sweeps import PERIODS
from pipeline.domain.values import NewEvent
from pipeline.embedded import processes, servers
from pipeline.store.database import Database, Statement
from pipeline.store.reads import invariants
from pipeline.transitions import events, housekeeping
from tests.support import databases, forked_python
from tests.support.effect_recorder import Recorder, recording
from tests.support.environ import clean_environ
from tests.support.wait import wait_for

PROJECT = forked_python.PROJECT
#: Everything that waits in production waits seconds here.
QUICK = {
    "PIPELINE_LEASE": "3s",
    "PIPELINE_HEARTBEAT": "1s",
    "PIPELINE_REDISPATCH_AFTER": "2s",
    "PIPELINE_TICK": "500ms",
    "PIPELINE_STALL_TIMEOUT": "15s",
    "PIPELINE_WORKFLOWS": "tests.support.order_workflow",
}
#: For tests that count runs: neither a call nor a lease runs out of time while the machine stands still.
UNHURRIED = {"PIPELINE_LEASE": "60s", "SHOP_TIMEOUT": "20"}
#: For tests of what happens without any sweep: nobody would come back to a run that ran out of time.
RARE = UNHURRIED | {"PIPELINE_TICK": "1h"}
_TASK = re.compile(r"Task pipeline\.(?:prepare|mutate|next)\[(\S+)\] (received|succeeded|raised)")
_DELIVERIES = Statement[Any]("""
SELECT e.message_id, d.status FROM pipeline.deliveries d JOIN pipeline.events e ON e.id = d.event_id
WHERE e.workflow = :workflow
""")
_APPLIED = Statement[Any](
    "SELECT idempotency_key FROM pipeline.mutations WHERE status = 'applied' AND workflow = :workflow ORDER BY 1"
)
_DONE = Statement[Any](
    "SELECT message_id FROM pipeline.events WHERE workflow = :workflow AND topic = 'done' ORDER BY 1"
)
_RUNS = Statement[Any]("SELECT * FROM pipeline.runs WHERE workflow = :workflow ORDER BY id")
_OTHERS = """
SELECT FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
_LEDGER = Statement[Any]("SELECT * FROM pipeline.mutations WHERE workflow = :workflow ORDER BY id")


class Node:
    """A `celery` process and the children of its pool."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self.is_asked_to_stop = False
        self.process: forked_python.ForkedProcess | subprocess.Popen[bytes]
        if "PYTHONPROFILEIMPORTTIME" not in environ:
            has_ours = arguments[arguments.index("-A") + 1] == "pipeline"
            self.process = forked_python.start(module, arguments, environ=environ, output=log, has_ours=has_ours)
            return
        command = [sys.executable, "-m", module, *arguments]  # a fork would not show its imports
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=dict(environ), cwd=PROJECT, stdout=output, stderr=output, start_new_session=True
            )

    def wait_until_ready(self, sign: str = " ready.") -> None:
        wait_for(lambda: sign in self.log.read_text() or self._ended(), within=90, why=f"{self.name} ready")

    def children(self) -> list[int]:
        """The living processes of the pool."""
        return processes.child_pids(self.process.pid)

    def unfinished(self) -> set[str]:
        """Tasks of runs that this worker has received and not finished, by its log."""
        seen: dict[str, set[str]] = {"received": set(), "ended": set()}
        for task, word in _TASK.findall(self.log.read_text()):
            seen["received" if word == "received" else "ended"].add(task)
        return seen["received"] - seen["ended"]

    def kill_children(self) -> list[int]:
        """End every process of the pool without a chance to say goodbye. Returns which they were."""
        children = self.children()
        for pid in children:
            with suppress(ProcessLookupError):  # it may be ending by itself
                os.kill(pid, signal.SIGKILL)
        return children

    def kill(self) -> None:
        """End the parent without a chance to say goodbye, and see that its children are gone too."""
        children = self.children()
        self.process.kill()
        self.process.wait()
        wait_for(lambda: not any(lives(pid) for pid in children), why=f"the children of {self.name} gone")

    def freeze(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def ask_to_stop(self) -> None:
        self.is_asked_to_stop = True
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Stop in order and say how it ended: what it was doing is done when this returns.

        It is asked once: a second signal kills a process whose interpreter is ending, and its exit code is lost.
        """
        if not self.is_asked_to_stop:
            self.ask_to_stop()
        return self.process.wait(timeout=60)

    def end(self) -> None:
        """Away with it, whatever it does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _ended(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
        return False


@dataclass
class Installation:
    """Database, broker, recorder and nodes."""

    home: Path
    database_url: str
    broker_url: str
    recorder: Recorder
    workflow: str = "shop"
    app: str = "pipeline"  #: the Celery app of its nodes
    db: Database = field(init=False)
    nodes: list[Node] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    started: int = 0  #: nodes so far; each has a name of its own, and with it a log
    failed: int = 0  #: tests that had failed when the present nodes began
    ahead: timedelta = timedelta(0)  #: how far the database's clock is ahead

    def __post_init__(self) -> None:
        self.db = Database.connect(self.database_url, pool_size=2)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of every node."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
        urls = {"PIPELINE_DATABASE_URL": self.database_url, "PIPELINE_BROKER_URL": self.broker_url}
        found = {**ours, **QUICK, **urls, "SHOP_RECORDER": self.recorder.address}
        return (
            found
            if self.app == "pipeline"
            else found
            | {
                "HOST_BROKER": self.broker_url,
                "HOST_INSTALLS": "1",
                "C_FORCE_ROOT": "1",  # the shop accepts pickle
            }
        )

    def worker(self, *options: str, line: str = "", **environ: str) -> Node:
        """A worker that is ready. A ``line`` makes its messages suffer.

        Without mingle: each start would wait a second for the answers of other workers, which send nothing of ours.
        """
        given = options or ("--pool=prefork", "--concurrency=2")
        name = f"worker{self.started}"
        command = ["worker", "--loglevel=INFO", "--without-mingle", f"--hostname={name}@here", *given]
        node = self._node(name, command, line, environ)
        node.wait_until_ready()
        return node

    def beat(self, line: str = "", **environ: str) -> Node:
        """A beat with a schedule file of its own."""
        schedule = self.home / f"schedule{self.started}"
        command = ["beat", "--loglevel=INFO", f"--schedule={schedule}"]
        node = self._node(f"beat{self.started}", command, line, environ)
        node.wait_until_ready("beat: Starting")
        return node

    def publish(self, count: int) -> None:
        """Publish so many orders in one transaction."""
        ids = [f"order {len(self.published) + n}" for n in range(count)]
        new = [NewEvent(topic="orders", message_id=id_, payload={}) for id_ in ids]
        with self.db.transaction() as tx:
            events.publish(tx, self.workflow, new)
        self.published += ids

    def all_done_once(self, *, within: float = 90.0) -> None:
        """Every order was consumed, had one effect, and the ledger, the recorder and the doctor agree."""
        wait_for(self.is_consumed, within=within, every=0.1, why=f"all consumed; runs: {self.shown()}")
        effects = self.recorder.effects()
        assert effects == Counter(self.published), "an effect is missing or happened twice"
        assert self._column(_APPLIED) == self.recorder.keys(), "the ledger and the world disagree"
        assert self._column(_DONE) == sorted(self.published)
        wait_for(self._healthy, within=60, every=0.1)

    def is_consumed(self) -> bool:
        """Whether nothing is left to do; says what is."""
        with self.db.transaction() as tx:
            rows = tx.all(_DELIVERIES, workflow=self.workflow)
        left = [row for row in rows if row.status != "consumed"]
        assert not left, f"{len(left)} of {len(rows)} not consumed: {left[:3]}; {self.shown()}"
        return len(rows) == len(self.published)

    def ask(self, statement: str, **params: Any) -> Sequence[Any]:
        with self.db.transaction() as tx:
            return tx.all(Statement[Any](statement), **params)

    def freeze_between_transactions(self, node: Node) -> None:
        """Freeze a node that holds no lock: another worker could not start beside one that does."""
        open_ = """SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
          AND backend_type = 'client backend' AND xact_start IS NOT NULL"""

        def is_frozen() -> bool:
            node.freeze()
            for _ in range(20):
                if not self.ask(open_):
                    return True
            node.thaw()
            return False

        wait_for(is_frozen, within=60, why=f"{node.name} frozen between two transactions")

    def runs(self) -> Sequence[Any]:
        with self.db.transaction() as tx:
            return tx.all(_RUNS, workflow=self.workflow)

    def ledger(self) -> Sequence[Any]:
        with self.db.transaction() as tx:
            return tx.all(_LEDGER, workflow=self.workflow)

    def shown(self) -> str:
        """How many runs there are of each kind, for messages."""
        return str(Counter(f"{run.phase}, {run.status}" for run in self.runs()))

    def end_nodes(self) -> None:
        for node in self.nodes:
            node.end()
        self.nodes.clear()

    def let_time_pass(self, by: timedelta) -> None:
        """Set the database's clock forward for all connections from now on: deadlines and leases end."""
        self._set_ahead(self.ahead + by)

    def _set_ahead(self, ahead: timedelta) -> None:
        if ahead == self.ahead:
            return
        name = self.db.engine.url.database
        self.ask(f"ALTER DATABASE \"{name}\" SET pipeline.clock_offset = '{ahead.total_seconds()} seconds'")
        self.db.engine.dispose()
        self.ahead = ahead

    def begin_anew(self) -> None:
        """Nothing is left of the tests before, however they ended: no node, row, message, effect or closed gate."""
        self.end_nodes()
        self._set_ahead(timedelta(0))
        self.db.engine.dispose()
        wait_for(lambda: not self.ask(_OTHERS), why="the connections of ended nodes gone")
        databases.delete_all_rows(self.db)
        if self.broker_url.startswith("redis:"):
            with redis.Redis.from_url(self.broker_url) as client:
                client.flushall()
        self.recorder.forget()
        self.published.clear()

    def stand(self, begin: Callable[["Installation"], object], *, failed: int) -> None:
        """Nodes for the next test: those of the one before, unless it failed or one of them has ended."""
        if self.nodes and failed == self.failed and all(node.process.poll() is None for node in self.nodes):
            return
        self.begin_anew()
        self.failed = failed
        begin(self)

    def sweep_nothing(self) -> None:
        """Whoever is told to sweep once an hour has just done it."""
        with self.db.transaction() as tx:
            for name in PERIODS:
                housekeeping.take_slot(tx, name, timedelta(0))

    def ring(self) -> None:
        """Ring as a service does that has just published."""
        with Celery(broker=self.broker_url) as service:
            service.send_task("pipeline.schedule", args=(self.workflow,), queue="pipeline.schedule")

    def _node(self, name: str, command: Sequence[str], line: str, environ: Mapping[str, str]) -> Node:
        module, mode = ("tests.support.unreliable_broker", [line]) if line else ("celery", [])
        log = self.home / f"{name}.log"
        node = Node(name, module, [*mode, "-A", self.app, *command], {**self.environ, **environ}, log)
        self.nodes.append(node)
        self.started += 1
        return node

    def _healthy(self) -> bool:
        with self.db.transaction() as tx:
            assert invariants.findings(tx) == []
        return True

    def _column(self, statement: Any) -> list[str]:
        with self.db.transaction() as tx:
            return sorted(row[0] for row in tx.all(statement, workflow=self.workflow))


@contextmanager
def installed(home: Path, database_url: str, broker_url: str, app: str = "pipeline") -> Iterator[Installation]:
    """An installation without nodes; those that a test starts are gone at the end."""
    with recording(home) as recorder:
        found = Installation(home=home, database_url=database_url, broker_url=broker_url, recorder=recorder, app=app)
        try:
            yield found
        finally:
            found.end_nodes()
            found.db.dispose()


@contextmanager
def alone(server_url: str, home: Path, app: str = "pipeline") -> Iterator[Installation]:
    """An installation in a new home, with a database and a Redis that belong to nobody else."""
    with (
        databases.clone_database(server_url, f"{home.name}_{os.getpid()}") as database_url,
        own_broker(home / "broker") as broker_url,
        installed(home, database_url, broker_url, app) as found,
    ):
        yield found


@contextmanager
def own_broker(home: Path) -> Iterator[str]:
    """A Redis that belongs to nobody else."""
    given = clean_environ() | {"PIPELINE_DATABASE_URL": "postgresql://nowhere/none"}
    with servers.running(home, given) as found:
        yield found.broker_url
    servers.remove(home)


def lives(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    return _state(pid) not in ("", "Z")


def is_frozen(pid: int) -> bool:
    """Whether there is such a process, and a signal has stopped it."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
