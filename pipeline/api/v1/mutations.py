"""Endpoints about mutations, and the acts that settle them. Every act needs ``If-Match``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Response

from pipeline.admin import mutations, pages, resolutions
from pipeline.admin.audit import AuditFilter
from pipeline.admin.given_results import GivenResult
from pipeline.admin.mutations import LedgerFilter, MutationDetail
from pipeline.admin.resolutions import MutationSummary
from pipeline.api.access import Caller, Operator, Viewer
from pipeline.api.preconditions import IdempotentRoute, SeenState, etag_of
from pipeline.api.problems import ProblemError
from pipeline.api.v1.models import (
    AdviceView,
    ApproveBody,
    AuditView,
    EvidenceView,
    FetchBody,
    FetchedView,
    LedgerEntryView,
    MutationActView,
    MutationDetailView,
    MutationView,
    NoteBody,
    NoteView,
    PageView,
    ProposalView,
    ReasonBody,
    ResolveBody,
    TimelineView,
)
from pipeline.api.v1.parameters import (
    Fields,
    Found,
    Listed,
    NameFilter,
    PrivateField,
    Uuid,
    page_view,
    private_fields,
    require_in_scope,
)
from pipeline.domain.errors import InvalidInputError, StaleWriteError, StateChangedError
from pipeline.domain.states import MutationStatus, Resolver

router = APIRouter(prefix="/mutations", tags=["mutations"], route_class=IdempotentRoute)


@router.get("")
def list_mutations(
    found: Found,
    caller: Viewer,
    asked: Listed,
    connector: NameFilter = None,
    operation: NameFilter = None,
    status: Annotated[list[MutationStatus] | None, Query(description="Only of these statuses.")] = None,
    error_type: NameFilter = None,
    resolved_by: Resolver | None = None,
) -> PageView[LedgerEntryView]:
    """List mutations of any status, newest first."""
    only = LedgerFilter(
        **asked.filter(caller),
        connector=connector,
        operation=operation,
        statuses=tuple(status or ()),
        error_type=error_type,
        resolved_by=resolved_by,
    )
    return page_view(LedgerEntryView, pages.mutation_page(found.db, only, **asked.page))


@router.get("/{mutation_id}")
def show_mutation(
    found: Found, caller: Viewer, response: Response, mutation_id: Uuid, fields: Fields = None
) -> MutationDetailView:
    """Show a mutation: what was attempted, why its outcome is unknown, and what each answer leads to."""
    private = private_fields(caller, fields)
    detail = _detail(found, caller, mutation_id, with_result=PrivateField.RESULT in private)
    proposal = resolutions.open_proposal(found.db, mutation_id)
    response.headers["ETag"] = etag_of(detail.mutation.state)
    return MutationDetailView(
        mutation=_view(detail.mutation, private),
        result=detail.result,
        resolved_by=detail.resolved_by,
        resolved_at=detail.resolved_at,
        timeline=[TimelineView.model_validate(each) for each in detail.timeline],
        advice=AdviceView.model_validate(detail.advice),
        notes=[NoteView.model_validate(each) for each in mutations.notes(found.db, mutation_id)],
        proposal=None if proposal is None else ProposalView.model_validate(proposal),
        others=found.presence.enter(mutation_id, caller.name),
    )


@router.get("/{mutation_id}/timeline")
def show_mutation_timeline(found: Found, caller: Viewer, mutation_id: Uuid) -> list[TimelineView]:
    """Show what happened to a mutation, oldest first, and what is planned."""
    return [TimelineView.model_validate(each) for each in _detail(found, caller, mutation_id).timeline]


@router.get("/{mutation_id}/evidence")
def show_evidence(found: Found, caller: Viewer, mutation_id: Uuid, fields: Fields = None) -> EvidenceView:
    """Show what is known about the outcome: calls, reconcile attempts, and acts with their evidence."""
    private = private_fields(caller, fields)
    mutation = _detail(found, caller, mutation_id).mutation
    page = pages.audit_page(found.db, AuditFilter(mutation_id=mutation_id), limit=200)
    acts = [AuditView.model_validate(each) for each in page.items]
    if PrivateField.EVIDENCE not in private:
        acts = [each.model_copy(update={"evidence": None}) for each in acts]
    return EvidenceView(
        attempts=mutation.attempts,
        reconcile_attempts=mutation.reconcile_attempts,
        error=mutation.error,
        quiet_until=mutation.quiet_until,
        idempotency_key=mutation.idempotency_key,
        look_up=mutation.look_up,
        acts=acts,
    )


@router.post("/{mutation_id}/resolve")
def resolve(
    found: Found, caller: Operator, response: Response, mutation_id: Uuid, state: SeenState, body: ResolveBody
) -> MutationActView:
    """Answer an unknown outcome: happened, did_not_happen, skip or try_again.

    happened needs its result: `result`, `external_id` or `no_result`. Refused while the request may still arrive.
    """
    before = _detail(found, caller, mutation_id).mutation
    with _current_if_stale(found, before.id):
        proposed = found.resolutions.resolve(
            mutation_id,
            body.answer,
            caller.actor(body.reason, body.evidence),
            result=_given_result(body),
            is_refused=body.refused,
            state=state,
        )
    return _done(found, response, str(body.answer), mutation_id, is_proposed=proposed is not None)


@router.post("/{mutation_id}/approve")
def approve(
    found: Found, caller: Operator, response: Response, mutation_id: Uuid, state: SeenState, body: ApproveBody
) -> MutationActView:
    """Approve exactly the request that was shown. A changed request is not sent."""
    mutation = _detail(found, caller, mutation_id).mutation
    if mutation.request_hash != body.request_hash:
        error = StaleWriteError(
            "mutation", mutation_id, verb="approve", expected=body.request_hash, found=mutation.request_hash
        )
        raise _stale(found, mutation_id, error)
    with _current_if_stale(found, mutation_id):
        proposed = found.resolutions.approve(mutation, caller.actor(body.reason), state=state)
    return _done(found, response, "approve", mutation_id, is_proposed=proposed is not None)


@router.post("/{mutation_id}/reject")
def reject(
    found: Found, caller: Operator, response: Response, mutation_id: Uuid, state: SeenState, body: ReasonBody
) -> MutationActView:
    """Reject a request that was not sent yet. Its events are skipped."""
    _detail(found, caller, mutation_id)
    with _current_if_stale(found, mutation_id):
        found.resolutions.reject(mutation_id, caller.actor(body.reason), state=state)
    return _done(found, response, "reject", mutation_id)


@router.post("/{mutation_id}/acknowledge")
def acknowledge(
    found: Found, caller: Operator, response: Response, mutation_id: Uuid, state: SeenState, body: ReasonBody
) -> MutationActView:
    """Record that a late effect was dealt with; it is no longer reported."""
    _detail(found, caller, mutation_id)
    with _current_if_stale(found, mutation_id):
        found.resolutions.acknowledge(mutation_id, caller.actor(body.reason), state=state)
    return _done(found, response, "acknowledge", mutation_id)


@router.post("/{mutation_id}/fetch")
def fetch(found: Found, caller: Operator, response: Response, mutation_id: Uuid, body: FetchBody) -> FetchedView:
    """Fetch a result by the outside system's id, to check it before an answer. Nothing is recorded."""
    private_fields(caller, [PrivateField.RESULT])
    _detail(found, caller, mutation_id)
    response.headers["Cache-Control"] = "no-store"
    result = found.resolutions.fetch_result(mutation_id, body.external_id)
    return FetchedView(external_id=body.external_id, result=result)


