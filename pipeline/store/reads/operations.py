"""Read what workers declared about operations. Nothing here writes."""

from collections.abc import Collection, Sequence

from pipeline.store.database import Statement, Transaction
from pipeline.store.schema import OperationRow

_OPERATIONS = Statement[OperationRow]("SELECT * FROM pipeline.operations ORDER BY connector, operation")
_OPERATIONS_BY_NAME = Statement[OperationRow]("""
SELECT o.* FROM unnest(CAST(:connectors AS text[]), CAST(:operations AS text[])) AS x(connector, operation)
JOIN pipeline.operations o ON o.connector = x.connector AND o.operation = x.operation
""")


def operations(tx: Transaction) -> Sequence[OperationRow]:
    """Every operation that a worker has registered."""
    return tx.all(_OPERATIONS)


def operations_by_name(tx: Transaction, names: Collection[tuple[str, str]]) -> Sequence[OperationRow]:
    """Registered operations by connector and operation."""
    if not names:
        return ()
    connectors, operations = zip(*sorted(names), strict=True)
    return tx.all(_OPERATIONS_BY_NAME, connectors=list(connectors), operations=list(operations))
