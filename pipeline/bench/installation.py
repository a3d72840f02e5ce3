"""The installation that is measured: its servers, the processes on it, and what they cost.

The queues of a broker have fixed names, so workers of a measurement would take the messages of another installation.
"""

import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from pipeline.admin.controls import WorkflowControls
from pipeline.bench.counters import OWN, LogCounts, StatementLog, connect, cpu_seconds, memory_mb, postmaster_pid
from pipeline.bench.workflow import COMMITTED_SUFFIX, DONE, IDLE, NAMES, ORDERS, WITNESS_VARIABLE
from pipeline.celery import app
from pipeline.chaos.nodes import NodeProcess, celery_command
from pipeline.client import publish
from pipeline.config import Settings
from pipeline.domain.errors import PipelineError
from pipeline.domain.states import DeliveryStatus, RunStatus
from pipeline.domain.values import Actor
from pipeline.embedded import servers
from pipeline.embedded.servers import Servers
from pipeline.store import migrate
from pipeline.store.database import Database, Statement, UnreadRow, identity
from pipeline.store.schema import deliveries, metadata
from pipeline.tasks.broker_owner import owner_key
from pipeline.tasks.messages import queue_depth
from pipeline.workflows.registration import register_workflows
from pipeline.workflows.registry import Registry

_TABLES = ", ".join(str(table) for table in metadata.sorted_tables)
_OWN = f"^({'|'.join(NAMES)}|{IDLE}[0-9]+)$"  #: the names of the benchmark's workflows
_COPY = "copy-"
ORDER = "order-"  #: the names of orders that were published begin with it, and come after those of copies
NOT_COPIED = f"e.message_id >= '{ORDER}'"  #: of a row ``e`` of events
#: Without the columns that Postgres computes.
_DELIVERY_COLUMNS = ", ".join(column.name for column in deliveries.columns if column.computed is None)

#: Each run that is copied has an order, its delivery, a mutation, and the event that it published.
_COPY_FINISHED = f"""
WITH source AS (
  SELECT r.id AS run, m.id AS mutation, d.event_id AS "order", o.id AS done
  FROM pipeline.runs r JOIN pipeline.mutations m ON m.run_id = r.id JOIN pipeline.deliveries d ON d.run_id = r.id
  JOIN pipeline.events o ON o.created_by_run_id = r.id
  WHERE r.workflow = %(workflow)s AND d.status = '{DeliveryStatus.CONSUMED}' LIMIT 1
), new AS MATERIALIZED (
  SELECT s.*, pipeline.uuid7() AS new_run, pipeline.uuid7() AS new_mutation,
    pipeline.next_event_id() AS new_order, pipeline.next_event_id() AS new_done, n
  FROM source s, generate_series(1, %(count)s) n
), runs AS (
  INSERT INTO pipeline.runs OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.runs,
    to_jsonb(r) || jsonb_build_object('id', n.new_run, 'event_ids', jsonb_build_array(n.new_order),
      'mutation_id', n.new_mutation))).*
  FROM new n JOIN pipeline.runs r ON r.id = n.run
), mutations AS (
  INSERT INTO pipeline.mutations OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.mutations,
    to_jsonb(m) || jsonb_build_object('id', n.new_mutation, 'run_id', n.new_run, 'effect_id', n.new_mutation,
      'idempotency_key', n.new_mutation))).*
  FROM new n JOIN pipeline.mutations m ON m.id = n.mutation
), orders AS (
  INSERT INTO pipeline.events OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.events,
    to_jsonb(e) || jsonb_build_object('id', n.new_order, 'message_id', '{_COPY}' || n.new_order))).*
  FROM new n JOIN pipeline.events e ON e.id = n."order"
), done AS (
  INSERT INTO pipeline.events OVERRIDING SYSTEM VALUE
  SELECT (jsonb_populate_record(NULL::pipeline.events,
    to_jsonb(e) || jsonb_build_object('id', n.new_done, 'message_id', '{_COPY}' || n.new_order,
      'created_by_run_id', n.new_run, 'caused_by', jsonb_build_array(n.new_order)))).*
  FROM new n JOIN pipeline.events e ON e.id = n.done
)
INSERT INTO pipeline.deliveries ({_DELIVERY_COLUMNS})
SELECT {_DELIVERY_COLUMNS} FROM (
  SELECT (jsonb_populate_record(NULL::pipeline.deliveries,
    to_jsonb(d) || jsonb_build_object('event_id', n.new_order, 'run_id', n.new_run))).*
  FROM new n JOIN pipeline.deliveries d ON d.event_id = n."order"
) copied
"""


