"""The account: theme, saved views, and API tokens for admins."""

from datetime import timedelta
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from pipeline.admin import attention
from pipeline.admin.access import DEFAULT_LIFETIME, Access, CreatedToken
from pipeline.api.access import Admin, Caller, Viewer
from pipeline.api.console.page import Fields, chosen, field, own_path, page, redirect, refusal
from pipeline.api.context import services
from pipeline.api.rendering import THEME_COOKIE, THEMES, Message, url
from pipeline.domain.access import Rights, Role
from pipeline.domain.errors import PipelineError

router = APIRouter()

_YEAR_SECONDS = 365 * 86_400


@router.get("/account")
def account(request: Request, caller: Viewer) -> HTMLResponse:
    """Show the caller, the saved views and the tokens."""
    return _page(request, caller)


@router.post("/account/theme")
def choose_theme(request: Request, form: Fields, caller: Viewer) -> Response:
    """Keep the theme in this browser."""
    del caller
    theme = field(form, "theme")
    answer = redirect(request, own_path(field(form, "back"), "/"))
    if theme in THEMES:
        path = url(request, "/")
        answer.set_cookie(THEME_COOKIE, theme, max_age=_YEAR_SECONDS, path=path, httponly=True, samesite="lax")
    return answer


@router.post("/account/views")
def save_view(request: Request, form: Fields, caller: Viewer) -> Response:
    """Keep the filter of a page under a name."""
    shown, query = own_path(field(form, "page"), "/"), field(form, "query")
    try:
        attention.save_view(services(request).db, caller.name, field(form, "name"), page=shown, query=query)
    except PipelineError as error:
        status, message = refusal(error)
        return _page(request, caller, status=status, messages=(message,))
    return redirect(request, f"{shown}?{query}" if query else shown)


@router.post("/account/views/delete")
def delete_view(request: Request, form: Fields, caller: Viewer) -> Response:
    """Delete a saved view."""
    attention.delete_view(services(request).db, caller.name, field(form, "name"))
    return redirect(request, "/account", done="saved")


@router.post("/account/tokens")
def create_token(request: Request, form: Fields, caller: Admin) -> Response:
    """Create an API token, and show its secret this once."""
    names = frozenset(each.strip() for each in field(form, "workflows").split(",") if each.strip())
    days = field(form, "days")
    try:
        rights = Rights(
            role=chosen(Role, field(form, "role")) or Role.VIEWER,
            can_see_payloads=field(form, "payloads") == "yes",
            workflows=names or caller.workflows,
        )
        lifetime = timedelta(days=int(days)) if days.isdecimal() and len(days) < 6 else DEFAULT_LIFETIME
        made = Access(services(request).db).create_token(
            field(form, "name"), rights, caller.actor(), lifetime=lifetime, within=caller.rights
        )
    except PipelineError as error:
        status, message = refusal(error)
        return _page(request, caller, status=status, messages=(message,))
    answer = _page(request, caller, status=201, created=made)
    answer.headers["Cache-Control"] = "no-store"
    return answer


@router.post("/account/tokens/{token_id}/revoke")
def revoke_token(request: Request, token_id: UUID, caller: Admin) -> Response:
    """Revoke a token, and every login that it opened."""
    Access(services(request).db).revoke_token(token_id, caller.actor(), within=caller.rights)
    return redirect(request, "/account", done="revoked")


def _page(
    request: Request,
    caller: Caller,
    *,
    status: int = 200,
    messages: tuple[Message, ...] = (),
    created: CreatedToken | None = None,
) -> HTMLResponse:
    db = services(request).db
    tokens = Access(db).tokens(caller.rights) if caller.role.covers(Role.ADMIN) else []
    return page(
        request,
        caller,
        "account.html",
        status=status,
        messages=messages,
        views=attention.list_views(db, caller.name),
        tokens=tokens,
        created=created,
        roles=list(Role),
    )
