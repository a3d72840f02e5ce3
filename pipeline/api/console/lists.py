"""Lists page by page: the cursor in the query, and links to the next page."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse

from pipeline.admin.pages import Page
from pipeline.api.access import Caller
from pipeline.api.console.page import page, refusal
from pipeline.api.rendering import Message
from pipeline.api.security import local_path
from pipeline.domain.errors import InvalidInputError, PipelineError

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
