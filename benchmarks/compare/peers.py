"""The table of peers, and how one is measured: warm up, preload, wait for the last order, check the witness."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from sqlalchemy.engine import make_url

from benchmarks.compare import work
from pipeline.bench.counters import connect, cpu_seconds
from pipeline.bench.figures import Sample, percentile
from pipeline.bench.installation import BenchError, Installation
from pipeline.embedded import binaries, processes

ROOT = Path(__file__).parents[2]
RATE = 20.0
_WARM_UP = 200  #: runs before anything is measured, as for ours
_PRELOAD_TIMEOUT = 120.0
_numbers = count()
_FOUR_COMMITS = """\
INSERT INTO compare_runs DEFAULT VALUES RETURNING id \\gset
INSERT INTO compare_ledger (id, status) VALUES (:id, 'in flight');
UPDATE compare_ledger SET status = 'applied', resolved_at = now() WHERE id = :id;
WITH done AS (UPDATE compare_runs SET phase = 'committed' WHERE id = :id) INSERT INTO compare_events (id) VALUES (:id);
"""
_FOUR_COMMITS_TABLES = """
DROP TABLE IF EXISTS compare_runs, compare_ledger, compare_events;
CREATE TABLE compare_runs (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, phase text NOT NULL DEFAULT 'prepared');
CREATE TABLE compare_ledger (id bigint PRIMARY KEY, status text NOT NULL, sent_at timestamptz NOT NULL DEFAULT now(),
                             resolved_at timestamptz);
CREATE TABLE compare_events (id bigint PRIMARY KEY, created_at timestamptz NOT NULL DEFAULT now());
"""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another engine."""

    name: str
    title: str
    module: str
    processes: int = 2
    has_ledger: bool = True
    call_ms: int = 0
    is_serial: bool = False  #: it does one order at a time
    settings: Mapping[str, str] = field(default_factory=dict)

    def drain(self, site: Installation, repeat: int, runs: int) -> Sample:
        """Warm up, preload so many orders while the workers stand still: runs per second until the last commit."""
        with self._engine(site) as engine:
            warm, orders = engine.warm_up(), engine.orders(runs, _WARM_UP)
            with engine.suspended():
                engine.enqueue(orders)
                before, begun = cpu_seconds(*engine.pids), time.monotonic()
            engine.wait(lambda: engine.count("done") >= _WARM_UP + runs, f"{runs} orders of {self.name}")
            after = cpu_seconds(*engine.pids)
            seconds = max(engine.instants("done").values()) - begun
            figures = {"runs_per_second": runs / seconds, "worker_cpu_ms": (after - before) * 1000 / runs}
            return Sample(case=self.name, repeat=repeat, figures=figures, problems=engine.problems([*warm, *orders]))

    def pace(self, site: Installation, repeat: int, runs: int) -> Sample:
        """Enqueue at a rate on running workers: milliseconds from enqueueing to the last commit."""
        with self._engine(site) as engine:
            warm, orders, pause = engine.warm_up(), engine.orders(runs, _WARM_UP), threading.Event()
            begun = time.monotonic()
            for n, order in enumerate(orders):
                pause.wait(max(0.0, begun + n / RATE - time.monotonic()))
                engine.enqueue([order])
            engine.wait(lambda: engine.count("done") >= _WARM_UP + runs, f"{runs} orders of {self.name}")
            sent, done = engine.instants("sent"), engine.instants("done")
            waited = [(done[order] - sent[order]) * 1000 for order in orders]
            figures = {f"p{percent}_ms": percentile(waited, percent) for percent in (50, 95, 99)}
            return Sample(case=self.name, repeat=repeat, figures=figures, problems=engine.problems([*warm, *orders]))

    @contextmanager
    def _engine(self, site: Installation) -> Iterator["Engine"]:
        name = f"compare_{next(_numbers)}"
        with closing(connect(site.urls.database_url)) as connection:
            connection.cursor().execute(f"CREATE DATABASE {name}")
        folder = site.home / name
        folder.mkdir()
        url = make_url(site.urls.database_url).set(drivername="postgresql", database=name)
        environ = {
            **os.environ,
            **self.settings,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{binaries.find_postgres(os.environ).directory}:{os.environ['PATH']}",
            work.DSN: url.render_as_string(hide_password=False),
            work.BROKER: re.sub(r"/\d+$", "/1", site.urls.broker_url),
            work.HOME: str(folder),
            work.HAS_LEDGER: "1" if self.has_ledger else "0",
            work.CALL_MS: str(self.call_ms),
        }
        engine = Engine(self, folder, environ)
        try:
            yield engine
        finally:
            engine.close()
            with closing(connect(site.urls.database_url)) as connection:
                connection.cursor().execute(f"DROP DATABASE {name} WITH (FORCE)")