def clear(cursor: Any) -> list[str]:
    """Remove every row, unless there are workflows of other programs: remove nothing then, and return some names."""
    cursor.execute("BEGIN; LOCK TABLE pipeline.workflows IN ACCESS EXCLUSIVE MODE")
    try:
        cursor.execute("SELECT name FROM pipeline.workflows WHERE name !~ %s ORDER BY name LIMIT 3", (_OWN,))
        foreign = [name for (name,) in cursor.fetchall()]
        if not foreign:
            for switch in ("DISABLE", "ENABLE"):  # only an owner of the schema empties the ledger and the audit
                for table in ("mutations", "audit", "audit_links"):
                    cursor.execute(f"ALTER TABLE pipeline.{table} {switch} TRIGGER USER")
                if switch == "DISABLE":
                    cursor.execute(f"TRUNCATE {_TABLES} CASCADE")
    finally:
        cursor.execute("COMMIT")
    return foreign


def copy_finished_run(cursor: Any, workflow: str, count: int) -> None:
    """Copy a finished run of a workflow so many times, with its order, its mutation and what it published."""
    cursor.execute(_COPY_FINISHED, {"workflow": workflow, "count": count})


WORKFLOWS = "pipeline.bench.workflow"  #: the module with the measured workflows
_START_TIMEOUT = 300.0
_POLL = 0.1
_PRELOADED_AT_ONCE = 1000  #: a multiple of every number of payloads that a case repeats
_ACTOR = Actor(name="bench")
_SIZES = """
SELECT pg_current_wal_insert_lsn() - '0/0', sum(pg_total_relation_size(c.oid))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'pipeline' AND c.relkind = 'r'
"""
_RENAME_SESSION = Statement[UnreadRow]("SELECT set_config('application_name', CAST(:name AS text), false)")
_OPEN_RUNS = "SELECT count(*) FROM pipeline.runs WHERE status = %s"
_HOLDER = "SELECT worker FROM pipeline.runs WHERE workflow = %s AND status = %s AND worker IS NOT NULL"
_DONE = f"SELECT count(*) FROM pipeline.events e WHERE e.workflow = %s AND e.topic = %s AND {NOT_COPIED}"


class BenchError(PipelineError):
    """The measurement could not be made."""


