"""Parameters that several endpoints share: cursors, limits, instants, and the fields that need a right."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from uuid import UUID

from fastapi import Depends, Path, Query
from pydantic import AwareDatetime

from pipeline.admin.pages import Page
from pipeline.api.access import Caller
from pipeline.api.context import Services, services
from pipeline.api.problems import ProblemError
from pipeline.api.v1.models import ApiModel, PageView
from pipeline.domain.errors import NotFoundError

ViewT = TypeVar("ViewT", bound=ApiModel)

_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class PrivateField(StrEnum):
    """A field that only callers with the right to see payloads get."""

    PAYLOAD = "payload"
    PARAMS = "params"
    RESULT = "result"
    EVIDENCE = "evidence"


Found = Annotated[Services, Depends(services)]
After = Annotated[
    str | None, Query(max_length=1_000, description="The cursor `next` of the page before; none: the first page.")
]
Limit = Annotated[int, Query(ge=1, le=1_000, description="Items of a page, at most.")]
Fields = Annotated[
    list[PrivateField] | None,
    Query(description="Fields to show that may hold personal data. They need the right to see payloads."),
]
Name = Annotated[str, Path(min_length=1, max_length=255)]
NameFilter = Annotated[str | None, Query(max_length=255)]
EventIdPath = Annotated[str, Path(pattern=r"^[0-9]{1,19}$", examples=["4711"])]
Since = Annotated[AwareDatetime | None, Query(ge=_FIRST, le=_LAST, description="Not older than this instant.")]
Until = Annotated[AwareDatetime | None, Query(ge=_FIRST, le=_LAST, description="Older than this instant.")]
Uuid = Annotated[UUID, Path()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListParameters:
    """What every list is asked by: a workflow, a time, and which page."""

    workflow: NameFilter = None
    since: Since = None
    until: Until = None
    after: After = None
    limit: Limit = 50

    def filter(self, caller: Caller) -> dict[str, Any]:
        """Return the fields that every filter has."""
        return {"workflow": self.workflow, "since": self.since, "until": self.until, "within": caller.workflows}

    @property
    def page(self) -> dict[str, Any]:
        """Return which page is asked for."""
        return {"after": self.after, "limit": self.limit}


Listed = Annotated[ListParameters, Depends()]


def private_fields(caller: Caller, fields: Iterable[PrivateField] | None) -> frozenset[PrivateField]:
    """Return the private fields to show. A caller without the right is refused."""
    asked = frozenset(fields or ())
    if asked and not caller.can_see_payloads:
        raise ProblemError(
            "forbidden", f"{caller.name} may not see payloads; expected no `fields`, or a caller with that right."
        )
    return asked


def require_in_scope(caller: Caller, workflow: str, noun: str, key: object) -> None:
    """Refuse a thing of a workflow out of scope as if it did not exist."""
    if not caller.can_see_workflow(workflow):
        raise NotFoundError(noun, key)


def page_view(view: type[ViewT], page: Page[Any]) -> PageView[ViewT]:
    """Convert a page of values."""
    return PageView(items=[view.model_validate(item) for item in page.items], next=page.next)
