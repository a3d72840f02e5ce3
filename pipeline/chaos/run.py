"""``pipeline chaos``: prove the promise on this installation, under faults.

Orders are published in waves. Real workers, with their own servers, send them to a provider that times
out, resets, responds with 5xx or 429, or commits late. Meanwhile workers are killed and frozen, beat,
Postgres and Redis are killed, Redis is emptied, and messages are lost and repeated. At the end the ledger is compared
with the provider's files, row by row. The seed repeats faults and disruptions.
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
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from sqlalchemy.exc import OperationalError

from pipeline.chaos import records
from pipeline.chaos.faults import PROVIDER_VARIABLE, operation_of
from pipeline.chaos.judge import ChaosRecords, LedgerEntry, OperationFigures, Problem, figures, judge
from pipeline.chaos.nodes import (
    QUEUES,
    ChaosMonkey,
    NodeProcess,
    Outages,
    celery_command,
    plan_disruptions,
    plan_outages,
)
from pipeline.chaos.records import FaultComparison
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.domain.values import NewEvent
from pipeline.embedded import servers
from pipeline.embedded.servers import Servers
from pipeline.store import migrate
from pipeline.store.database import Database, Statement
from pipeline.transitions import events

WORKFLOW = "chaos"
LEASE = 3.0
#: Intervals of minutes in production are seconds here.
FAST_SETTINGS = {
    "PIPELINE_LEASE": f"{LEASE:g}s",
    "PIPELINE_HEARTBEAT": "1s",
    "PIPELINE_REDISPATCH_AFTER": "2s",
    "PIPELINE_TICK": "500ms",
    "PIPELINE_STALL_TIMEOUT": "15s",
    "PIPELINE_MAX_COHORT_SIZE": "20",
    "PIPELINE_WORKFLOWS": "pipeline.chaos.workflow",
}
WAVE_EVERY = 2.0
POLL_INTERVAL = 0.1
BUSY_REQUESTS = 2  #: a disruption waits for more requests in progress than this
_START_TIMEOUT = 60.0
_REPORT_EVERY = 5.0
FREEZE = LEASE + 2.0  #: seconds that a worker stands still


class ChaosError(PipelineError):
    """The run could not be made. This says nothing about the promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """The options of a run."""

    mutations: int = 1000
    seed: int = field(default_factory=lambda: secrets.randbelow(10**6))
    workers: int = 2
    faults: int | None = None  #: percent of the provider's calls in which it misbehaves; None: as in ``faults``
    home: Path | None = None
    report_progress: Callable[[str], None] = lambda _: None

    @property
    def waves(self) -> int:
        """The number of waves and of disruptions: at least one of each kind."""
        return 4 + self.mutations // 150

    @property
    def time_limit(self) -> float:
        """How long it may take: longer for more orders, and generous on a busy machine."""
        return 240.0 + self.waves * WAVE_EVERY + 0.3 * self.mutations


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosResult:
    """The result of a run."""

    options: ChaosOptions
    records: ChaosRecords
    problems: Sequence[Problem]
    unfinished: Sequence[str]
    comparison: Sequence[FaultComparison]
    reconcile_counts: Mapping[str, int]
    disruptions: Mapping[str, int]
    lost_runs: tuple[int, int]  #: runs that lost their worker, and those of them with a mutation in the ledger
    seconds: float
    home: Path | None  #: the kept records; None if the run succeeded and they were removed

    @property
    def is_successful(self) -> bool:
        return not self.problems and not self.unfinished

    @property
    def figures(self) -> list[OperationFigures]:
        """The effects of each operation."""
        return figures(self.records)

    @property
    def unresolved(self) -> list[LedgerEntry]:
        """Mutations that an operator would have to resolve."""
        return self.records.unresolved