class NotEmptyError(BenchError):
    """The database or the broker is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The processes of a measurement: workers, each with its pool, and beat."""

    workers: int = 1
    concurrency: int = 2
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was spent up to an instant."""

    workers: float
    postgres: float | None
    wal: float
    rows: float  #: bytes of tables and indexes


class Installation:
    """Servers to measure on, with an empty database."""

    def __init__(self, urls: Servers, home: Path, *, log: Path | None) -> None:
        self.urls, self.home = urls, home
        self.db = Database.connect_unpooled(urls.database_url)
        self._session = connect(urls.database_url)
        self._log = None if log is None else StatementLog(urls.database_url, log)
        self._postmaster = postmaster_pid(int(self.query("SELECT pg_backend_pid()")[0][0]))
        self._names = count()

    @property
    def can_count(self) -> bool:
        """Whether statements can be counted: the log of Postgres is within reach."""
        return self._log is not None

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement, in a transaction of its own."""
        with self._session.cursor() as cursor:
            cursor.execute(sql, params or None)
            found: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
            return found

    def clear(self) -> None:
        """Remove every row. Refuse that if other programs have registered workflows meanwhile."""
        with self._session.cursor() as cursor:
            if foreign := clear(cursor):
                raise _not_empty(foreign)

    def copy_finished_run(self, workflow: str, count: int) -> None:
        """Copy a finished run of a workflow so many times."""
        with self._session.cursor() as cursor:
            copy_finished_run(cursor, workflow, count)

    def register(self) -> None:
        """Register the measured workflows, as a worker does when it starts."""
        register_workflows(self.db, Registry.load([WORKFLOWS]))

    def analyze(self) -> None:
        """Give the planner statistics of the rows that are there."""
        self.query("ANALYZE")

    def close(self) -> None:
        """Close the session."""
        self._session.close()

    @contextmanager
    def counted(self) -> Iterator[LogCounts]:
        """Count statements, commits and plans of the workers in this block; zero where that cannot be done."""
        with self._log.counted() if self._log else nullcontext(LogCounts()) as counts:
            yield counts

    def postgres_cpu(self) -> float | None:
        """Return the processor time of Postgres; None if it runs on another machine."""
        return None if self._postmaster is None else cpu_seconds(self._postmaster)

    def environ(self, options: FleetOptions, witness: Path) -> dict[str, str]:
        """Return the environment of the processes: default settings, but for those that a case names."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
        return {
            **inherited,
            "PIPELINE_DATABASE_URL": self.urls.database_url,
            "PIPELINE_BROKER_URL": self.urls.broker_url,
            "PIPELINE_WORKFLOWS": WORKFLOWS,
            WITNESS_VARIABLE: str(witness),
            **options.settings,
        }

    @contextmanager
    def fleet(self, options: FleetOptions) -> Iterator["Fleet"]:
        """Start workers and beat on an empty database; stop them at the end of the block."""
        self.clear()
        folder = self.home / f"fleet{next(self._names)}"
        folder.mkdir()
        with ExitStack() as stack:
            yield Fleet(self, options, folder, stack)


class Fleet:
    """Running processes, and the orders that were published to them."""

    def __init__(self, site: Installation, options: FleetOptions, folder: Path, stack: ExitStack) -> None:
        self.site, self.folder = site, folder
        self.witness = folder / "witness"
        self.published: Counter[str] = Counter()  #: orders, by workflow
        self.expected: int | None = None  #: orders that must be done; None: all that were published
        self.configure(options)
        self._stack = stack
        self._orders = (f"{ORDER}{number:08}" for number in count())
        self._db = Database.connect(site.urls.database_url, pool_size=1)  #: of the service that publishes orders
        stack.callback(self._db.dispose)
        with self._db.transaction() as tx:  # its statements do not count as the workers'
            tx.all(_RENAME_SESSION, name=OWN)
        self._broker = stack.enter_context(_connection(site.urls.broker_url))
        self.workers = [self.start_worker(n) for n in range(options.workers)]
        self.beat = self._start("beat", celery_command("beat", "--schedule", str(folder / "schedule")))
        self.wait(lambda: all((folder / node.name).exists() for node in self.workers), "the workers to start")

    def configure(self, options: FleetOptions) -> None:
        """Give the processes that start from now on these options, with their settings."""
        self._options, self._environ = options, self.site.environ(options, self.witness)

    def start_worker(self, number: int) -> NodeProcess:
        """Start a worker; its file of liveness is there once it takes messages."""
        options = (f"--hostname=worker{number}@bench", f"--concurrency={self._options.concurrency}")
        return self._start(f"worker{number}", celery_command("worker", *options))

    def publish(self, workflow: str, number: int, *payloads: Any) -> list[str]:
        """Publish so many orders in one transaction, with these payloads in turn. Return their names."""
        orders = [*islice(self._orders, number)]
        given = zip(orders, cycle(payloads or [{}]), strict=False)
        new = [{"topic": ORDERS, "message_id": order, "payload": payload} for order, payload in given]
        with self._db.transaction() as tx:
            publish(tx, workflow, new)
        self.published[workflow] += number
        return orders

    def preload(self, workflow: str, number: int, *payloads: Any) -> list[str]:
        """Pause a workflow and publish so many orders to it. Return their names."""
        WorkflowControls(self.site.db).pause(workflow, _ACTOR)
        names: list[str] = []
        while len(names) < number:
            names += self.publish(workflow, min(_PRELOADED_AT_ONCE, number - len(names)), *payloads)
        return names

    def pause(self, workflow: str) -> None:
        """Start no run, and wait until none is active."""
        WorkflowControls(self.site.db).pause(workflow, _ACTOR)
        self.wait(lambda: self.site.query(_OPEN_RUNS, RunStatus.ACTIVE.value)[0][0] == 0, "the runs to finish")

    def release(self, workflow: str) -> None:
        """Resume a workflow, and wake it."""
        WorkflowControls(self.site.db).resume(workflow, _ACTOR)
        self.wake(workflow)

    def pace(self, workflow: str, number: int, rate: float, *payloads: Any) -> dict[str, float]:
        """Publish so many orders at a rate, whether or not earlier ones are done (an open loop).

        Return their names with the instants before each publish, by the machine's monotonic clock.
        """
        pause, begun = threading.Event(), time.monotonic()
        sent: dict[str, float] = {}
        for n, payload in zip(range(number), cycle(payloads or [{}]), strict=False):
            pause.wait(max(0.0, begun + n / rate - time.monotonic()))
            now = time.monotonic()
            (order,) = self.publish(workflow, 1, payload)
            sent[order] = now
            self.wake(workflow)
        return sent

    def wake(self, workflow: str) -> None:
        """Send the wake-up message of a workflow, as a database client does after its commit."""
        app.send_task("pipeline.schedule", args=(workflow,), expires=60, connection=self._broker)

    def wait_until_done(self, *, within: float = 600.0) -> None:
        """Wait until each published order is done."""
        for workflow, number in self.published.items():
            self.wait(
                lambda workflow=workflow, number=number: self.done(workflow) >= number,  # type: ignore[misc]
                f"{number} orders of {workflow}",
                within=within,
            )

    def committed_at(self, orders: Collection[str]) -> dict[str, float]:
        """Return the instant at which the worker of each order had the answer to its commit."""
        file = Path(f"{self.witness}{COMMITTED_SUFFIX}")
        found: dict[str, float] = {}

        def has_all() -> bool:  # a commit is visible before its worker has the answer
            lines = file.read_text().splitlines() if file.exists() else []
            found.update((order, float(at)) for order, at in map(str.split, lines))
            return all(order in found for order in orders)

        self.wait(has_all, f"the instants of {len(orders)} commits")
        return {order: found[order] for order in orders}

    def effects(self) -> int:
        """Return how many effects the witness has seen."""
        return self.witness.read_bytes().count(b"\n") if self.witness.exists() else 0

    def done(self, workflow: str) -> int:
        """Return how many orders of a workflow are done."""
        return int(self.site.query(_DONE, workflow, DONE)[0][0])

    def costs(self) -> Costs:
        """Return what the workers, Postgres and its WAL have cost up to now."""
        ((wal, size),) = self.site.query(_SIZES)
        return Costs(
            workers=cpu_seconds(*self._pids()), postgres=self.site.postgres_cpu(), wal=float(wal), rows=float(size)
        )

    def memory_mb(self) -> float:
        """Return the memory of the workers in megabytes."""
        return memory_mb(*self._pids())

    def _pids(self) -> list[int]:
        return [node.process.pid for node in self.workers]

    def holder(self, workflow: str) -> tuple[NodeProcess, int]:
        """Return the worker that holds the active run of a workflow, and the pid of its pool process."""
        ((name,),) = self.site.query(_HOLDER, workflow, RunStatus.ACTIVE.value)
        pid = int(name.rpartition(":")[2])
        return next(node for node in self.workers if pid in node.children()), pid

    def kill(self, node: NodeProcess) -> None:
        """Kill a worker with all its processes, and leave it dead."""
        self.workers.remove(node)
        node.end()

    def wait(self, condition: Callable[[], bool], what: str, *, within: float = _START_TIMEOUT) -> None:
        """Wait for a fact while every process lives."""
        deadline, pause = time.monotonic() + within, threading.Event()
        while not condition():
            for node in (*self.workers, self.beat):
                if node.has_ended:
                    raise BenchError(f"{node.name} ended during the wait for {what}:\n{node.log_tail()}")
            if time.monotonic() > deadline:
                raise BenchError(f"Waited {within:g} s in vain for {what}.")
            pause.wait(_POLL)

    def stop(self) -> None:
        """Stop the workers and beat in order."""
        nodes = (*self.workers, self.beat)
        for node in nodes:
            node.ask_to_stop()
        for node in nodes:
            node.wait_and_end()

    def _start(self, name: str, command: Sequence[str]) -> NodeProcess:
        environ = {**self._environ, "PIPELINE_LIVENESS_FILE": str(self.folder / name)}
        node = NodeProcess(name, command, environ, self.folder / f"{name}.log")
        self._stack.callback(node.end)
        return node


@contextmanager
def embedded() -> Iterator[Installation]:
    """Start servers of the benchmark's own, with an empty database. They are removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="bench-")).resolve()
    folder.chmod(0o711)  # Postgres may run under another account
    ignored = ("_DATABASE_URL", "_BROKER_URL")
    clean = {name: value for name, value in os.environ.items() if not name.endswith(ignored)}
    try:
        with servers.running(folder / "servers", clean) as urls:
            migrate.upgrade(Database.connect_unpooled(urls.database_url))
            with closing(Installation(urls, folder, log=folder / "servers" / "postgres.log")) as site:
                yield site
    finally:
        servers.remove(folder / "servers")
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def configured(environ: Mapping[str, str] = os.environ) -> Iterator[Installation]:
    """Measure on the configured servers. Refuse servers that are in use; leave them empty."""
    settings = Settings.load(environ)
    urls = Servers(database_url=settings.database_url, broker_url=settings.broker_url)
    migrate.require_current(Database.connect_unpooled(urls.database_url))
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        closing(Installation(urls, Path(folder), log=None)) as site,
    ):
        refuse_workflows(site)
        refuse_broker(site)
        try:
            yield site
        finally:
            site.clear()
            empty_queues(urls.broker_url)


