"""Render pages from templates. Links are relative to the prefix under which the app is mounted."""

from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.api.access import csrf_token

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)


def url(request: Request, path: str) -> str:
    """Return a path of this app as the browser must ask for it."""
    return f"{request.scope.get('root_path', '').rstrip('/')}{path}"


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a template. It knows ``url(path)``, ``caller`` (or None) and ``csrf_token``."""
    text = _environment.get_template(template).render(
        request=request,
        url=lambda path: url(request, path),
        caller=getattr(request.state, "caller", None),
        csrf_token=csrf_token(request),
        **values,
    )
    return HTMLResponse(text, status_code=status)