def run(options: ChaosOptions) -> ChaosResult:
    """Make a run and judge it."""
    check_options(options)
    home = make_home(options.home)
    with ExitStack() as stack:
        urls = stack.enter_context(servers.running(home, environ_without_urls()))
        db = Database.connect(urls.database_url, pool_size=2)
        stack.callback(db.dispose)
        migrate.upgrade(db)
        result = _ChaosRun(options, home, db, stack).result(urls)
    if result.home is None:
        servers.remove(home)
    return result


def make_home(parent: Path | None) -> Path:
    """Make a folder for one run."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="chaos-", dir=parent)).resolve()


def environ_without_urls() -> dict[str, str]:
    """Return the environment without the addresses of servers, so that a run has its own."""
    return {name: value for name, value in os.environ.items() if not name.endswith(("_DATABASE_URL", "_BROKER_URL"))}


class _ChaosRun:
    """One run, from the first process to the verdict."""

    def __init__(self, options: ChaosOptions, home: Path, db: Database, stack: ExitStack) -> None:
        self.options, self.home, self.db, self.stack = options, home, db, stack
        self.orders = [f"order {n}" for n in range(options.mutations)]
        self.block_reason: str | None = None
        self.begun = time.monotonic()

    def result(self, urls: Servers) -> ChaosResult:
        options = self.options
        provider = self.stack.enter_context(provider_process(self.home, options.seed, options.faults))
        nodes = start_nodes(self.home, urls, provider, self.stack, workers=options.workers)
        wait_for_nodes(nodes, lambda: is_registered(self.db), "the workers to start")
        drive = planned_drive(options, self.home, nodes[:-1], nodes[-1], urls.broker_url, provider)
        drive.run(self._publish, self._is_over)
        unfinished = records.unfinished_orders(self.db, WORKFLOW)
        if self.block_reason:
            unfinished.insert(0, f"the whole workflow stands still: {self.block_reason}")
        stop_nodes(nodes)
        wait_until_idle(provider)
        found = records.load_records(self.db, WORKFLOW, self.home, self.orders)
        problems = judge(found)
        keeps = options.home is not None or problems or unfinished
        return ChaosResult(
            options=options,
            records=found,
            problems=problems,
            unfinished=unfinished,
            comparison=records.comparison(found, self.home),
            reconcile_counts=records.reconcile_counts(self.home),
            disruptions=drive.fault_counts(),
            lost_runs=records.lost_run_counts(self.db, WORKFLOW),
            seconds=time.monotonic() - self.begun,
            home=self.home if keeps else None,
        )

    def _publish(self, orders: Sequence[str]) -> None:
        """Publish orders. While Postgres is away nothing is published, and publishing again is publishing once."""
        publish(self.db, self.options.seed, orders)

    def _is_over(self, drive: "Drive") -> bool:
        """Return whether every fault was caused and every order is done or unresolved, or nothing moves any more."""
        progress = records.progress(self.db, WORKFLOW)
        self.block_reason = progress.block_reason
        drive.report(
            f"{progress.done} done, {progress.unresolved} unresolved, {progress.open_mutations} mutations open"
        )
        return bool(self.block_reason) or (drive.is_done and progress.is_over(self.options.mutations))


@dataclass(kw_only=True)
class Drive:
    """Publishes orders in waves and causes the planned faults meanwhile."""

    waves: list[Sequence[str]]
    gap: float  #: seconds between two waves
    monkey: ChaosMonkey
    outages: Outages
    time_limit: float
    report_progress: Callable[[str], None]
    #: What publishing and looking may meet while Postgres or Redis is away; both are then tried again.
    unavailable: tuple[type[Exception], ...] = (OperationalError, redis.RedisError)
    begun: float = field(default_factory=time.monotonic)
    reported_at: float = float("-inf")
    is_crowded: Callable[[], bool] = lambda: False  #: whether the next wave should wait

    @property
    def is_done(self) -> bool:
        """Whether every wave was published and every planned fault caused."""
        return not self.waves and self.monkey.is_done and self.outages.is_done

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def run(self, publish: Callable[[Sequence[str]], object], is_over: Callable[["Drive"], bool]) -> None:
        """Go on until it is over, or the time limit is reached."""
        published, pause = 0, threading.Event()
        while True:
            self.monkey.step()
            self.outages.step()
            try:
                if self.waves and self.seconds >= self.gap * published and not self.is_crowded():
                    publish(self.waves[0])
                    self.waves.pop(0)
                    published += 1
                if is_over(self) or self.seconds > self.time_limit:
                    return
            except self.unavailable:
                if self.seconds > self.time_limit:
                    raise
            pause.wait(POLL_INTERVAL)

    def report(self, text: str) -> None:
        """Report how far it is, every few seconds."""
        if self.seconds - self.reported_at >= _REPORT_EVERY:
            self.reported_at = self.seconds
            self.report_progress(f"{self.seconds:.0f} s: {text}")

    def fault_counts(self) -> dict[str, int]:
        """Return how often each fault was caused."""
        return {
            **{str(kind): count for kind, count in self.monkey.disruption_counts.items()},
            **{str(kind): count for kind, count in self.outages.counts.items()},
            "messages gone with the emptied Redis": self.outages.emptied_messages,
            "processes started again": self.monkey.restarts,
        }


def planned_drive(  # noqa: PLR0913 - the parts of an installation
    options: ChaosOptions,
    home: Path,
    workers: Sequence[NodeProcess],
    beat: NodeProcess | None,
    broker_url: str,
    provider: str,
    *,
    queues: Sequence[str] = QUEUES,
) -> Drive:
    """Plan the waves and the faults of a run by its seed."""
    waves, gap = options.waves, WAVE_EVERY
    size = -(-options.mutations // waves)
    orders = [f"order {n}" for n in range(options.mutations)]
    return Drive(
        waves=[orders[start : start + size] for start in range(0, options.mutations, size)],
        gap=gap,
        monkey=ChaosMonkey(
            workers,
            plan_disruptions(options.seed, waves=waves, gap=gap, workers=options.workers),
            lambda: requests_in_progress(provider) > BUSY_REQUESTS,
            freeze_for=FREEZE,
        ),
        outages=Outages(home, beat, broker_url, plan_outages(options.seed, waves=waves, gap=gap), queues=queues),
        time_limit=options.time_limit,
        report_progress=options.report_progress,
    )


def publish(db: Database, seed: int, orders: Sequence[str]) -> None:
    """Publish orders as a service would, in its own transaction. The next tick finds them."""
    new = [NewEvent(topic=operation_of(seed, order), message_id=order, payload={"order": order}) for order in orders]
    with db.transaction() as tx:
        events.publish(tx, WORKFLOW, new)


def start_nodes(  # noqa: PLR0913 - the parts of an installation
    home: Path,
    urls: Servers,
    provider: str,
    stack: ExitStack,
    *,
    workers: int,
    pool: int = 2,
    more: Mapping[str, str] | None = None,
) -> list[NodeProcess]:
    """Start the workers and, last, beat."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
    environ = {
        **inherited,
        **FAST_SETTINGS,
        "PIPELINE_DATABASE_URL": urls.database_url,
        "PIPELINE_BROKER_URL": urls.broker_url,
        PROVIDER_VARIABLE: provider,
        **(more or {}),
    }
    commands = {
        f"worker{n}": celery_command("worker", f"--hostname=worker{n}@chaos", "--pool=prefork", f"--concurrency={pool}")
        for n in range(workers)
    }
    commands["beat"] = celery_command("beat", "--schedule", str(home / "beat-schedule"))
    nodes = [NodeProcess(name, command, environ, home / f"{name}.log") for name, command in commands.items()]
    for node in nodes:
        stack.callback(node.end)
    return nodes


