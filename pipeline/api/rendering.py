"""Render pages from templates, and format ages, instants and text from outside for people.

Links are relative to the prefix under which the app is mounted.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.api.access import csrf_token
from pipeline.api.security import local_path, prefix_of
from pipeline.text import visible_text

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"))


def cleaned(value: Any) -> Any:
    """Return text without control and bidi characters, which could hide or reorder what a page shows."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible_text(value, keep="\n\t")


def duration(span: timedelta | float) -> str:
    """Return a duration in one unit for a glance: 12 s, 4 m, 3 h, 2 d."""
    seconds = span.total_seconds() if isinstance(span, timedelta) else float(span)
    seconds = max(0.0, seconds)
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def long_duration(span: timedelta | float) -> str:
    """Return a duration in two units: 4 m 12 s, 2 d 3 h."""
    seconds = int(max(0.0, span.total_seconds() if isinstance(span, timedelta) else float(span)))
    parts: list[str] = []
    for size, unit in (*_UNITS, (1, "s")):
        if seconds >= size:
            parts.append(f"{seconds // size} {unit}")
            seconds %= size
    return " ".join(parts[:2]) or "0 s"


def instant(at: datetime | None, now: datetime | None = None) -> str:
    """Return an instant in UTC; without the date if it is the day of ``now``."""
    if at is None:
        return ""
    there = at.astimezone(UTC)
    if now is not None and there.date() == now.astimezone(UTC).date():
        return f"{there:%H:%M:%S}"
    return f"{there:%Y-%m-%d %H:%M:%S}"


def iso(at: datetime) -> str:
    """Return an instant for the attribute of a time element."""
    return at.astimezone(UTC).isoformat()


def short_id(value: Any) -> str:
    """Return the first and the last digits of a long id."""
    text = str(value)
    return f"{text[:8]}…{text[-4:]}" if len(text) > 20 else text


def number(value: float | None) -> str:
    """Return a number with thin spaces between thousands."""
    if value is None:
        return "-"
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
    return text.replace(",", "\u202f")


def pretty_json(value: Any) -> str:
    """Return a value as indented JSON; a text as it is."""
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)


def sentence(text: str) -> str:
    """Return text with a capital letter first and a full stop at its end."""
    found = text.strip()
    if not found:
        return ""
    return found[0].upper() + found[1:] + ("" if found[-1] in ".!?…" else ".")


def first_clause(text: str, limit: int = 90) -> str:
    """Return the begin of an error text for a list: up to the first semicolon, without places in the code."""
    found = re.sub(r" \([\w./-]+:\d+\)", "", text.split(";", 1)[0]).strip()
    return found if len(found) <= limit else found[: limit - 1].rstrip() + "…"


def clauses(text: str) -> list[str]:
    """Return the parts of an error text, each as a sentence."""
    return [sentence(part) for part in text.split(";") if part.strip()]


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
    return duration(now - at) if parts == 1 else long_duration(now - at)


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "iso": iso,
        "instant": instant,
        "since": _since,
        "duration": duration,
        "long_duration": long_duration,
        "short_id": short_id,
        "number": number,
        "pretty_json": pretty_json,
        "sentence": sentence,
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
