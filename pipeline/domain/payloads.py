"""What may be stored as JSON, checked before anything is written.

Postgres refuses some text that Python's ``json`` lets through (NUL, lone surrogates, NaN). Checked
here, the refusal names the value and the path to it instead of surfacing as a database error in
the middle of a cohort.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from pipeline.domain.errors import PayloadError

JSON_VALUES = "a JSON object, array, string, number, boolean or null"


def checked_json(value: Any, *, what: str, limit: int) -> Any:
    """Return ``value`` if it can be stored as it is; raise ``PayloadError`` naming what is wrong."""
    problem = _problem(value, "$", 0)
    if problem:
        raise PayloadError(what, problem, JSON_VALUES)
    size = len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    if size > limit:
        raise PayloadError(what, f"{size} bytes of JSON", f"at most {limit} bytes")
    return value


def checked_name(value: Any, *, what: str, limit: int = 255) -> str:
    """Return a name that can be a key: non-empty text of bounded length without control characters."""
    if not isinstance(value, str) or not value.strip():
        raise PayloadError(what, f"{value!r} is not a name", "non-empty text")
    if len(value) > limit:
        raise PayloadError(what, f"{len(value)} characters", f"at most {limit} characters")
    if not _storable(value) or any(ord(char) < 32 for char in value):
        raise PayloadError(what, f"{value!r} has control characters", "printable text")
    return value


def _problem(value: Any, path: str, depth: int) -> str | None:
    if depth > 64:
        return f"{path[:60]}… is nested more than 64 levels deep"
    if value is None or isinstance(value, bool | int):
        return None
    if isinstance(value, str):
        return None if _storable(value) else f"{path} has a NUL character or half a surrogate pair"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{path} is {value}, which JSON does not have"
    return _container_problem(value, path, depth)


def _container_problem(value: Any, path: str, depth: int) -> str | None:
    if isinstance(value, list | tuple):
        items: Any = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not _storable(key):
                return f"{path} has the key {key!r}, which is not storable text"
        items = ((f"{path}.{key}", item) for key, item in value.items())
    else:
        return f"{path} is a {type(value).__qualname__}"
    return next((found for where, item in items if (found := _problem(item, where, depth + 1))), None)


def _storable(text: str) -> bool:
    return "\0" not in text and not any(0xD800 <= ord(char) <= 0xDFFF for char in text)