class Engine:
    """The processes of a peer, and the files that they write."""

    def __init__(self, peer: Peer, folder: Path, environ: Mapping[str, str]) -> None:
        self._peer, self._folder, self._environ = peer, folder, dict(environ)
        self._log = folder / "log"
        self._workers: list[subprocess.Popen[bytes]] = []
        self._database = environ[work.DSN]
        with self._log.open("ab") as log:
            done = subprocess.run(self._command("setup"), env=self._environ, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise BenchError(f"{peer.name} cannot be set up:\n{processes.tail(self._log)}")
        self._sender = subprocess.Popen(
            self._command("enqueue"),
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("ab"),
            text=True,
            start_new_session=True,
        )

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._workers]

    def orders(self, number: int, first: int = 0) -> list[str]:
        return [f"order-{first + n:06}" for n in range(number)]

    def enqueue(self, orders: list[str]) -> None:
        assert self._sender.stdin is not None
        assert self._sender.stdout is not None
        self._sender.stdin.write(json.dumps(orders) + "\n")
        self._sender.stdin.flush()
        if self._sender.stdout.readline() != "\n":
            raise BenchError(f"{self._peer.name} cannot enqueue:\n{processes.tail(self._log)}")

    def start_workers(self, number: int) -> None:
        for _ in range(number):
            self._workers.append(
                processes.start(
                    self._command("work"),
                    log=self._log,
                    end_signal=signal.SIGKILL,
                    folder=self._folder,
                    environ=self._environ,
                )
            )

    def warm_up(self) -> list[str]:
        """Start the workers, and let them do some orders. Return these."""
        self.start_workers(self._peer.processes)
        orders = self.orders(_WARM_UP)
        self.enqueue(orders)
        self.wait(lambda: self.count("done") >= _WARM_UP, "the warm-up")
        return orders

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the workers stand still in this block, but no longer than a preload may take: they may hold a lock."""
        timer = threading.Timer(_PRELOAD_TIMEOUT, self._signal, [signal.SIGCONT])
        self._signal(signal.SIGSTOP)
        timer.start()
        try:
            yield
        finally:
            is_late = timer.finished.is_set()
            timer.cancel()
            self._signal(signal.SIGCONT)
        if is_late:
            raise BenchError(f"The preload of {self._peer.name} took more than {_PRELOAD_TIMEOUT:g} s.")

    def _signal(self, number: int) -> None:
        for process in self._workers:
            os.killpg(process.pid, number)

    def lines(self, name: str) -> list[str]:
        file = self._folder / name
        return file.read_text().splitlines() if file.exists() else []

    def count(self, name: str) -> int:
        file = self._folder / name
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def instants(self, name: str) -> dict[str, float]:
        return {order: float(at) for order, at in (line.split() for line in self.lines(name))}

    def wait(self, condition, what: str, within: float = 300.0) -> None:
        deadline, pause = time.monotonic() + within, threading.Event()
        while not condition():
            if any(process.poll() is not None for process in self._workers) or time.monotonic() > deadline:
                raise BenchError(f"Waited in vain for {what}:\n{processes.tail(self._log)}")
            pause.wait(0.1)

    def problems(self, orders: list[str]) -> list[str]:
        """Return what is wrong: each order must have one effect and one end, and its rows if there is a ledger."""
        wrong = []
        for name, found in (("effects", self.lines("effects")), ("done", [*self.instants("done")])):
            if Counter(found) != Counter(orders):
                wrong.append(f"{name}: {len(found)} of {len(set(found))} orders; expected {len(orders)}, each once")
        if self._peer.has_ledger:
            with closing(connect(self._database)) as connection, connection.cursor() as cursor:
                cursor.execute(
                    "SELECT (SELECT count(*) FROM ledger WHERE status = 'applied'), (SELECT count(*) FROM events)"
                )
                if (rows := cursor.fetchone()) != (len(orders), len(orders)):
                    wrong.append(f"rows of ledger and events: {rows}; expected {len(orders)} each")
        return wrong

    def close(self) -> None:
        for process in (*self._workers, self._sender):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _command(self, what: str) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", self._peer.module, what]


def drain_pgbench(site: Installation, repeat: int, runs: int) -> Sample:
    """Let eight clients of pgbench make the four commits of a run, prepared, each a statement of its own."""
    del runs
    program = binaries.find_postgres(os.environ).directory / "pgbench"
    script = site.home / "four-commits.sql"
    script.write_text(_FOUR_COMMITS)
    with closing(connect(site.urls.database_url)) as connection, connection.cursor() as cursor:
        cursor.execute(_FOUR_COMMITS_TABLES)
    url = make_url(site.urls.database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    command = [program, "-n", "-M", "prepared", "-c", "8", "-j", "2", "-T", "5", "-f", script, url]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return Sample(case="pgbench", repeat=repeat, problems=[f"pgbench does not run: {error}"])
    finally:
        site.query("DROP TABLE compare_runs, compare_ledger, compare_events")
    found = re.search(r"^tps = ([\d.]+)", shown, re.MULTILINE)
    assert found
    return Sample(case="pgbench", repeat=repeat, figures={"runs_per_second": float(found[1])})


_ENGINES = "benchmarks.compare.engines"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="chain",
            title="Celery chain of three, no ledger",
            module=f"{_ENGINES}.celery_chain",
            processes=1,
            has_ledger=False,
        ),
        Peer(
            name="chain-ledger",
            title="Celery chain with a hand-written ledger",
            module=f"{_ENGINES}.celery_chain",
            processes=1,
        ),
        Peer(
            name="chain-serial",
            title="Celery chain of three, no ledger, one order at a time",
            module=f"{_ENGINES}.celery_chain",
            processes=1,
            has_ledger=False,
            is_serial=True,
            settings={"COMPARE_SERIAL": "1"},
        ),
        Peer(
            name="chain-ledger-serial",
            title="Celery chain with a hand-written ledger, one order at a time",
            module=f"{_ENGINES}.celery_chain",
            processes=1,
            is_serial=True,
            settings={"COMPARE_SERIAL": "1"},
        ),
        Peer(
            name="chain-20ms",
            title="Celery chain with a ledger, 20 ms call, 50 threads",
            module=f"{_ENGINES}.celery_chain",
            processes=1,
            call_ms=20,
            settings={"COMPARE_THREADS": "50"},
        ),
        Peer(name="dbos", title="DBOS queue, 2 processes", module=f"{_ENGINES}.dbos_queue"),
        Peer(name="procrastinate", title="Procrastinate, 2 processes", module=f"{_ENGINES}.procrastinate_jobs"),
        Peer(name="pgqueuer", title="pgqueuer, 2 processes", module=f"{_ENGINES}.pgqueuer_jobs"),
        Peer(name="absurd", title="Absurd, 2 processes", module=f"{_ENGINES}.absurd_steps"),
    )
}
