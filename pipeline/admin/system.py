"""Report on the installation: workers, sweeps, versions, settings, queues, and what the doctor finds."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import metadata
from platform import python_version

from pipeline.config import Settings, package_version
from pipeline.domain.workflows import is_worker_gone
from pipeline.store import migrate
from pipeline.store.codecs import default_codecs
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import gauges, invariants, work
from pipeline.store.reads.invariants import Finding, broken_counts, durability_findings, head_findings
from pipeline.store.rows import SweepRunRow
from pipeline.store.schema import WorkerRow

_PACKAGES = ("celery", "kombu", "redis", "SQLAlchemy")
#: Of these names of queues to the number of waiting messages; None while the broker is away.
QueueLengths = Callable[[Collection[str]], Mapping[str, int] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as it described itself, and whether it still runs."""

    name: str
    host: str
    pid: int
    pool: str
    concurrency: int
    queues: tuple[str, ...]
    workflows: Mapping[str, int]  #: versions by name
    code_version: str  #: as set by the operator; empty if unset
    package_version: str  #: of Pipeline
    started_at: datetime
    seen_at: datetime  #: when it last recorded that it runs
    is_gone: bool  #: it missed three heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One version of a workflow's code that workers run."""

    workflow: str
    version: int  #: of the workflow, as its code declares it
    code_version: str  #: as set by the operator; empty if unset
    package_version: str  #: of Pipeline
    workers: tuple[str, ...]  #: that run it
    since: datetime  #: when the first of these workers started


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """A sweep, when it ran last and when it is due."""

    name: str
    period: timedelta
    last_run_at: datetime | None  #: none: it never ran
    due_at: datetime | None
    is_late: bool  #: it has not run for three of its periods
    report: Mapping[str, int]  #: what its last run did


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingStatus:
    """A setting; secrets and passwords are masked."""

    variable: str
    value: str
    default: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsafeSetting:
    """A setting of Postgres with which a crash may forget a commit."""

    subject: str
    detail: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether workers, beat and the doctor are well, and when an operator or a sweep acted last."""

    at: datetime
    workers: int  #: that run
    gone_workers: int  #: that were killed within the last day
    late_sweeps: tuple[str, ...]
    doctor_at: datetime | None  #: when the doctor last checked the invariants
    broken: int  #: invariants that were broken then
    last_act_at: datetime | None  #: of any act in the audit; the last question was settled then or before

    @property
    def are_workers_well(self) -> bool:
        return self.workers > 0

    @property
    def is_beat_well(self) -> bool:
        return not self.late_sweeps

    @property
    def is_doctor_well(self) -> bool:
        return self.doctor_at is not None and not self.broken

    @property
    def is_well(self) -> bool:
        return self.are_workers_well and self.is_beat_well and self.is_doctor_well


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """Everything about the installation."""

    health: Health
    workers: tuple[WorkerStatus, ...]
    releases: tuple[Release, ...]  #: which versions of the code run, by workflow
    sweeps: tuple[SweepStatus, ...]
    schema_version: str  #: of the database
    expected_schema_version: str  #: of this code
    versions: Mapping[str, str]  #: of packages, of Python, and of the Postgres server
    settings: tuple[SettingStatus, ...]  #: of the process that reports
    unsafe_settings: tuple[UnsafeSetting, ...]
    queues: Mapping[str, int] | None  #: waiting messages by queue; None: the broker was not asked, or is away


def health(db: Database, sweep_periods: Mapping[str, timedelta]) -> Health:
    """Return whether workers, beat and the doctor are well."""
    with db.transaction() as tx:
        return _health(tx.clock(), _workers(tx), _sweeps(tx, sweep_periods), gauges.last_act_at(tx))


def system_report(
    db: Database,
    settings: Settings,
    sweep_periods: Mapping[str, timedelta],
    queue_lengths: QueueLengths | None = None,
) -> SystemReport:
    """Report on the installation. ``queue_lengths`` asks the broker, for callers that know Celery."""
    with db.transaction() as tx:
        workers, sweeps = _workers(tx), _sweeps(tx, sweep_periods)
        found = _health(tx.clock(), workers, sweeps, gauges.last_act_at(tx))
        server = gauges.server(tx)
        unsafe = durability_findings(tx, allowed=settings.allowed_unsafe_settings)
    names = {queue for worker in workers for queue in worker.queues}
    return SystemReport(
        health=found,
        workers=workers,
        releases=_releases(workers),
        sweeps=sweeps,
        schema_version=server.schema_version,
        expected_schema_version=migrate.expected_version(),
        versions=_versions(server.server_version),
        settings=list_settings(settings),
        unsafe_settings=tuple(
            UnsafeSetting(subject=each.subject, detail=each.detail, advice=each.advice) for each in unsafe
        ),
        queues=None if queue_lengths is None else queue_lengths(sorted(names)),
    )


def list_settings(settings: Settings) -> tuple[SettingStatus, ...]:
    """List every setting of a process; secrets and passwords are masked."""
    return tuple(
        SettingStatus(variable=row.variable, value=row.value, default=row.default, description=row.meaning)
        for row in settings.describe()
    )


def list_workers(db: Database) -> tuple[WorkerStatus, ...]:
    """List workers that run, and those that were killed within the last day."""
    with db.transaction() as tx:
        return _workers(tx)


def releases_of(tx: Transaction, workflow: str) -> tuple[Release, ...]:
    """Return the versions of a workflow's code that workers run now, the newest first."""
    return tuple(each for each in _releases(_workers(tx)) if each.workflow == workflow)


