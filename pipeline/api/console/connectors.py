"""Connectors with their operations, grades and breakers, and messages that workers refused."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from pipeline.admin import dead_letters, operations
from pipeline.admin.operations import grade_of, registered_operations
from pipeline.api.access import Caller, Operator, Viewer, require
from pipeline.api.console.page import Fields, field, own_path, page, redirect, refusal
from pipeline.api.console.question import GRADES
from pipeline.api.context import services
from pipeline.api.rendering import Message
from pipeline.domain.access import Role
from pipeline.domain.errors import InvalidInputError, PipelineError

router = APIRouter()


@router.get("/connectors")
def connectors(request: Request, caller: Viewer) -> HTMLResponse:
    """List operations that workers registered, with the state of their breakers."""
    return _page(request, caller)


@router.post("/connectors/breaker")
def switch_breaker(request: Request, form: Fields, caller: Operator) -> Response:
    """Open or close the breaker of an operation."""
    caller.check_sees_all("a breaker holds an operation in")
    found, action, operation = services(request), field(form, "action"), field(form, "operation")
    try:
        if operation not in {f"{each.connector}.{each.operation}" for each in registered_operations(found.db)}:
            raise InvalidInputError(f"{operation!r} is no registered operation. Nothing was changed.")
        if action == "open":
            operations.open_breaker(found.db, operation, caller.actor(field(form, "reason")))
        else:
            operations.close_breaker(found.db, operation, caller.actor(field(form, "reason")), found.dispatch_run)
    except PipelineError as error:
        status, message = refusal(error)
        return _page(request, caller, status=status, messages=(message,))
    return redirect(request, own_path(field(form, "back"), "/connectors"), done=action)


@router.get("/dead-letters")
def letters(request: Request, caller: Viewer) -> HTMLResponse:
    """List messages that workers refused, without their payloads."""
    return _letters_page(request, caller)


@router.post("/dead-letters/{act}")
def act_on_letter(request: Request, act: str, form: Fields, caller: Operator) -> Response:
    """Send a message back to the workers; an admin may also drop it, which deletes the only copy."""
    found = services(request)
    if act == "drop":
        require(Role.ADMIN)(caller)
    acts = {"send-back": dead_letters.send_back, "drop": dead_letters.drop}
    try:
        if found.dead_letters is None or act not in acts:
            raise InvalidInputError("This process has no broker, or there is no such act. Nothing was changed.")
        actor = caller.actor(field(form, "reason"))
        acts[act](found.db, found.dead_letters, field(form, "id"), actor, can_see=caller.can_see_workflow)
    except PipelineError as error:
        status, message = refusal(error)
        return _letters_page(request, caller, status=status, messages=(message,))
    return redirect(request, own_path(field(form, "back"), "/dead-letters"), done=act)


def _page(request: Request, caller: Caller, *, status: int = 200, messages: tuple[Message, ...] = ()) -> HTMLResponse:
    db = services(request).db
    known = operations.open_breakers(db)
    return page(
        request,
        caller,
        "connectors.html",
        here="connectors",
        status=status,
        messages=messages,
        operations=[(each, f"{each.connector}.{each.operation}", grade_of(each)) for each in registered_operations(db)],
        breakers={f"{each.connector}.{each.operation}": each for each in known},
        grades=GRADES,
    )


def _letters_page(
    request: Request, caller: Caller, *, status: int = 200, messages: tuple[Message, ...] = ()
) -> HTMLResponse:
    found = services(request).dead_letters
    visible = [] if found is None else [each for each in found.letters() if caller.can_see_workflow(each.workflow)]
    return page(
        request,
        caller,
        "dead_letters.html",
        here="events",
        status=status,
        messages=messages,
        letters=visible,
        has_broker=found is not None,
    )