def refuse_workflows(site: Installation) -> None:
    """Raise an error if the database has workflows."""
    names = [name for (name,) in site.query("SELECT name FROM pipeline.workflows ORDER BY name LIMIT 3")]
    if names:
        raise _not_empty(names)


def refuse_broker(site: Installation) -> None:
    """Raise an error if the broker belongs to another database, or if a queue holds messages."""
    with site.db.transaction() as tx:
        owner = foreign_owner(site.urls.broker_url, identity(tx))
    queues = filled_queues(site.urls.broker_url)
    if owner is None and not queues:
        return
    found = (
        f"has messages in queues ({', '.join(queues[:3])})"
        if owner is None
        else f"belongs to another database, {owner}"
    )
    raise NotEmptyError(
        f"The configured broker {found}, and workers of the benchmark would take its messages. Expected a broker that "
        "no other program uses. Point PIPELINE_BROKER_URL at a Redis number or a virtual host of its own, or leave out "
        "--here to use servers of the benchmark's own."
    )


def _not_empty(names: Sequence[str]) -> NotEmptyError:
    return NotEmptyError(
        f"The configured database holds workflows ({', '.join(names)}), and the benchmark removes every row. "
        "Expected a migrated database without workflows. Point PIPELINE_DATABASE_URL and PIPELINE_BROKER_URL at an "
        "empty one, or leave out --here to use servers of the benchmark's own."
    )


