"""Show operations as workers registered them. No workflow's code is needed for it."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from datetime import datetime

from pipeline.connectors.sdk import Grade
from pipeline.domain.operations import OperationSpec
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import operations as reads
from pipeline.store.schema import OperationRow

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
