"""Acts on many items and imports of a provider's export: a frozen preview, then commit or throw away."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from starlette.datastructures import FormData, UploadFile

from pipeline.admin import attention, provider_export
from pipeline.admin.bulk import BulkActs, ImportOptions, MutationSelection
from pipeline.admin.given_results import NO_RESULT, GivenResult
from pipeline.admin.provider_export import RowResults
from pipeline.admin.quarantine import Quarantine, QuarantineFilter
from pipeline.admin.resolutions import KEY, MutationFilter
from pipeline.api.access import Caller, Operator
from pipeline.api.console.inbox_list import BULK_ACTS
from pipeline.api.console.page import Fields, field, page, redirect, refusal
from pipeline.api.console.result_form import parsed_json
from pipeline.api.context import Services, services
from pipeline.api.rendering import Message
from pipeline.domain.acts import BulkAct
from pipeline.domain.errors import InvalidInputError, NotFoundError, PipelineError
from pipeline.text import parse_id

router = APIRouter()

_FORMATS = (".csv", ".jsonl", ".ndjson")
_CONSEQUENCES = {
    BulkAct.HAPPENED: "Each run continues with the result. Nothing is sent.",
    BulkAct.DID_NOT_HAPPEN: "Each is sent again by a new run.",
    BulkAct.SKIP: "Each workflow continues without it. Nothing is sent.",
    BulkAct.TRY_AGAIN: "The connector asks the outside system about each again. Nothing is sent.",
    BulkAct.APPROVE: "Exactly these requests are sent, each once.",
    BulkAct.REJECT: "None of them is sent, and their events are skipped.",
    BulkAct.IMPORT: "Each is resolved as the export says.",
    BulkAct.RELEASE_EVENT: "Each event is offered to its consumer again, as a new one.",
    BulkAct.SKIP_EVENT: "No consumer gets these events again.",
}
_SENDING = (BulkAct.DID_NOT_HAPPEN, BulkAct.APPROVE)


@router.get("/bulk")
def bulk(request: Request, caller: Operator) -> HTMLResponse:
    """Choose an act for an incident, or for everything that a filter matches."""
    return _choose(request, caller, request.query_params.get("incident", ""))


@router.post("/bulk/previews")
def preview(request: Request, form: Fields, caller: Operator) -> Response:
    """Freeze an act on the selected mutations."""
    found = services(request)
    try:
        act = BulkAct(field(form, "act"))
        given = _common_result(form) if act is BulkAct.HAPPENED else None
        made = _acts(found, caller).preview_mutations(act, _selection(found, caller, form), caller.name, result=given)
    except (PipelineError, ValueError) as error:
        problem = error if isinstance(error, PipelineError) else InvalidInputError("No such act on many items.")
        status, message = refusal(problem)
        return _choose(request, caller, field(form, "incident"), status=status, messages=(message,), form=form)
    return redirect(request, f"/bulk/{made.id}")


@router.post("/bulk/events")
def preview_events(request: Request, form: Fields, caller: Operator) -> Response:
    """Freeze an act on quarantined events."""
    only = QuarantineFilter(
        workflow=field(form, "workflow") or None,
        handler=field(form, "handler") or None,
        event_ids=tuple(
            number
            for each in form.getlist("events")
            if isinstance(each, str) and (number := parse_id(each)) is not None
        ),
    )
    found = services(request)
    try:
        act = BulkAct(field(form, "act"))
        made = _acts(found, caller).preview_events(act, only, caller.name)
    except (PipelineError, ValueError) as error:
        problem = error if isinstance(error, PipelineError) else InvalidInputError("No such act on events.")
        status, message = refusal(problem)
        return _choose(request, caller, "", status=status, messages=(message,), form=form)
    return redirect(request, f"/bulk/{made.id}", reason=field(form, "reason"))


@router.get("/bulk/{preview_id}")
def show_preview(request: Request, preview_id: UUID, caller: Operator) -> HTMLResponse:
    """Show a frozen preview, or what became of it."""
    return _preview_page(request, caller, preview_id, reason=request.query_params.get("reason", ""))


@router.post("/bulk/{preview_id}/commit")
def commit(request: Request, preview_id: UUID, form: Fields, caller: Operator) -> Response:
    """Commit a preview."""
    found, count = services(request), field(form, "count")
    try:
        acts = _acts(found, caller)
        if acts.preview(preview_id).act in _SENDING and field(form, "confirm") != count:
            raise InvalidInputError(
                f"This sends requests, and their number {count} was not typed to confirm it. Nothing was changed."
            )
        expected = parse_id(count)
        acts.commit(preview_id, caller.actor(field(form, "reason")), count=-1 if expected is None else expected)
    except PipelineError as error:
        status, message = refusal(error)
        reason = field(form, "reason")
        return _preview_page(request, caller, preview_id, status=status, messages=(message,), reason=reason)
    return redirect(request, f"/bulk/{preview_id}", done="committed")


@router.post("/bulk/{preview_id}/discard")
def discard(request: Request, preview_id: UUID, caller: Operator) -> Response:
    """Throw a preview away."""
    _acts(services(request), caller).discard(preview_id)
    return redirect(request, "/", done="discarded")


@router.get("/import")
def import_form(request: Request, caller: Operator) -> HTMLResponse:
    """Ask for a provider's export."""
    return page(request, caller, "import.html", here="inbox", typed={})