@router.get("/{mutation_id}/notes")
def list_notes(found: Found, caller: Viewer, mutation_id: Uuid) -> list[NoteView]:
    """List the notes on a mutation, oldest first."""
    _detail(found, caller, mutation_id)
    return [NoteView.model_validate(each) for each in mutations.notes(found.db, mutation_id)]


@router.post("/{mutation_id}/notes", status_code=201)
def add_note(found: Found, caller: Operator, mutation_id: Uuid, body: NoteBody) -> list[NoteView]:
    """Add a note to a mutation. Its state stays."""
    _detail(found, caller, mutation_id)
    mutations.add_note(found.db, mutation_id, caller.actor(body.text))
    return list_notes(found, caller, mutation_id)


def _detail(found: Found, caller: Caller, mutation_id: UUID, *, with_result: bool = False) -> MutationDetail:
    detail = mutations.detail(found.resolutions, str(mutation_id), with_result=with_result)
    require_in_scope(caller, detail.mutation.workflow, "mutation", mutation_id)
    return detail


def _view(mutation: MutationSummary, private: frozenset[PrivateField] = frozenset()) -> MutationView:
    view = MutationView.model_validate(mutation)
    return view if PrivateField.PARAMS in private else view.model_copy(update={"params": None})


def _done(
    found: Found, response: Response, act: str, mutation_id: UUID, *, is_proposed: bool = False
) -> MutationActView:
    mutation = found.resolutions.mutation(mutation_id)
    response.headers["ETag"] = etag_of(mutation.state)
    return MutationActView(act=act, is_proposed=is_proposed, mutation=_view(mutation))


def _given_result(body: ResolveBody) -> GivenResult | None:
    has_value = "result" in body.model_fields_set
    if sum((has_value, body.external_id is not None, body.no_result)) > 1:
        raise InvalidInputError("Expected one of: result, external_id, no_result. Nothing was changed.")
    if not has_value and body.external_id is None and not body.no_result:
        return None
    return GivenResult(value=body.result, external_id=body.external_id, is_unchecked=body.unchecked)


@contextmanager
def _current_if_stale(found: Found, mutation_id: UUID) -> Iterator[None]:
    """Answer an act on an outdated state with the mutation as it is now."""
    try:
        yield
    except StateChangedError as error:
        raise _stale(found, mutation_id, error) from None


def _stale(found: Found, mutation_id: UUID, error: StateChangedError | StaleWriteError) -> ProblemError:
    mutation = found.resolutions.mutation(mutation_id)
    members: dict[str, Any] = {"current": _view(mutation).model_dump(mode="json", by_alias=True)}
    if isinstance(error, StateChangedError):
        members["changes"] = list(error.changes)
    return ProblemError("state-changed", str(error), headers={"ETag": etag_of(mutation.state)}, members=members)
