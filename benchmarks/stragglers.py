"""What calls that hang cost the calls that are answered: `python benchmarks/stragglers.py [--share 0.05] [--repeats 3]`.

Two workers with two processes each on servers of their own. A call takes 20 ms; the share that hangs is left behind
after its timeout of 4 s, and its outcome is found by the reconcile attempt. Cases alternate. Printed are the answered
orders per second, the time from an answer to its commit, statements and commits per run, and CPU per run.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from benchmarks.capacity import Bench, wait, worker
from pipeline import Applied, Call, Connector, Verdict, Workflow, mutation
from pipeline.domain.values import NewEvent
from pipeline.embedded import servers
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.transitions import events
from pipeline.workflows.registration import register_workflows
from pipeline.workflows.registry import Registry

TIMEOUT = timedelta(seconds=4)
_DONE = text("SELECT count(*) AS n FROM pipeline.runs WHERE workflow = 'stragglers' AND status = 'committed'")
_ANSWERED = text("""
SELECT count(*) AS runs, extract(epoch FROM max(r.finished_at) - min(r.started_at)) AS seconds,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM r.finished_at - m.resolved_at)) AS p50,
       percentile_cont(0.9) WITHIN GROUP (ORDER BY extract(epoch FROM r.finished_at - m.resolved_at)) AS p90
FROM pipeline.runs r JOIN pipeline.mutations m ON m.run_id = r.id
WHERE r.workflow = 'stragglers' AND r.id > :after AND m.resolved_by = 'call'
""")
_LATEST = text("SELECT coalesce(max(id::text), '00000000-0000-0000-0000-000000000000')::uuid AS id FROM pipeline.runs")
_COMMITS = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")


class Slow(Connector):
    """An outside system that takes 20 ms for an answer, or gives none."""

    name = "slow"

    @mutation(timeout=TIMEOUT)
    def call(self, call: Call, *, hangs: bool) -> None:
        """Answer after 20 ms, or hang."""
        del call
        threading.Event().wait(60 if hangs else 0.02)

    @call.reconcile
    def find(self, call: Call, *, hangs: bool) -> Verdict:
        """Say that it happened: nothing happens."""
        del call, hangs
        return Applied()


slow = Slow()
stragglers = Workflow("stragglers", concurrency=400, on_uncertain="contain")
orders = stragglers.topic("orders")


@stragglers.effect(orders)
def call_it(ctx: Any, order: Any) -> Any:
    """Make the call."""
    return ctx.slow.call(hangs=order.payload["hangs"])


class Measured(NamedTuple):
    """One backlog."""

    rate: float
    p50: float
    p90: float
    commits: float
    cpu: float


def cpu_seconds(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """CPU time of the processes and their living children."""
    total = 0
    for process in processes:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *children):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def measure(bench: Bench, started: Sequence[subprocess.Popen[bytes]], count: int, share: float) -> Measured:
    """Publish a backlog and wait for its end."""
    (after,), (before,) = bench.one(_LATEST), bench.one(_DONE)
    commits, cpu = bench.one(_COMMITS)[0], cpu_seconds(started)
    every = round(1 / share) if share else count + 1
    new = [
        NewEvent(topic="orders", message_id=f"{after} {n}", payload={"hangs": n % every == every - 1})
        for n in range(count)
    ]
    with bench.db.transaction() as tx:
        events.publish(tx, "stragglers", new)
    wait(lambda: bench.one(_DONE)[0] >= before + count, f"{count} runs")
    runs, seconds, p50, p90 = (float(value) for value in bench.one(_ANSWERED, after=after))
    commits, cpu = bench.one(_COMMITS)[0] - commits, cpu_seconds(started) - cpu
    return Measured(runs / seconds, p50, p90, commits / count, cpu * 1000 / count)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--orders", type=int, default=600)
    given = parser.parse_args()
    console = Console(highlight=False)
    found: dict[float, list[Measured]] = {0.0: [], given.share: []}
    with tempfile.TemporaryDirectory(prefix="stragglers") as folder:
        home = Path(folder)
        keep = ("PIPELINE_REDIS_BIN", "PIPELINE_POSTGRES_BIN")
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_") or name in keep
        }
        with servers.running(home / "servers", environ) as urls:
            migrate.upgrade(Database.connect_unpooled(urls.database_url))
            bench = Bench(urls, home, workflows="benchmarks.stragglers")
            register_workflows(bench.db, Registry.load(["benchmarks.stragglers"]))
            beat = ["beat", "--schedule", str(home / "beat")]
            with bench.processes(beat, worker(0), worker(1)) as (_, *workers):
                measure(bench, workers, 300, 0.0)
                for _ in range(given.repeats):
                    for share, seen in found.items():
                        seen.append(measure(bench, workers, given.orders, share))
            bench.db.dispose()
        servers.remove(home / "servers")
    table = Table(
        "calls that hang", "answered/s", "answer to commit p50", "p90", "commits per run", "worker CPU per run"
    )
    for share, seen in found.items():
        middle = Measured(*(statistics.median(column) for column in zip(*seen, strict=True)))
        rates = ", ".join(f"{item.rate:.0f}" for item in seen)
        table.add_row(
            f"{share:.0%}",
            f"{middle.rate:.0f} ({rates})",
            f"{middle.p50:.3f} s",
            f"{middle.p90:.3f} s",
            f"{middle.commits:.2f}",
            f"{middle.cpu:.2f} ms",
        )
    console.print(table)
    base, hanging = (statistics.median(item.rate for item in seen) for seen in found.values())
    console.print(f"answered orders/s against none hanging: {hanging / base:.2f}")


if __name__ == "__main__":
    main()