def _releases(workers: Collection[WorkerStatus]) -> tuple[Release, ...]:
    found: dict[tuple[str, int, str, str], list[WorkerStatus]] = {}
    for worker in workers:
        for name, version in worker.workflows.items():
            if not worker.is_gone:
                found.setdefault((name, version, worker.code_version, worker.package_version), []).append(worker)
    made = [
        Release(
            workflow=key[0],
            version=key[1],
            code_version=key[2],
            package_version=key[3],
            workers=tuple(sorted(worker.name for worker in its)),
            since=min(worker.started_at for worker in its),
        )
        for key, its in found.items()
    ]
    return tuple(sorted(made, key=lambda each: (each.workflow, -each.version, -each.since.timestamp())))


def _versions(server_version: str) -> dict[str, str]:
    found = {name: metadata.version(name) for name in _PACKAGES}
    return {"pipeline": package_version(), **found, "python": python_version(), "postgres": server_version}


def _workers(tx: Transaction) -> tuple[WorkerStatus, ...]:
    now = tx.clock()
    return tuple(_worker_status(row, now) for row in gauges.workers(tx))


def _worker_status(row: WorkerRow, now: datetime) -> WorkerStatus:
    return WorkerStatus(
        name=row.name,
        host=row.host,
        pid=row.pid,
        pool=row.pool,
        concurrency=row.concurrency,
        queues=tuple(row.queues),
        workflows=row.workflows,
        code_version=row.code_version,
        package_version=row.package_version,
        started_at=row.started_at,
        seen_at=row.seen_at,
        is_gone=is_worker_gone(row.seen_at, now),
    )


def _sweeps(tx: Transaction, periods: Mapping[str, timedelta]) -> tuple[SweepStatus, ...]:
    runs, late = gauges.sweep_runs(tx), frozenset(work.overdue_sweeps(tx, periods))
    return tuple(_sweep_status(name, every, runs.get(name), name in late) for name, every in periods.items())


def _sweep_status(name: str, period: timedelta, row: SweepRunRow | None, is_late: bool) -> SweepStatus:
    return SweepStatus(
        name=name,
        period=period,
        last_run_at=row.last_run_at if row is not None else None,
        due_at=row.last_run_at + period if row is not None else None,
        is_late=is_late,
        report=(row.report or {}) if row is not None else {},
    )


def _health(
    now: datetime, workers: Collection[WorkerStatus], sweeps: Collection[SweepStatus], last_act_at: datetime | None
) -> Health:
    doctor = next((each for each in sweeps if each.name == "doctor"), None)
    return Health(
        at=now,
        workers=sum(not worker.is_gone for worker in workers),
        gone_workers=sum(worker.is_gone for worker in workers),
        late_sweeps=tuple(each.name for each in sweeps if each.is_late),
        doctor_at=doctor.last_run_at if doctor is not None else None,
        broken=sum(broken_counts(doctor.report).values()) if doctor is not None else 0,
        last_act_at=last_act_at,
    )


def findings(
    db: Database,
    *,
    recent: int = 10_000,
    allowed_unsafe_settings: Collection[str] = (),
    noted_head: str | None = None,
) -> list[Finding]:
    """Return every row that breaks a rule, overdue work, and settings of Postgres that risk commits.

    ``noted_head``: a head of the audit that was kept elsewhere, which the chain must still contain.
    """
    with db.transaction() as tx:
        noted = head_findings(tx, noted_head) if noted_head is not None else []
        found = invariants.findings(tx, recent=recent)
        return noted + found + durability_findings(tx, allowed=allowed_unsafe_settings)


def audit_head(db: Database) -> str | None:
    """The newest link of the audit, to be kept elsewhere. None: nothing is chained yet."""
    with db.transaction() as tx:
        return invariants.audit_head(tx)


def connect(settings: Settings) -> Database:
    """Connect to the database of the settings, with the keys of encrypted workflows that they have."""
    db = Database.connect(settings.database_url, pool_size=settings.pool_size)
    db.codecs = default_codecs(settings)
    return db


def check_readiness(db: Database) -> None:
    """Check that the database answers and has the schema of this code; raise an error otherwise."""
    migrate.require_current(db)


def clock(db: Database) -> datetime:
    """Return the time of the database."""
    with db.transaction() as tx:
        return tx.clock()
