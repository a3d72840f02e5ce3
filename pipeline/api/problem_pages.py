"""Show problems to people in a browser as pages; a person without a login is sent to the login page."""

from urllib.parse import quote

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from pipeline.admin.problem_types import ProblemType
from pipeline.api.rendering import render, url
from pipeline.api.security import local_path
from pipeline.api.sites import SAFE_METHODS


def problem_page(request: Request, problem: ProblemType, detail: str) -> Response | None:
    """Return the page of a problem; None for endpoints of /v1 and callers that do not want HTML."""
    path = local_path(request.scope)
    if path.startswith("/v1/") or "text/html" not in request.headers.get("accept", ""):
        return None
    if problem.status == 401 and request.method in SAFE_METHODS:
        query = request.scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        return RedirectResponse(url(request, f"/login?next={quote(target)}"), status_code=303)
    if problem.status == 401:
        detail = "The login has ended. Log in in another tab, then go back here and send the form again."
    return render(request, "problem.html", status=problem.status, problem=problem, detail=detail)
