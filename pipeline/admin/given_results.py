"""The result that an operator gives for a mutation that happened: as a value, by an external id, or explicitly none.

``next`` gets it, and no resolved row is ever amended. So it is checked against what a worker registered about the
operation before anything is written. Only to fetch a result by an external id needs the code of the operation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.domain.errors import InvalidInputError, PayloadError
from pipeline.domain.operations import DeclaredResult, OperationSpec, result_options
from pipeline.domain.payloads import checked_name, json_copy
from pipeline.domain.reconciliation import NotFound
from pipeline.domain.values import DEFAULT_LIMITS
from pipeline.store.schema import MutationRow

if TYPE_CHECKING:
    from pipeline.connectors.sdk import Connector, Operation


class Operations(Protocol):
    """Find the code of operations, which fetches results."""

    @property
    def connectors(self) -> "Mapping[str, Connector]": ...

    def operation(self, connector: str, operation: str) -> "Operation[Any] | None": ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenResult:
    """How an operator gives a result: a value, or the outside system's id to fetch it by."""

    value: Any = None
    external_id: str | None = None
    is_unchecked: bool = False  #: record the value whatever the operation declares


NO_RESULT = GivenResult()


def checked_result(
    operations: Operations | None, row: MutationRow, registered: OperationSpec | None, given: GivenResult
) -> Any:
    """Return the result to record, fetched if an external id was given. Refuses one that does not fit."""
    name = f"{row.connector}.{row.operation}"
    value = given.value
    if given.external_id is not None:
        operation = operations.operation(row.connector, row.operation) if operations else None
        if operations is None or operation is None:
            raise InvalidInputError(
                f"The result of {name} cannot be fetched, because its code is not here. Resolve it where "
                "PIPELINE_WORKFLOWS names the code, or give the result with --result. Nothing was changed."
            )
        value = _fetched_result(operations.connectors[row.connector], operation, row, given.external_id)
    if not given.is_unchecked:
        _check(registered.declared_result if registered else None, row, value, name)
    return value


def _check(declared: DeclaredResult | None, row: MutationRow, value: Any, name: str) -> None:
    if declared is None:
        raise InvalidInputError(
            f"The result of {name} cannot be checked, because no worker has registered the operation. Start a worker "
            "that has its code, or resolve it without the check with --unchecked. Nothing was changed."
        )
    if declared.schema is None:
        return
    from pipeline.transitions import payload_schemas

    try:
        payload_schemas.check_result(declared.schema, value, what=f"result of mutation {row.id}", operation=name)
    except PayloadError as error:
        raise InvalidInputError(f"{error} Give it with {result_options(declared)}") from None


def _fetched_result(connector: "Connector", operation: "Operation[Any]", row: MutationRow, external_id: str) -> Any:
    """Fetch a result by the outside system's id, within the time of one reconcile attempt."""
    from pipeline.connectors.sdk import Call  # this and what follows is the worker's: few commands need it
    from pipeline.transitions import payload_schemas
    from pipeline.worker import calls, outcomes

    name = f"{row.connector}.{row.operation}"
    function = operation.fetch_function
    if function is None:
        declared = DeclaredResult(schema=payload_schemas.result_schema(operation.result_type))
        raise InvalidInputError(
            f"{name} declares no fetch method, so its result cannot be fetched by an external id; expected "
            f"{result_options(declared)}. Nothing was changed."
        )
    asked = checked_name(external_id, what="external id")
    limit = operation.policy.immediate_timeout
    call = Call.within(row.idempotency_key, limit)
    finished = calls.call_within(
        lambda: function(connector, call, external_id=asked), call, limit, what=f"{name}.fetch"
    )
    if finished.error is not None:
        reason = outcomes.error_message(connector, operation, row.params, finished.error)
        raise InvalidInputError(
            f"The result of {name} could not be fetched by {asked!r}: {reason}. Nothing was changed; try again, or "
            "give the result with --result."
        )
    if finished.value is None or isinstance(finished.value, NotFound):
        reason = finished.value.reason if finished.value else "it returned none"
        text = outcomes.redact(connector, operation, row.params, str(reason))
        raise InvalidInputError(
            f"{name} has no result for the external id {asked!r} ({text}); expected the outside system's id of this "
            "effect. Nothing was changed."
        )
    return json_copy(finished.value, what=f"result of mutation {row.id}", limit=DEFAULT_LIMITS.result)