#: Messages that workers hold, as Celery keeps them in Redis: those of other apps, and ours.
_UNACKED = ("unacked", "unacked_index", "pipeline.unacked", "pipeline.unacked_index")


def foreign_owner(url: str, ours: str) -> str | None:
    """Return the other database that a broker belongs to. RabbitMQ has no place for this."""
    with _connection(url) as connection:
        if not _is_redis(url):
            return None
        found = connection.default_channel.client.get(owner_key())
    owner = found.decode(errors="replace") if isinstance(found, bytes) else found
    return None if owner in {None, ours} else str(owner)


def filled_queues(url: str) -> list[str]:
    """Return the queues of a broker that hold messages, those of other programs on the same Redis number too."""
    with _connection(url) as connection:
        if _is_redis(url):
            return _redis_queues(connection.default_channel.client)
        return [name for name in sorted(app.amqp.queues) if queue_depth(connection, name)]


def empty_queues(url: str) -> None:
    """Remove what a measurement left in the queues, which were empty when it began."""
    with _connection(url) as connection:
        channel = connection.default_channel
        for name in filled_queues(url):
            if _is_redis(url):
                channel.client.delete(name)
            else:
                channel.queue_purge(name)


def _redis_queues(client: Any) -> list[str]:
    names = [*client.scan_iter(_type="list"), *(name for name in _UNACKED if client.exists(name))]
    return sorted(name.decode(errors="replace") if isinstance(name, bytes) else name for name in names)


def _is_redis(url: str) -> bool:
    return not url.startswith("amqp")


@contextmanager
def _connection(url: str) -> Iterator[Any]:
    with app.connection_for_write(url, connect_timeout=5) as connection:
        yield connection
