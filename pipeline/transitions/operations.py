"""Register what the code declares about operations, so that every process can show and resolve their mutations."""

from collections.abc import Sequence
from dataclasses import fields

from pipeline.domain.operations import OperationSpec
from pipeline.domain.payloads import checked_json, checked_name
from pipeline.domain.values import DEFAULT_LIMITS, WorkflowSpec
from pipeline.store.database import Transaction, encode_rows
from pipeline.store.writes import operations as operation_store
from pipeline.transitions import registration

_FIELDS = tuple(each.name for each in fields(OperationSpec))


def register_operations(tx: Transaction, specs: Sequence[OperationSpec], workflows: Sequence[WorkflowSpec]) -> bool:
    """Write operations that are new or have changed. Returns whether anything was written.

    ``workflows`` are the registered workflows of the same code. If newer code of one of them is registered, only
    operations that are missing are added: older code never replaces what newer code declares.
    """
    for spec in specs:
        for name in ("connector", "operation"):
            checked_name(getattr(spec, name), what=name)
        for schema in (spec.params_schema, spec.result_schema):
            checked_json(schema, what=f"schema of {spec.connector}.{spec.operation}", limit=DEFAULT_LIMITS.payload)
    if not specs:
        return False
    rows = encode_rows([{name: getattr(spec, name) for name in _FIELDS} for spec in specs])
    can_replace = not registration.is_replaced(tx, workflows)
    written = tx.all(operation_store.UPSERT, rows=rows, can_replace=can_replace)
    for row in written:
        tx.log_on_commit("operation.registered", connector=row.connector, operation=row.operation)
    return bool(written)
