"""Render pages from templates. Links are relative to the prefix under which the app is mounted."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.api import formats
from pipeline.api.access import csrf_token
from pipeline.api.security import local_path, prefix_of

THEMES = ("", "light", "dark")  #: empty: as the browser prefers
THEME_COOKIE = "pipeline_theme"
_HERE = Path(__file__).parent
_OK = frozenset({"applied", "committed", "consumed", "completed", "active", "closed", "success", "well"})
_WARN = frozenset({"pending", "needs_reconcile", "paused", "reserved", "maintenance", "skipped", "in_flight", "late"})
_DANGER = frozenset({"indeterminate", "failed", "error", "quarantined", "open", "failure", "lost", "broken"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuPage:
    """A page in the menu."""

    key: str
    title: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message above a page: what was done, or why not."""

    text: str
    kind: str = "done"  #: done, error or info
    detail: str = ""
    lines: Sequence[str] = ()


MENU = (
    MenuPage(key="inbox", title="Inbox", path="/"),
    MenuPage(key="workflows", title="Workflows", path="/w"),
    MenuPage(key="ledger", title="Ledger", path="/ledger"),
    MenuPage(key="runs", title="Runs", path="/runs"),
    MenuPage(key="events", title="Events", path="/events"),
    MenuPage(key="connectors", title="Connectors", path="/connectors"),
    MenuPage(key="system", title="System", path="/system"),
    MenuPage(key="audit", title="Audit", path="/audit"),
)


def _tone(status: object) -> str:
    """Return the colour class of a status. The text says the same."""
    words = set(re.split(r"[\s:,]+", str(status)))
    tones = (("danger", _DANGER), ("warn", _WARN), ("ok", _OK))
    return next((tone for tone, known in tones if words & known), "")


def _host(link: str) -> str:
    """Return the host of a link, which says where it leads."""
    return urlsplit(link).netloc or link


def _since(at: datetime, now: datetime, parts: int = 1) -> str:
    return formats.duration(now - at) if parts == 1 else formats.long_duration(now - at)


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=formats.cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "iso": formats.iso,
        "instant": formats.instant,
        "since": _since,
        "duration": formats.duration,
        "long_duration": formats.long_duration,
        "short_id": formats.short_id,
        "number": formats.number,
        "pretty_json": formats.pretty_json,
        "sentence": formats.sentence,
        "tone": _tone,
        "host": _host,
    }
    return made


_templates = _environment()


@cache
def _digest(name: str) -> str:
    return hashlib.sha256((_HERE / "static" / name).read_bytes()).hexdigest()[:12]


def url(request: Request, path: str) -> str:
    """Return a path of this app as the browser must ask for it."""
    return f"{prefix_of(request.scope)}{path}"


def theme_of(request: Request) -> str:
    """Return the theme that this browser chose."""
    found = request.cookies.get(THEME_COOKIE, "")
    return found if found in THEMES else ""


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a template. It knows ``url(path)``, ``caller`` (or None) and ``csrf_field``, the field that forms send."""
    token = csrf_token(request)
    known: dict[str, Any] = {
        "request": request,
        "url": lambda path: url(request, path),
        "static": lambda name: url(request, f"/static/{name}?v={_digest(name)}"),
        "caller": getattr(request.state, "caller", None),
        "csrf_token": token,
        "csrf_field": Markup('<input type="hidden" name="csrf_token" value="{}">').format(token),
        "pages": MENU,
        "here": "",
        "theme": theme_of(request),
        "current_path": _local_path(request),
        "now": None,
        "waiting": 0,
        "messages": (),
        "search_text": "",
        "flower_url": "",
        "can_log_out": bool(getattr(request.state, "login_secret", "")),
    }
    return HTMLResponse(_templates.get_template(template).render({**known, **values}), status_code=status)


def _local_path(request: Request) -> str:
    """Return path and query of a request, without the prefix of the app."""
    path = local_path(request.scope)
    return f"{path}?{request.url.query}" if request.url.query else path
