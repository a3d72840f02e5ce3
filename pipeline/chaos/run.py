"""``pipeline chaos``: prove the promise on this installation, under faults.

Orders are published in waves. Real workers, with their own servers, send them to a provider that times
out, resets, responds with 5xx or 429, or commits late. Meanwhile workers are killed and frozen, beat,
Postgres and Redis are killed, and messages are lost and repeated. At the end the ledger is compared with
the provider's files, row by row. The seed repeats faults and disruptions.
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

from sqlalchemy.exc import OperationalError

from pipeline.chaos import records
from pipeline.chaos.faults import PROVIDER_VARIABLE, operation_of
from pipeline.chaos.judge import ChaosRecords, LedgerEntry, OperationFigures, Problem, figures, judge
from pipeline.chaos.nodes import ChaosMonkey, NodeProcess, Outages, celery_command, plan_disruptions, plan_outages
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
_WAVE_EVERY = 2.0
_POLL_INTERVAL = 0.1
_BUSY_REQUESTS = 2  #: a disruption waits for more requests in progress than this
_START_TIMEOUT = 60.0


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
        return 240.0 + self.waves * _WAVE_EVERY + 0.3 * self.mutations


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
    _check_options(options)
    if options.home is not None:
        options.home.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.home)).resolve()
    clean = {name: value for name, value in os.environ.items() if not name.endswith(("_DATABASE_URL", "_BROKER_URL"))}
    with ExitStack() as stack:
        urls = stack.enter_context(servers.running(home, clean))
        db = Database.connect(urls.database_url, pool_size=2)
        stack.callback(db.dispose)
        migrate.upgrade(db)
        result = _ChaosRun(options, home, db, stack).result(urls)
    if result.home is None:
        servers.remove(home)
    return result


class _ChaosRun:
    """One run, from the first process to the verdict."""

    def __init__(self, options: ChaosOptions, home: Path, db: Database, stack: ExitStack) -> None:
        self.options, self.home, self.db, self.stack = options, home, db, stack
        self.orders = [f"order {n}" for n in range(options.mutations)]
        self.block_reason: str | None = None
        self.begun = time.monotonic()

    def result(self, urls: Servers) -> ChaosResult:
        provider = self.stack.enter_context(_provider_process(self.home, self.options))
        nodes = self._nodes(urls, provider)
        self._wait(nodes, self._is_registered, "the workers to start")
        outages = Outages(
            self.home,
            nodes[-1],
            urls.broker_url,
            plan_outages(self.options.seed, waves=self.options.waves, gap=_WAVE_EVERY),
        )
        monkey = self._publish_and_disrupt(nodes, provider, outages)
        unfinished = records.unfinished_orders(self.db, WORKFLOW)
        if self.block_reason:
            unfinished.insert(0, f"the whole workflow stands still: {self.block_reason}")
        for node in nodes:
            node.ask_to_stop()
        for node in nodes:
            node.wait_and_end()
        _wait_until_idle(provider)
        found = records.load_records(self.db, WORKFLOW, self.home, self.orders)
        problems = judge(found)
        keeps = self.options.home is not None or problems or unfinished
        return ChaosResult(
            options=self.options,
            records=found,
            problems=problems,
            unfinished=unfinished,
            comparison=records.comparison(found, self.home),
            reconcile_counts=records.reconcile_counts(self.home),
            disruptions={
                **{str(kind): count for kind, count in monkey.disruption_counts.items()},
                **{str(kind): count for kind, count in outages.counts.items()},
                "processes started again": monkey.restarts,
            },
            lost_runs=records.lost_run_counts(self.db, WORKFLOW),
            seconds=time.monotonic() - self.begun,
            home=self.home if keeps else None,
        )

    def _nodes(self, urls: Servers, provider: str) -> list[NodeProcess]:
        """Start the workers and, last, beat."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
        environ = {
            **inherited,
            **FAST_SETTINGS,
            "PIPELINE_DATABASE_URL": urls.database_url,
            "PIPELINE_BROKER_URL": urls.broker_url,
            PROVIDER_VARIABLE: provider,
        }
        commands = {
            f"worker{n}": celery_command("worker", f"--hostname=worker{n}@chaos", "--pool=prefork", "--concurrency=2")
            for n in range(self.options.workers)
        }
        commands["beat"] = celery_command("beat", "--schedule", str(self.home / "beat-schedule"))
        nodes = [NodeProcess(name, command, environ, self.home / f"{name}.log") for name, command in commands.items()]
        for node in nodes:
            self.stack.callback(node.end)
        return nodes

    def _publish_and_disrupt(self, nodes: Sequence[NodeProcess], provider: str, outages: Outages) -> ChaosMonkey:
        """Publish in waves, disrupt after each, and wait until every order is done or unresolved."""
        options = self.options
        planned = plan_disruptions(options.seed, waves=options.waves, gap=_WAVE_EVERY, workers=options.workers)
        size = -(-options.mutations // options.waves)
        waves = [self.orders[start : start + size] for start in range(0, options.mutations, size)]
        monkey = ChaosMonkey(
            nodes[:-1], planned, lambda: _requests_in_progress(provider) > _BUSY_REQUESTS, freeze_for=LEASE + 2.0
        )
        begun, reported_at, pause = time.monotonic(), 0.0, threading.Event()
        while True:
            now = time.monotonic() - begun
            monkey.step()
            outages.step()
            try:
                if waves and now >= _WAVE_EVERY * (options.waves - len(waves)):
                    self._publish(waves[0])
                    waves.pop(0)
                progress = records.progress(self.db, WORKFLOW)
            except OperationalError:  # Postgres was killed; publishing again is publishing once
                if now > options.time_limit:
                    raise
                pause.wait(_POLL_INTERVAL)
                continue
            if now - reported_at >= 5.0:
                reported_at = now
                options.report_progress(
                    f"{now:.0f} s: {progress.done} done, {progress.unresolved} unresolved, "
                    f"{progress.open_mutations} mutations open"
                )
            if (
                (monkey.is_done and outages.is_done and progress.is_over(options.mutations))
                or now > options.time_limit
                or progress.block_reason
            ):
                self.block_reason = progress.block_reason
                return monkey
            pause.wait(_POLL_INTERVAL)

    def _publish(self, orders: Sequence[str]) -> None:
        """Publish orders as a service would, in its own transaction. The next tick finds them."""
        new = [
            NewEvent(topic=operation_of(self.options.seed, order), message_id=order, payload={"order": order})
            for order in orders
        ]
        with self.db.transaction() as tx:
            events.publish(tx, WORKFLOW, new)

    def _is_registered(self) -> bool:
        with self.db.transaction() as tx:
            return (
                tx.first(Statement[Any]("SELECT true FROM pipeline.workflows WHERE name = :name"), name=WORKFLOW)
                is not None
            )

    def _wait(self, nodes: Sequence[NodeProcess], condition: Callable[[], bool], what: str) -> None:
        deadline, pause = time.monotonic() + _START_TIMEOUT, threading.Event()
        while not condition():
            for node in nodes:
                if node.has_ended:
                    raise ChaosError(f"{node.name} ended during the wait for {what}:\n{node.log_tail()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"waited {_START_TIMEOUT:g} s in vain for {what}; see the logs in {self.home}")
            pause.wait(_POLL_INTERVAL)


@contextmanager
def _provider_process(home: Path, options: ChaosOptions) -> Iterator[str]:
    """Run the provider in its own process and yield its address."""
    command = [sys.executable, "-m", "pipeline.chaos.provider", str(home), str(options.seed)]
    command += [] if options.faults is None else [str(options.faults)]
    with (
        (home / "provider.log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def _wait_until_idle(provider: str) -> None:
    """Wait until the provider has no request in progress: a late effect still counts."""
    pause, quiet = threading.Event(), 0
    deadline = time.monotonic() + _START_TIMEOUT
    while quiet < 3 and time.monotonic() < deadline:
        quiet = 0 if _requests_in_progress(provider) else quiet + 1
        pause.wait(_POLL_INTERVAL)


def _requests_in_progress(provider: str) -> int:
    """Return how many requests the provider has not finished."""
    with urllib.request.urlopen(f"{provider}/-", timeout=10) as response:  # noqa: S310 - our own process
        return int(json.load(response)["in_progress"])


def _check_options(options: ChaosOptions) -> None:
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
