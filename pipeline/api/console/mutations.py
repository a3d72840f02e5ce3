"""The page of one mutation, and the acts on it."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import FormData

from pipeline.admin import mutations as admin_mutations
from pipeline.admin import notes
from pipeline.admin.mutations import MutationDetail
from pipeline.admin.resolutions import MutationSummary, ResolutionKind
from pipeline.admin.second_approvals import open_proposal
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.console import inbox_list, question
from pipeline.api.console.page import Fields, database_now, field, page, redirect, refusal
from pipeline.api.console.result_form import result_question
from pipeline.api.console.waiting import waiting_items
from pipeline.api.context import Services, services
from pipeline.api.rendering import Message, render
from pipeline.domain.errors import InvalidInputError, NotFoundError, PipelineError

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
        notes.add_note(found.db, shown.id, caller.actor(field(form, "note")))
    except PipelineError as error:
        return _refused(request, caller, text, form, error)
    return redirect(request, f"/m/{shown.id}", done="note")


def pane_values(
    request: Request, found: Services, caller: Caller, text: str, typed: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return what the pane shows about a mutation."""
    detail = _detail(found, caller, text)
    mutation_id = detail.mutation.id
    return {
        "pane": "question",
        "open_path": f"/m/{mutation_id}",
        "detail": detail,
        "asked": question.asked(detail),
        "known": question.known_facts(detail, database_now(found)),
        "grades": question.GRADES,
        "notes": notes.notes(found.db, mutation_id),
        "watchers": _others(request, caller, mutation_id),
        "next_item": _next_item(found, caller, mutation_id),
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
    values = {
        **inbox_list.list_values(request, found, caller),
        **pane_values(request, found, caller, text, typed),
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


def _next_item(found: Services, caller: Caller, mutation_id: UUID) -> inbox_list.NextItem | None:
    others = (each for each in waiting_items(found, caller).items if each.mutation_id != mutation_id)
    first = next(others, None)
    return None if first is None else inbox_list.NextItem(headline=first.headline, path=inbox_list.item_path(first))


def _others(request: Request, caller: Caller, mutation_id: UUID) -> list[str]:
    return services(request).presence.enter(mutation_id, caller.name)