def wait_for_nodes(nodes: Sequence[NodeProcess], condition: Callable[[], bool], what: str) -> None:
    """Wait until nodes that were just started are ready."""
    deadline, pause = time.monotonic() + _START_TIMEOUT, threading.Event()
    while not condition():
        for node in nodes:
            if node.has_ended:
                raise ChaosError(f"{node.name} ended during the wait for {what}:\n{node.log_tail()}")
        if time.monotonic() > deadline:
            raise ChaosError(f"waited {_START_TIMEOUT:g} s in vain for {what}; see the logs in {nodes[0].log.parent}")
        pause.wait(POLL_INTERVAL)


def stop_nodes(nodes: Sequence[NodeProcess]) -> None:
    """Let nodes finish their work and end."""
    for node in nodes:
        node.ask_to_stop()
    for node in nodes:
        node.wait_and_end()


def is_registered(db: Database) -> bool:
    """Return whether a worker has registered the workflow."""
    with db.transaction() as tx:
        return (
            tx.first(Statement[Any]("SELECT true FROM pipeline.workflows WHERE name = :name"), name=WORKFLOW)
            is not None
        )


@contextmanager
def provider_process(home: Path, seed: int, faults: int | None) -> Iterator[str]:
    """Run the provider in its own process and yield its address."""
    command = [sys.executable, "-m", "pipeline.chaos.provider", str(home), str(seed)]
    command += [] if faults is None else [str(faults)]
    with (
        (home / "provider.log").open("ab") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def wait_until_idle(provider: str) -> None:
    """Wait until the provider has no request in progress: a late effect still counts."""
    pause, quiet = threading.Event(), 0
    deadline = time.monotonic() + _START_TIMEOUT
    while quiet < 3 and time.monotonic() < deadline:
        quiet = 0 if requests_in_progress(provider) else quiet + 1
        pause.wait(POLL_INTERVAL)


def requests_in_progress(provider: str) -> int:
    """Return how many requests the provider has not finished."""
    with urllib.request.urlopen(f"{provider}/-", timeout=10) as response:  # noqa: S310 - our own process
        return int(json.load(response)["in_progress"])


def check_options(options: ChaosOptions) -> None:
    """Refuse options that make no sense, before anything is started."""
    if find_spec("httpx") is None:
        raise ChaosError("chaos needs httpx, which is not installed: pip install 'celery-durable-effects[http]'")
    for name, least in (("mutations", 1), ("workers", 1)):
        if getattr(options, name) < least:
            raise InvalidInputError(f"{name} is {getattr(options, name)}; expected at least {least}.")
    if options.faults is not None and not 0 <= options.faults <= 90:
        raise InvalidInputError(f"faults is {options.faults}; expected a percentage from 0 to 90.")


def as_dict(result: ChaosResult) -> dict[str, Any]:
    """Return a result as JSON."""
    found = result.records
    return {
        "is_successful": result.is_successful,
        "seed": result.options.seed,
        "mutations": result.options.mutations,
        "seconds": round(result.seconds, 1),
        "rows": len(found.ledger),
        "effects": len(found.effects),
        "consumed": sum(delivery.status == "consumed" for delivery in found.deliveries),
        "unresolved": [
            {
                "order": entry.order,
                "key": entry.key,
                "operation": entry.operation,
                "status": entry.status,
                "found_late": entry.is_found_late,
                "effects": len(found.by_key.get(entry.key, ())),
            }
            for entry in result.unresolved
        ],
        "problems": [str(problem) for problem in result.problems],
        "unfinished": list(result.unfinished),
        "comparison": [asdict(row) for row in result.comparison],
        "operations": [asdict(row) for row in result.figures],
        "reconciles": dict(result.reconcile_counts),
        "disruptions": dict(result.disruptions),
        "lost_runs": {"runs": result.lost_runs[0], "with_mutation": result.lost_runs[1]},
        "home": str(result.home) if result.home else None,
    }
