"""Numbers for docs/guides/deploy-capacity.md, measured on the machine that runs it: `python benchmarks/capacity.py`.

Everything is on one machine, on servers of its own: Postgres, Redis, beat and one or two workers. So the figures are a
floor for a machine like it, and the ratios between the lines are what carries over. It takes about two minutes.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from pipeline.domain.values import NewEvent
from pipeline.embedded import servers
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.transitions import events
from pipeline.workflows.registration import register_workflows
from pipeline.workflows.registry import Registry

ROOT = Path(__file__).parents[1]
CALLS = {"instant": 4000, "quick": 3000, "slow": 1000}
PAYLOAD = {"order": "4711", "email": "customer@example.org", "lines": ["a book", "a pen"]}
_SPAN = text("""
SELECT count(*) AS runs, extract(epoch FROM max(r.finished_at) - min(r.started_at)) AS seconds
FROM pipeline.runs r WHERE r.workflow = :workflow AND r.status = 'committed' AND r.id > :after
""")
_LATEST = text("SELECT coalesce(max(id::text), '00000000-0000-0000-0000-000000000000')::uuid AS id FROM pipeline.runs")
_SIZE = text("""
SELECT pg_current_wal_insert_lsn() - '0/0' AS wal,
       (SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'pipeline' AND c.relkind = 'r') AS bytes
""")
_CONNECTIONS = text(
    "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
_LATENCY = text("""
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY waited) AS p50,
       percentile_cont(0.99) WITHIN GROUP (ORDER BY waited) AS p99
FROM (SELECT extract(epoch FROM r.finished_at - e.created_at) * 1000 AS waited
      FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id JOIN pipeline.runs r ON r.id = d.run_id
      WHERE e.message_id LIKE 'light %') s
""")


class Bench:
    """A database, a broker, and processes that come and go."""

    def __init__(self, urls: servers.Servers, home: Path, workflows: str = "benchmarks.capacity_workflow") -> None:
        self.urls, self.home, self.workflows = urls, home, workflows
        self.db = Database.connect(urls.database_url, pool_size=2)

    @contextmanager
    def processes(self, *commands: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Celery commands, until the block is left."""
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")},
            "PIPELINE_DATABASE_URL": self.urls.database_url,
            "PIPELINE_BROKER_URL": self.urls.broker_url,
            "PIPELINE_WORKFLOWS": self.workflows,
            "PIPELINE_TICK": "1s",
        }
        started = []
        with (self.home / "log").open("ab") as log:
            for command in commands:
                line = [sys.executable, "-m", "celery", "-A", "pipeline", *command, "-l", "WARNING"]
                started.append(subprocess.Popen(line, cwd=ROOT, env=environ, stdout=log, stderr=log))
        try:
            yield started
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(timeout=60)

    def publish(self, workflow: str, count: int, prefix: str) -> None:
        """So many events in one transaction."""
        new = [NewEvent(topic="orders", message_id=f"{prefix} {n}", payload=PAYLOAD) for n in range(count)]
        with self.db.transaction() as tx:
            events.publish(tx, workflow, new)

    def one(self, statement: object, **params: object) -> tuple[float, ...]:
        """A single row."""
        with self.db.transaction() as tx:
            (row,) = tx.all(statement, **params)  # type: ignore[arg-type]
        return tuple(row)

    def drained(self, workflow: str, count: int) -> float:
        """Runs per second for a backlog of so many events, from the first claim to the last commit."""
        (after,) = self.one(_LATEST)
        self.publish(workflow, count, str(after))
        wait(lambda: self.one(_SPAN, workflow=workflow, after=after)[0] >= count, f"{count} runs of {workflow}")
        runs, seconds = self.one(_SPAN, workflow=workflow, after=after)
        return float(runs) / float(seconds)


def wait(condition: Callable[[], bool], what: str, within: float = 180.0) -> None:
    """Until it is so."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {within:g} s in vain for {what}")
        Event().wait(0.2)


def memory(process: subprocess.Popen[bytes]) -> float:
    """Megabytes of a worker with its pool, each shared page counted once."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pages = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in (process.pid, *children)]
    return sum(int(line.split()[1]) for page in pages for line in page.splitlines() if line.startswith("Pss:")) / 1024


def worker(number: int, concurrency: int = 2) -> list[str]:
    """A command."""
    return ["worker", f"--hostname=worker{number}@here", f"--concurrency={concurrency}"]


def throughput(bench: Bench, beat: Sequence[str]) -> dict[tuple[str, int], float]:
    """Runs per second by kind of call and number of workers; the first backlog warms up and is not counted."""
    found = {}
    for workers in (1, 2):
        with bench.processes(beat, *(worker(n) for n in range(workers))):
            bench.drained("instant", 500)
            for workflow, count in CALLS.items():
                found[workflow, workers] = bench.drained(workflow, count * workers)
    return found


def costs(bench: Bench, beat: Sequence[str]) -> dict[str, float]:
    """What one worker and one run cost."""
    with bench.processes(beat, worker(0)) as (_, process):
        bench.drained("instant", 500)
        wal, size = bench.one(_SIZE)
        bench.drained("instant", 4000)
        more_wal, more_size = bench.one(_SIZE)
        busy, megabytes = bench.one(_CONNECTIONS)[0], memory(process)
        for number in range(100):
            bench.publish("instant", 1, f"light {number}")
            Event().wait(0.1)
        wait(lambda: bench.one(_LATENCY)[0] is not None, "light load")
        Event().wait(2)
        p50, p99 = bench.one(_LATENCY)
    return {
        "connections to Postgres, worker with 2 processes and beat": float(busy),
        "memory of a worker with 2 processes, MB": megabytes,
        "rows and indexes per run, bytes": (more_size - size) / 4000,
        "WAL per run under backlog, bytes": float(more_wal - wal) / 4000,
        "publish to commit without a doorbell, p50 ms (PIPELINE_TICK=1s)": float(p50),
        "publish to commit without a doorbell, p99 ms (PIPELINE_TICK=1s)": float(p99),
    }


def main() -> None:
    """Measure and print."""
    console = Console(highlight=False)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="capacity")))
        keep = ("PIPELINE_REDIS_BIN", "PIPELINE_POSTGRES_BIN")
        nothing = {
            name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_") or name in keep
        }
        urls = stack.enter_context(servers.running(home / "servers", nothing))
        migrate.upgrade(Database.connect_unpooled(urls.database_url))
        bench = Bench(urls, home)
        register_workflows(bench.db, Registry.load(["benchmarks.capacity_workflow"]))
        beat = ["beat", "--schedule", str(home / "beat")]
        rates, each = throughput(bench, beat), costs(bench, beat)
        bench.db.dispose()
        servers.remove(home / "servers")
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.platform()}"
    console.print(f"{machine}, Python {platform.python_version()}")
    table = Table("call", "1 worker, runs/s", "2 workers, runs/s", "ratio", title="a backlog, one event per run")
    for name in CALLS:
        one, two = rates[name, 1], rates[name, 2]
        table.add_row(name, f"{one:.0f}", f"{two:.0f}", f"{two / one:.2f}")
    console.print(table)
    for name, value in each.items():
        console.print(f"{name}: {value:,.0f}")


if __name__ == "__main__":
    main()
