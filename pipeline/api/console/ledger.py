"""The ledger: every mutation, filtered by fields or by a line of words such as ``status:failed age:>1h``."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from pipeline.admin.ledger import LedgerFilter
from pipeline.admin.pages import mutation_page
from pipeline.admin.saved_views import list_views
from pipeline.api.access import Viewer
from pipeline.api.console.inbox_list import BULK_ACTS
from pipeline.api.console.lists import List, chosen, list_page
from pipeline.api.console.page import query_path
from pipeline.api.context import services
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import MutationStatus, Resolver

router = APIRouter()

_WORDS = ("workflow", "operation", "connector", "status", "error", "age", "by")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@router.get("/ledger")
def ledger(request: Request, caller: Viewer) -> HTMLResponse:
    """List mutations, newest first."""
    text = request.query_params.get("q", "").strip()
    values, problem = {}, None
    try:
        values = parsed_words(text)
        only = ledger_filter({**values, **_fields(request)})
    except InvalidInputError as error:
        only, problem = LedgerFilter(), error
    only = replace(only, within=caller.workflows)

    def read(after: str | None, limit: int) -> Any:
        if problem is not None:
            raise problem
        return mutation_page(services(request).db, only, after=after, limit=limit)

    return list_page(
        request,
        caller,
        "ledger.html",
        List(request, read),
        here="ledger",
        text=text,
        words={**values, **_fields(request)},
        chips=_chips(request),
        bulk_acts=BULK_ACTS,
        filter_query=urlencode({name: value for name, value in request.query_params.items() if value}),
        saved_views=[each for each in list_views(services(request).db, caller.name) if each.page == "/ledger"],
    )


def parsed_words(text: str) -> dict[str, str]:
    """Return the words of a filter line by name. A word without a name is an operation."""
    found: dict[str, str] = {}
    for word in text.split():
        name, colon, value = word.partition(":")
        if not colon:
            name, value = "operation", word
        if name not in _WORDS or not value:
            raise InvalidInputError(f"{word!r} is no filter; expected name:value with one of: {', '.join(_WORDS)}.")
        found[name] = value
    return found


def ledger_filter(words: Mapping[str, str]) -> LedgerFilter:
    """Return the filter that the words describe."""
    connector, dot, operation = words.get("operation", "").partition(".")
    status = chosen(MutationStatus, words.get("status"))
    return LedgerFilter(
        workflow=words.get("workflow"),
        connector=words.get("connector") or (connector if dot else None),
        operation=(operation if dot else connector) or None,
        statuses=(status,) if status else (),
        error_type=words.get("error"),
        older_than=_age(words["age"]) if "age" in words else None,
        resolved_by=chosen(Resolver, words.get("by")),
    )


def _age(text: str) -> timedelta:
    match = re.fullmatch(r">?(\d{1,6})([smhd])", text)
    if match is None:
        raise InvalidInputError(f"{text!r} is no age; expected one such as >30s, >5m, >1h or >2d.")
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


def _fields(request: Request) -> dict[str, str]:
    return {name: value for name in _WORDS if (value := request.query_params.get(name, "").strip())}


def _chips(request: Request) -> list[tuple[str, str, bool]]:
    """Return the statuses as chips: label, path, and whether it is chosen."""
    here = request.query_params.get("status", "")
    kept = {name: value for name, value in request.query_params.items() if name not in ("status", "after")}
    return [
        (str(each), query_path("/ledger", **{**kept, "status": "" if each == here else str(each)}), each == here)
        for each in MutationStatus
    ]
