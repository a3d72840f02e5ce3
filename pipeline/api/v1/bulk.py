"""Endpoints for acts on many items: freeze a preview, then commit it or throw it away."""

import io
from datetime import timedelta
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, BackgroundTasks, File, Form, Response, UploadFile

from pipeline.admin import lookup, provider_export
from pipeline.admin.bulk import BulkActs, ImportOptions, MutationSelection
from pipeline.admin.given_results import GivenResult
from pipeline.admin.provider_export import RowResults
from pipeline.admin.quarantine import Quarantine, QuarantineFilter
from pipeline.admin.resolutions import KEY, MutationFilter
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.preconditions import IdempotentRoute
from pipeline.api.v1.models import CommitBody, MutationFilterBody, PreviewBody, PreviewView
from pipeline.api.v1.parameters import Found, Uuid
from pipeline.domain.acts import EVENT_ACTS
from pipeline.domain.errors import InvalidInputError

router = APIRouter(tags=["bulk"], route_class=IdempotentRoute)


@router.post("/bulk/previews", status_code=201)
def create_preview(found: Found, caller: Operator, response: Response, body: PreviewBody) -> PreviewView:
    """Freeze an act on many items: the exact ids, what would be refused, and why. Nothing is changed."""
    acts = _acts(found, caller)
    if sum((bool(body.ids), body.incident is not None, body.mutations is not None, body.events is not None)) != 1:
        raise InvalidInputError("Expected exactly one of: ids, incident, mutations, events. Nothing was changed.")
    if body.act in EVENT_ACTS:
        made = acts.preview_events(body.act, _event_filter(body), caller.name)
    else:
        given = body.result
        result = None if given is None else GivenResult(value=given.value, is_unchecked=given.unchecked)
        made = acts.preview_mutations(body.act, _selection(body), caller.name, result=result)
    response.headers["Location"] = f"{made.id}"
    return PreviewView.model_validate(made)


@router.get("/bulk/previews/{preview_id}")
def show_preview(found: Found, caller: Viewer, preview_id: Uuid) -> PreviewView:
    """Show a preview, and how far its commit is."""
    return PreviewView.model_validate(_acts(found, caller).preview(preview_id))


@router.post("/bulk/previews/{preview_id}/commit", status_code=202)
def commit_preview(
    found: Found, caller: Operator, tasks: BackgroundTasks, preview_id: Uuid, body: CommitBody
) -> PreviewView:
    """Commit a preview once. It runs after the answer: `GET` shows its progress and its result."""
    return _commit(found, caller, tasks, preview_id, body)


@router.post("/bulk/previews/{preview_id}/discard")
def discard_preview(found: Found, caller: Operator, preview_id: Uuid) -> PreviewView:
    """Throw a preview away. Nothing else is changed."""
    return PreviewView.model_validate(_acts(found, caller).discard(preview_id))


@router.post("/imports", status_code=201)
def create_import(
    found: Found,
    caller: Operator,
    file: Annotated[UploadFile, File(description="A .csv or .jsonl export of the provider, in UTF-8.")],
    column: Annotated[str, Form(max_length=255, description="The column that identifies a mutation.")] = KEY,
    match_by: Annotated[str, Form(max_length=255, description=f"What it holds: {KEY}, or params.<name>.")] = KEY,
    complete: Annotated[bool, Form(description="Mutations missing in the file did not happen.")] = False,
    external_id: Annotated[str | None, Form(max_length=255, description="Column with the outside system's id.")] = None,
    result_column: Annotated[str | None, Form(max_length=255, description="Column with the result.")] = None,
    no_result: Annotated[bool, Form(description="The mutations have no result.")] = False,
    unchecked: Annotated[bool, Form(description="Record results although they do not fit.")] = False,
    workflow: Annotated[str | None, Form(max_length=255)] = None,
    operation: Annotated[str | None, Form(max_length=255, description="connector.operation")] = None,
) -> PreviewView:
    """Freeze what a provider's export resolves: matched, ambiguous, unanswered and unmatched. Nothing is changed."""
    if sum((external_id is not None, result_column is not None, no_result)) > 1:
        raise InvalidInputError("Expected one of: external_id, result_column, no_result. Nothing was changed.")
    connector, _, name = (operation or "").partition(".")
    options = ImportOptions(
        column=column,
        match_by=match_by,
        results=RowResults(
            column=result_column, external_id_column=external_id, is_none=no_result, is_unchecked=unchecked
        ),
        is_complete=complete,
        only=MutationFilter(workflow=workflow, connector=connector or None, operation=name or None),
    )
    text = io.TextIOWrapper(file.file, encoding="utf-8-sig", newline="")
    file_name = file.filename or "export.csv"
    rows = provider_export.rows_of(text, file_name)
    made = _acts(found, caller).preview_import(rows, options, caller.name, name=file_name)
    return PreviewView.model_validate(made)


@router.post("/imports/{preview_id}/commit", status_code=202)
def commit_import(
    found: Found, caller: Operator, tasks: BackgroundTasks, preview_id: Uuid, body: CommitBody
) -> PreviewView:
    """Resolve what an import matched, once. It runs after the answer: `GET` shows its progress and its result."""
    return _commit(found, caller, tasks, preview_id, body)


def _commit(found: Found, caller: Caller, tasks: BackgroundTasks, preview_id: UUID, body: CommitBody) -> PreviewView:
    acts, actor = _acts(found, caller), caller.actor(body.reason)
    taken = acts.take(preview_id, actor, count=body.count)
    tasks.add_task(acts.run, preview_id, actor)
    return PreviewView.model_validate(taken)


def _acts(found: Found, caller: Caller) -> BulkActs:
    return BulkActs(found.resolutions, Quarantine(found.db, found.wake_workflow), caller.can_see_workflow)


def _selection(body: PreviewBody) -> MutationSelection:
    only = None if body.mutations is None else _mutation_filter(body.mutations)
    return MutationSelection(ids=tuple(body.ids), incident=body.incident, only=only)


def _mutation_filter(body: MutationFilterBody) -> MutationFilter:
    age = None if body.older_than_seconds is None else timedelta(seconds=body.older_than_seconds)
    return MutationFilter(workflow=body.workflow, connector=body.connector, operation=body.operation, older_than=age)


def _event_filter(body: PreviewBody) -> QuarantineFilter:
    if body.events is None:
        raise InvalidInputError(f"{body.act} acts on events; expected `events` to select them. Nothing was changed.")
    ids = tuple(lookup.parse_event_id(each) for each in body.events.event_ids)
    return QuarantineFilter(workflow=body.events.workflow, handler=body.events.handler, event_ids=ids)
