"""Show operations as workers registered them, and list, open and close their circuit breakers.

No workflow's code is needed for it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from uuid import UUID

from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.operations import Grade, OperationSpec
from pipeline.domain.values import Actor
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import ledger
from pipeline.store.reads import ledger as reads
from pipeline.store.schema import OperationRow
from pipeline.transitions import breakers

_FIELDS = tuple(each.name for each in fields(OperationSpec))


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredOperation(OperationSpec):
    """An operation as the newest code of a worker declared it."""

    registered_at: datetime  #: when its declaration changed last


def grade_of(spec: OperationSpec) -> Grade | None:
    """Return how well the outcome of an operation can be known; None: it only reads."""
    return Grade.of(keyed=spec.keyed, can_reconcile=spec.can_reconcile) if spec.is_mutation else None


def registered_operations(db: Database) -> list[RegisteredOperation]:
    """List every operation that a worker has registered, by name."""
    with db.transaction() as tx:
        return [_operation(row) for row in reads.operations(tx)]


def operations_by_name(
    tx: Transaction, names: Collection[tuple[str, str]]
) -> dict[tuple[str, str], RegisteredOperation]:
    """Return registered operations by connector and operation. Those that no worker has registered are missing."""
    return {(row.connector, row.operation): _operation(row) for row in reads.operations_by_name(tx, set(names))}


def _operation(row: OperationRow) -> RegisteredOperation:
    values = {name: getattr(row, name) for name in _FIELDS}
    values |= {name: tuple(values[name]) for name in ("redact", "shown")}
    return RegisteredOperation(**values, registered_at=row.registered_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBreaker:
    """A breaker that is open: no new mutation of its operation starts."""

    connector: str
    operation: str
    reason: str
    opened_by: str | None  #: the operator; None: it opened by itself
    opened_at: datetime
    probe_at: datetime | None  #: when a mutation is let through as a probe; None: an operator closes it


def open_breakers(db: Database) -> list[OpenBreaker]:
    """List open breakers, by operation."""
    with db.transaction() as tx:
        rows = ledger.open_breakers(tx)
    return [
        OpenBreaker(
            connector=row.connector,
            operation=row.operation,
            reason=row.reason,
            opened_by=row.opened_by,
            opened_at=row.opened_at,
            probe_at=row.probe_at,
        )
        for row in rows
    ]


def open_breaker(db: Database, operation: str, by: Actor) -> None:
    """Start no new mutation of an operation until an operator closes its breaker."""
    with db.transaction() as tx:
        breakers.open_by_operator(tx, operation_name(operation), by)


def close_breaker(
    db: Database, operation: str, by: Actor, dispatch_run: Callable[[UUID], object] = lambda _: None
) -> bool:
    """Start mutations of an operation again, and dispatch runs that waited. Return whether the breaker was open."""
    with db.transaction() as tx:
        was_open = breakers.close_by_operator(tx, operation_name(operation), by)
        waiting = breakers.redispatch_waiting(tx) if was_open else ()
    for run in waiting:
        dispatch_run(run.id)
    return was_open


def operation_name(text: str) -> tuple[str, str]:
    """Split ``connector.operation``."""
    connector, _, name = text.partition(".")
    if not connector or not name:
        raise InvalidInputError(f"{text!r} names no operation; expected connector.operation, such as mail.send.")
    return connector, name


def unknown_operation(operation: str, known: Iterable[str]) -> NotFoundError:
    """Return the error for an operation that no worker has registered."""
    return NotFoundError("operation", operation, known, hint="Nothing was changed.")
