"""The ledger with its filters, the page of one mutation, and the acts on it."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import FormData

from pipeline.admin import mutations as admin_mutations
from pipeline.admin.attention import list_views
from pipeline.admin.mutations import LedgerFilter, MutationDetail
from pipeline.admin.pages import mutation_page
from pipeline.admin.resolutions import MutationSummary, ResolutionKind, open_proposal
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.console import inbox_list, question
from pipeline.api.console.inbox_list import BULK_ACTS
from pipeline.api.console.page import (
    Fields,
    List,
    chosen,
    database_now,
    field,
    list_page,
    page,
    query_path,
    redirect,
    refusal,
)
from pipeline.api.console.result_form import result_question
from pipeline.api.console.waiting import WaitingItems, waiting_items
from pipeline.api.context import Services, services
from pipeline.api.rendering import Message, render
from pipeline.domain.errors import InvalidInputError, NotFoundError, PipelineError
from pipeline.domain.states import MutationStatus, Resolver

router = APIRouter()


@router.get("/m/{text}")
def mutation(request: Request, text: str, caller: Viewer) -> HTMLResponse:
    """Show a mutation beside the inbox."""
    return _page(request, caller, text)


@router.get("/m/{text}/watchers")
def watchers(request: Request, text: str, caller: Viewer) -> HTMLResponse:
    """Say who else has a mutation open, and that this caller has."""
    found = _detail(services(request), caller, text)
    return render(request, "_watchers.html", watchers=_others(request, caller, found.mutation.id))


@router.post("/m/{text}/resolve")
def resolve(request: Request, text: str, form: Fields, caller: Operator) -> Response:
    """Record the answer to an unknown outcome."""
    found = services(request)
    shown = _detail(found, caller, text).mutation
    try:
        kind = _resolution_kind(form)
        result = None
        if kind is ResolutionKind.HAPPENED:
            result = question.given_result(result_question(shown.declared_result), form)
        if kind is ResolutionKind.DID_NOT_HAPPEN:
            question.check_confirmation(shown, form)
        proposed = found.resolutions.resolve(
            shown.id,
            kind,
            caller.actor(field(form, "reason")),
            result=result,
            is_refused=kind is ResolutionKind.DID_NOT_HAPPEN and field(form, "refused") == "yes",
            state=field(form, "state"),
        )
    except PipelineError as error:
        return _refused(request, caller, text, form, error)
    return _done(request, shown, "proposed" if proposed else str(kind))


@router.post("/m/{text}/fetch")
def fetch(request: Request, text: str, form: Fields, caller: Operator) -> HTMLResponse:
    """Show the result that the outside system has under an id. Nothing is recorded."""
    found = services(request)
    shown = _detail(found, caller, text).mutation
    try:
        result, problem = found.resolutions.fetch_result(shown.id, field(form, "external_id")), ""
    except PipelineError as error:
        result, problem = None, str(error)
    values = {"result": result, "problem": problem, "can_see": caller.can_see_payloads}
    return render(request, "_fetched.html", status=422 if problem else 200, now=None, **values)


@router.post("/m/{text}/approve")
def approve(request: Request, text: str, form: Fields, caller: Operator) -> Response:
    """Approve or reject a request that waits."""
    found = services(request)
    shown = _detail(found, caller, text).mutation
    decision, actor = field(form, "decision"), caller.actor(field(form, "reason"))
    try:
        if decision == "approve":
            if found.resolutions.approve(shown, actor, state=field(form, "state")):
                decision = "proposed"
        elif decision == "reject":
            if not actor.reason:
                raise InvalidInputError("A rejection needs a reason, for the audit. Nothing was changed.")
            found.resolutions.reject(shown.id, actor, state=field(form, "state"))
        else:
            raise InvalidInputError(f"{decision!r} is no decision; expected approve or reject.")
    except PipelineError as error:
        return _refused(request, caller, text, form, error)
    return _done(request, shown, decision)


@router.post("/m/{text}/acknowledge")
def acknowledge(request: Request, text: str, form: Fields, caller: Operator) -> Response:
    """Acknowledge a late effect."""
    found = services(request)
    shown = _detail(found, caller, text).mutation
    try:
        found.resolutions.acknowledge(shown.id, caller.actor(field(form, "reason")), state=field(form, "state"))
    except PipelineError as error:
        return _refused(request, caller, text, form, error)
    return _done(request, shown, "acknowledge")


@router.post("/m/{text}/notes")
def add_note(request: Request, text: str, form: Fields, caller: Operator) -> Response:
    """Add a note to a mutation."""
    found = services(request)
    shown = _detail(found, caller, text).mutation
    try:
        admin_mutations.add_note(found.db, shown.id, caller.actor(field(form, "note")))
    except PipelineError as error:
        return _refused(request, caller, text, form, error)
    return redirect(request, f"/m/{shown.id}", done="note")


def pane_values(
    request: Request, caller: Caller, text: str, waiting: WaitingItems, typed: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return what the pane shows about a mutation."""
    found = services(request)
    detail = _detail(found, caller, text)
    mutation_id = detail.mutation.id
    return {
        "pane": "question",
        "open_path": f"/m/{mutation_id}",
        "detail": detail,
        "asked": question.asked(detail),
        "known": question.known_facts(detail, database_now(found)),
        "grades": question.GRADES,
        "notes": admin_mutations.notes(found.db, mutation_id),
        "watchers": _others(request, caller, mutation_id),
        "next_item": _next_item(waiting, mutation_id),
        "last_reason": next((each.note for each in reversed(detail.timeline) if each.by and each.note), ""),
        "typed": typed,
        "proposal": open_proposal(found.db, mutation_id),
    }