@router.post("/import")
def import_export(request: Request, form: Fields, caller: Operator) -> Response:
    """Match an export with the unknown outcomes, and freeze what it resolves."""
    found = services(request)
    try:
        options = _import_options(form)
        upload = form.get("export")
        if not isinstance(upload, UploadFile) or not upload.filename:
            raise InvalidInputError("No file was chosen; expected a provider's export as .csv or .jsonl.")
        with _stored(upload) as (path, name):
            rows = provider_export.read_rows(path)
            made = _acts(found, caller).preview_import(rows, options, caller.name, name=name)
    except PipelineError as error:
        status, message = refusal(error)
        typed = {key: value for key, value in form.items() if isinstance(value, str)}
        return page(request, caller, "import.html", here="inbox", status=status, messages=(message,), typed=typed)
    return redirect(request, f"/bulk/{made.id}")


def _acts(found: Services, caller: Caller) -> BulkActs:
    return BulkActs(found.resolutions, Quarantine(found.db, found.wake_workflow), caller.can_see_workflow)


def _choose(
    request: Request,
    caller: Caller,
    incident_id: str,
    *,
    status: int = 200,
    messages: tuple[Message, ...] = (),
    form: FormData | None = None,
) -> HTMLResponse:
    """Show which items are meant and which acts there are."""
    found, incident = services(request), None
    if incident_id:
        named = (each for each in attention.open_incidents(found.resolutions) if each.id == incident_id)
        incident = next((each for each in named if all(map(caller.can_see_workflow, each.workflows))), None)
    if incident_id and incident is None:
        raise NotFoundError("open incident", incident_id, hint="It may have been resolved meanwhile.")
    typed = {key: value for key, value in form.items() if isinstance(value, str)} if form else {}
    return page(
        request,
        caller,
        "bulk.html",
        here="inbox",
        status=status,
        messages=messages,
        incident=incident,
        ids=_ids(form) if form else (),
        acts=[(key, label, _CONSEQUENCES[BulkAct(key)]) for key, label in BULK_ACTS],
        workflows=sorted({name for _, name in attention.counts(found.db) if name and caller.can_see_workflow(name)}),
        typed={**dict(request.query_params), **typed},
    )


def _preview_page(
    request: Request,
    caller: Caller,
    preview_id: UUID,
    *,
    status: int = 200,
    messages: tuple[Message, ...] = (),
    reason: str = "",
) -> HTMLResponse:
    found = _acts(services(request), caller).preview(preview_id)
    return page(
        request,
        caller,
        "preview.html",
        here="inbox",
        status=status,
        messages=messages,
        preview=found,
        consequence=_CONSEQUENCES[found.act],
        is_sending=found.act in _SENDING,
        reason=reason,
    )


def _ids(form: FormData) -> tuple[UUID, ...]:
    try:
        return tuple(dict.fromkeys(UUID(each) for each in form.getlist("ids") if isinstance(each, str)))
    except ValueError as error:
        raise InvalidInputError("A selected id is no id of a mutation. Nothing was changed.") from error


def _selection(found: Services, caller: Caller, form: FormData) -> MutationSelection:
    """Return which mutations are meant: an incident, those selected, or all that a filter matches."""
    if incident_id := field(form, "incident"):
        summaries = attention.incident_mutations(found.resolutions, incident_id)
        return MutationSelection(ids=tuple(each.id for each in summaries if caller.can_see_workflow(each.workflow)))
    if ids := _ids(form):
        return MutationSelection(ids=ids)
    if field(form, "all") != "yes":
        raise InvalidInputError("Nothing was selected; expected items of the list, an incident or a filter.")
    connector, _, operation = field(form, "operation").partition(".")
    only = MutationFilter(
        workflow=field(form, "workflow") or None, connector=connector or None, operation=operation or None
    )
    return MutationSelection(only=only)


def _common_result(form: FormData) -> GivenResult:
    text = field(form, "result_json")
    return GivenResult(value=parsed_json(text)) if text else NO_RESULT


def _import_options(form: FormData) -> ImportOptions:
    column = field(form, "column")
    if not column:
        raise InvalidInputError("The column that names the mutation was not given; expected its name in the export.")
    match field(form, "result_kind"):
        case "column":
            results = RowResults(column=field(form, "result_column"))
        case "external_id":
            results = RowResults(external_id_column=field(form, "result_column"))
        case _:
            results = RowResults(is_none=True)
    connector, _, operation = field(form, "operation").partition(".")
    return ImportOptions(
        column=column,
        match_by=field(form, "match_by") or KEY,
        results=results,
        is_complete=field(form, "complete") == "yes",
        only=MutationFilter(
            workflow=field(form, "workflow") or None, connector=connector or None, operation=operation or None
        ),
    )


@contextmanager
def _stored(upload: UploadFile) -> Iterator[tuple[Path, str]]:
    """Store an upload in a file of its kind until the block is left; yield it with the name that was given."""
    name = Path(upload.filename or "").name
    suffix = Path(name).suffix.lower()
    if suffix not in _FORMATS:
        raise InvalidInputError(f"{name} is neither .csv nor .jsonl; expected an export in one of these formats.")
    with tempfile.TemporaryDirectory(prefix="pipeline-import-") as folder:
        path = Path(folder) / f"export{suffix}"
        with path.open("wb") as file:
            shutil.copyfileobj(upload.file, file)
        yield path, name
