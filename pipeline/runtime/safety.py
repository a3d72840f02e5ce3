"""What a worker checks before it takes its first run: with any of these wrong it does not start."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from pipeline.domain.errors import PipelineError
from pipeline.runtime.registry import Registry
from pipeline.store import migrate
from pipeline.store.database import Database


class UnsafeError(PipelineError):
    """Starting now could lose or repeat work. Every reason is in the message."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(("this worker does not start:", *(f"- {problem}" for problem in problems))))


def require_safe(db: Database, registry: Registry, *, lease: timedelta, heartbeat: timedelta) -> None:
    """Raise with everything that is unsafe, or return."""
    migrate.require_current(db)
    problems = [*_short_leases(registry, lease), *_skew(db, lease - 2 * heartbeat)]
    if problems:
        raise UnsafeError(problems)


def _short_leases(registry: Registry, lease: timedelta) -> Iterator[str]:
    """A mutation that may take longer than a lease could still be sent when somebody else owns the run."""
    for connector in registry.connectors.values():
        for name, operation in type(connector).operations().items():
            if operation.is_mutation and operation.timeout >= lease:
                yield (
                    f"{connector.name}.{name} may take {operation.timeout.total_seconds():g} s, which is not shorter "
                    f"than PIPELINE_LEASE ({lease.total_seconds():g} s); raise the lease or shorten its timeout"
                )


def _skew(db: Database, margin: timedelta) -> Iterator[str]:
    """Deadlines are measured here and leases there: the two clocks must agree within the lease's margin."""
    with db.transaction() as tx:
        before = datetime.now(UTC)  # noqa: TID251 - this host's clock is what is being checked
        theirs = tx.clock()
    skew = abs(theirs - before)
    if skew > margin:
        yield (
            f"this host's clock and Postgres's differ by {skew.total_seconds():.1f} s; expected less than "
            f"{margin.total_seconds():g} s (PIPELINE_LEASE less two heartbeats); correct the clock"
        )