def _page(
    request: Request,
    caller: Caller,
    text: str,
    *,
    status: int = 200,
    messages: tuple[Message, ...] = (),
    typed: Mapping[str, str] = {},
) -> HTMLResponse:
    found = services(request)
    waiting = waiting_items(found, caller)
    values = {
        **inbox_list.list_values(request, found, caller, waiting),
        **pane_values(request, caller, text, waiting, typed),
    }
    return page(
        request, caller, "inbox.html", here="inbox", status=status, messages=messages, page_class="item-page", **values
    )


def _detail(found: Services, caller: Caller, text: str) -> MutationDetail:
    """Return a mutation in the caller's scope."""
    detail = admin_mutations.detail(found.resolutions, text, with_result=caller.can_see_payloads)
    if not caller.can_see_workflow(detail.mutation.workflow):
        raise NotFoundError("mutation", text)
    return detail


def _resolution_kind(form: FormData) -> ResolutionKind:
    answer = field(form, "answer")
    if answer not in set(ResolutionKind):
        expected = ", ".join(ResolutionKind)
        raise InvalidInputError(f"{answer or 'No answer'!r} was chosen; expected one of: {expected}.")
    return ResolutionKind(answer)


def _refused(request: Request, caller: Caller, text: str, form: FormData, error: PipelineError) -> HTMLResponse:
    """Show the page as it is now, why the act was refused, and everything that was typed."""
    status, message = refusal(error)
    typed = {name: value for name, value in form.items() if isinstance(value, str)}
    return _page(request, caller, text, status=status, messages=(message,), typed=typed)


def _done(request: Request, shown: MutationSummary, act: str) -> Response:
    return redirect(request, f"/m/{shown.id}", done=act)


def _next_item(waiting: WaitingItems, mutation_id: UUID) -> inbox_list.NextItem | None:
    others = (each for each in waiting.items if each.mutation_id != mutation_id)
    first = next(others, None)
    return None if first is None else inbox_list.NextItem(headline=first.headline, path=inbox_list.item_path(first))


def _others(request: Request, caller: Caller, mutation_id: UUID) -> list[str]:
    return services(request).presence.enter(mutation_id, caller.name)


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
