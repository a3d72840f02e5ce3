"""What every page of the console shares: clock, count of what waits, forms, cursors, where to go after an act."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlencode

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.datastructures import FormData

from pipeline.admin.pages import Page
from pipeline.admin.problem_types import problem_type
from pipeline.api.access import Caller
from pipeline.api.console.waiting import waiting_count
from pipeline.api.context import Services, services
from pipeline.api.rendering import Message, render, url
from pipeline.api.security import local_path
from pipeline.domain.access import Role
from pipeline.domain.errors import InvalidInputError, PipelineError, StateChangedError

#: What is shown after an act, by the word in the query of the page after it.
DONE = {
    "happened": Message(text="Recorded: it happened.", detail="The run continues with its result."),
    "did_not_happen": Message(text="Recorded: it did not happen.", detail="It is sent again."),
    "skip": Message(text="Recorded: skipped.", detail="The workflow continues without it."),
    "try_again": Message(text="The connector asks again.", detail="It comes back if nothing is found out."),
    "approve": Message(text="Approved.", detail="A worker sends exactly this request."),
    "reject": Message(text="Rejected.", detail="It is never sent."),
    "acknowledge": Message(text="Acknowledged.", detail="It is no longer reported."),
    "proposed": Message(text="Proposed.", detail="It is recorded when another person gives the same answer."),
    "note": Message(text="Noted."),
    "pause": Message(text="The workflow is paused.", detail="Active runs continue."),
    "resume": Message(text="The workflow continues.", detail="Due runs start now."),
    "enter-maintenance": Message(text="The workflow is in maintenance.", detail="No run starts."),
    "exit-maintenance": Message(text="The workflow left maintenance.", detail="Due runs start now."),
    "run": Message(text="The producer is due now.", detail="The next tick starts it."),
    "open": Message(text="The breaker is open.", detail="No new mutation of this operation is started."),
    "close": Message(text="The breaker is closed.", detail="New mutations are started again."),
    "committed": Message(text="Done."),
    "discarded": Message(text="Thrown away.", detail="Nothing was changed."),
    "saved": Message(text="Saved."),
    "revoked": Message(text="Revoked.", detail="The token no longer works."),
    "send-back": Message(text="Sent back.", detail="Workers try the messages again."),
    "drop": Message(text="Dropped.", detail="The messages are gone."),
}


async def _form(request: Request) -> AsyncIterator[FormData]:
    """Yield the form of a request, and close what was uploaded with it."""
    async with request.form() as found:
        yield found


#: The fields of a form.
Fields = Annotated[FormData, Depends(_form)]


def field(form: FormData, name: str, default: str = "") -> str:
    """Return a text field of a form, without blanks around it."""
    found = form.get(name, default)
    return found.strip() if isinstance(found, str) else default


def database_now(found: Services) -> datetime:
    """Return the time of the database."""
    with found.db.transaction() as tx:
        return tx.clock()


def page(
    request: Request, caller: Caller, template: str, *, here: str = "", status: int = 200, **values: Any
) -> HTMLResponse:
    """Render a page for a caller."""
    found = services(request)
    done = DONE.get(request.query_params.get("done", ""))
    if done and not values.get("messages"):
        values["messages"] = (done,)
    given = {
        "here": here,
        "now": values.pop("now", None) or database_now(found),
        "waiting": values.pop("waiting", None),
        "can_act": caller.role.covers(Role.OPERATOR),
        "is_admin": caller.role.covers(Role.ADMIN),
        "flower_url": found.settings.flower_url,
    }
    if given["waiting"] is None:
        given["waiting"] = waiting_count(found, caller)
    return render(request, template, status=status, **given, **values)


def redirect(request: Request, path: str, **query: str) -> RedirectResponse:
    """Send the browser to a page after an act."""
    found = f"{path}?{urlencode(query)}" if query else path
    return RedirectResponse(url(request, found), status_code=303)


def refusal(error: PipelineError) -> tuple[int, Message]:
    """Return the HTTP status and the message about an act that was refused."""
    kind = problem_type(error)
    status = kind.status if kind else 409
    title = kind.title if kind else "It was refused"
    lines = tuple(getattr(error, "changes", ())) if isinstance(error, StateChangedError) else ()
    return status, Message(kind="error", text=f"{title}.", detail=str(error), lines=lines)


def own_path(given: str, default: str) -> str:
    """Return a path of this console that a form names; the default for everything that leads elsewhere."""
    is_local = given.startswith("/") and not given.startswith(("//", "/\\")) and given.isprintable()
    return given if is_local else default


def query_path(path: str, **values: object) -> str:
    """Return a path with those query values that are given."""
    kept = {name: str(value) for name, value in values.items() if value not in (None, "", False)}
    return f"{path}?{urlencode(kept)}" if kept else path


def quoted(value: object) -> str:
    """Return a value as one segment of a path."""
    return quote(str(value), safe="")


PAGE_SIZE = 50
EnumT = TypeVar("EnumT", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class List:
    """A list that is read page by page."""

    request: Request
    read: Callable[[str | None, int], Page[Any]]


def chosen(kind: type[EnumT], text: str | None) -> EnumT | None:
    """Return the member that a query names; None if it names none."""
    if not text:
        return None
    if text not in set(kind):
        raise InvalidInputError(f"{text!r} is not known; expected one of: {', '.join(kind)}.")
    return kind(text)


def list_page(
    request: Request, caller: Caller, template: str, listed: List, *, here: str, **values: Any
) -> HTMLResponse:
    """Render one page of a list. A filter that is refused shows an empty list and the reason."""
    status, messages = 200, tuple[Message, ...]()
    found: Page[Any] = Page(items=(), next=None)
    try:
        found = listed.read(request.query_params.get("after") or None, PAGE_SIZE)
    except PipelineError as error:
        status, message = refusal(error)
        messages = (message,)
    kept = {name: value for name, value in request.query_params.items() if value and name != "after"}
    path = local_path(request.scope)
    return page(
        request,
        caller,
        template,
        here=here,
        status=status,
        messages=messages,
        items=found.items,
        next_path=f"{path}?{urlencode({**kept, 'after': found.next})}" if found.next else "",
        first_path=f"{path}?{urlencode(kept)}" if request.query_params.get("after") else "",
        is_searched=found.next is not None and len(found.items) < PAGE_SIZE,
        kept=kept,
        **values,
    )
