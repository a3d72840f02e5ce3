"""Format values for people: ages, instants, ids, amounts of things, and text from outside."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from markupsafe import Markup

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
