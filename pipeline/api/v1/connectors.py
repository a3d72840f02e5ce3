"""Endpoints about the operations of connectors, their circuit breakers, and messages that workers refused."""

from fastapi import APIRouter

from pipeline.admin import dead_letters, operations
from pipeline.admin.dead_letters import DeadLetters
from pipeline.api.access import Admin, Operator, Viewer
from pipeline.api.context import Services
from pipeline.api.preconditions import IdempotentRoute
from pipeline.api.problems import ProblemError
from pipeline.api.v1.models import (
    BreakerView,
    ChangedView,
    DeadLettersView,
    DeadLetterView,
    OperationView,
    OptionalReasonBody,
    PageView,
    ReasonBody,
)
from pipeline.api.v1.parameters import Found, Name

router = APIRouter(tags=["connectors"], route_class=IdempotentRoute)


@router.get("/connectors")
def list_operations(found: Found, _: Viewer) -> PageView[OperationView]:
    """List the operations that workers registered, by name, with the grade of each."""
    listed = operations.registered_operations(found.db)
    return PageView(items=[OperationView.model_validate(each) for each in listed], next=None)


@router.get("/breakers")
def list_breakers(found: Found, _: Viewer) -> PageView[BreakerView]:
    """List open circuit breakers: their operations start no new mutation."""
    listed = operations.open_breakers(found.db)
    return PageView(items=[BreakerView.model_validate(each) for each in listed], next=None)


@router.post("/breakers/{operation}/open")
def open_breaker(found: Found, caller: Operator, operation: Name, body: ReasonBody) -> ChangedView:
    """Start no new mutation of an operation until an operator closes its breaker. Needs a caller of all workflows."""
    caller.check_sees_all("a breaker holds an operation in")
    _require_registered(found, operation)
    operations.open_breaker(found.db, operation, caller.actor(body.reason))
    return ChangedView(act="open", subject=operation)


@router.post("/breakers/{operation}/close")
def close_breaker(found: Found, caller: Operator, operation: Name, body: OptionalReasonBody) -> ChangedView:
    """Start mutations of an operation again."""
    caller.check_sees_all("a breaker holds an operation in")
    actor = caller.actor(body.reason)
    was_open = operations.close_breaker(found.db, operation, actor, found.dispatch_run)
    return ChangedView(act="close" if was_open else "none", subject=operation)


@router.get("/refused")
def list_refused(found: Found, caller: Viewer) -> DeadLettersView:
    """List the messages that workers refused, without their payloads."""
    visible = [
        each for each in _letters(found).letters() if caller.workflows is None or each.workflow in caller.workflows
    ]
    return DeadLettersView(items=[DeadLetterView.model_validate(each) for each in visible])


@router.post("/refused/{letter_id}/send-back")
def send_back(found: Found, caller: Operator, letter_id: Name, body: OptionalReasonBody) -> ChangedView:
    """Send a message to the workers again, once the reason is gone."""
    dead_letters.send_back(
        found.db, _letters(found), letter_id, caller.actor(body.reason), can_see=caller.can_see_workflow
    )
    return ChangedView(act="send_back", subject=letter_id)


@router.post("/refused/{letter_id}/drop")
def drop(found: Found, caller: Admin, letter_id: Name, body: ReasonBody) -> ChangedView:
    """Delete a message. It is the only copy of its events."""
    dead_letters.drop(found.db, _letters(found), letter_id, caller.actor(body.reason), can_see=caller.can_see_workflow)
    return ChangedView(act="drop", subject=letter_id)


def _letters(found: Services) -> DeadLetters:
    letters: DeadLetters | None = found.dead_letters
    if letters is None:
        raise ProblemError("not-here", "This process has no broker; expected it to run as `pipeline api`.")
    return letters


def _require_registered(found: Services, operation: str) -> None:
    operations.operation_name(operation)
    known = [each.name for each in operations.registered_operations(found.db)]
    if known and operation not in known:
        raise operations.unknown_operation(operation, known)
