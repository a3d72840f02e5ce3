"""Check what a worker needs before it takes its first run. With a problem it does not start."""

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Protocol

from pipeline.config import Settings
from pipeline.domain.errors import PipelineError
from pipeline.store import migrate
from pipeline.store.connections import ISOLATION_LEVEL
from pipeline.store.database import Database, Statement
from pipeline.store.reads.invariants import durability_findings
from pipeline.workflows.registry import Registry


class _IsolationRow(Protocol):
    level: str


_MAX_CLOCK_SKEW = timedelta(seconds=30)
_ISOLATION = Statement[_IsolationRow]("SELECT current_setting('transaction_isolation') AS level")


class UnsafeError(PipelineError):
    """Starting now could lose or repeat work. Every reason is in the message."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(("this worker does not start:", *(f"- {problem}" for problem in problems))))


def require_pool(pool: str) -> None:
    """Raise for a pool of greenlets: they share one thread, and a blocking driver would stop every heartbeat.

    It is asked first: under such a pool the other checks fail with errors that explain nothing.
    """
    kind = pool.partition(":")[0].rpartition(".")[2]
    if kind in ("gevent", "eventlet"):
        raise UnsafeError([f"the pool {kind} cannot keep leases alive; use prefork, threads or solo"])


def require_safe(db: Database, registry: Registry, settings: Settings, *, found: Iterable[str] = ()) -> None:
    """Raise with everything that is unsafe, also what the caller has found, or return."""
    migrate.require_current(db)
    problems = [
        *found,
        *_missing_workflows(registry),
        *_timeouts_over_task_limit(registry, settings.mutate_time_limit),
        *_unsafe_postgres(db, settings.allowed_unsafe_settings),
        *_clock_skew(db),
    ]
    if problems:
        raise UnsafeError(problems)


def _missing_workflows(registry: Registry) -> Iterator[str]:
    """A worker without workflows would take messages that others are waiting for."""
    if not registry.workflows:
        yield (
            "it knows no workflow; expected PIPELINE_WORKFLOWS to name modules that hold some, or an installed package "
            "that offers them"
        )


def _timeouts_over_task_limit(registry: Registry, limit: timedelta) -> Iterator[str]:
    """A wave may start at half of the task's time: a call and a reconcile attempt must fit into the other half."""
    for connector in registry.connectors.values():
        for name, operation in type(connector).operations().items():
            reconcile = operation.policy.immediate_timeout if operation.can_reconcile else timedelta(0)
            if operation.is_mutation and operation.timeout + reconcile > limit / 2:
                yield (
                    f"{connector.name}.{name} and a reconcile attempt may take "
                    f"{(operation.timeout + reconcile).total_seconds():g}"
                    f" s, more than half of PIPELINE_MUTATE_TIME_LIMIT ({limit.total_seconds():g} s); raise the limit "
                    "or shorten its timeout"
                )


def _unsafe_postgres(db: Database, allowed: Collection[str]) -> Iterator[str]:
    """Commits must outlive a crash, and every statement is written for one isolation level."""
    with db.transaction() as tx:
        level = tx.one(_ISOLATION).level
        found = durability_findings(tx, allowed=allowed)
    for finding in found:
        yield f"{finding.subject} {finding.detail}. {finding.advice}"
    if level != ISOLATION_LEVEL.lower():
        yield (
            f"transactions have the isolation level {level} although this worker begins them with {ISOLATION_LEVEL}; "
            "expected what it asked for; correct the pooler or proxy between this worker and Postgres"
        )


def _clock_skew(db: Database) -> Iterator[str]:
    """A quiet period lasts by both clocks, this host's and Postgres's: each second between them makes it longer."""
    with db.transaction() as tx:
        before = datetime.now(UTC)  # noqa: TID251 - this host's clock is what is being checked
        theirs = tx.clock()
    skew = abs(theirs - before)
    if skew > _MAX_CLOCK_SKEW:
        yield (
            f"this host's clock and Postgres's differ by {skew.total_seconds():.1f} s; expected less than "
            f"{_MAX_CLOCK_SKEW.total_seconds():g} s; correct the clock"
        )
