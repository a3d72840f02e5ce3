"""What may be stored, checked before anything is written.

Postgres refuses some text that Python lets through (NUL, lone surrogates) and some numbers that
``json`` writes (NaN). Checked here, the refusal names the value and the path to it instead of
surfacing as a database error in the middle of a cohort. Words about a failure are never refused:
they are mended, because the failure must be recorded whatever it says.
"""

import json
import math
import unicodedata
from collections.abc import Iterator
from typing import Any

from pipeline.domain.errors import PayloadError

_JSON_VALUES = "a JSON object, array, string, number, boolean or null"
_STORABLE = "text without NUL and lone surrogates"
_DEEPEST = 64
_LONGEST_INTEGER = 1024  #: bits
_LONGEST_WORDS = 10_000
_UNSTORABLE = ("which is not storable text", "half a surrogate pair")
_LONGEST_QUOTE = 80  #: characters of a value that a message repeats
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def checked_json(value: Any, *, what: str, limit: int) -> Any:
    """Return ``value`` if it can be stored as it is; raise ``PayloadError`` naming what is wrong.

    Nearly every value is fine, so the first look keeps no path; the second one is for the message.
    """
    _written(value, what, limit)
    return value


def kept_json(value: Any, *, what: str, limit: int) -> Any:
    """A copy of ``value`` as it will be stored, so that what its owner does to it afterwards changes nothing."""
    return json.loads(_written(value, what, limit))


def _written(value: Any, what: str, limit: int) -> str:
    if not _is_fine(value, 0, [limit]):
        _explain(value, what, limit)
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    size = len(written.encode())
    if size > limit:
        raise PayloadError(what, f"{size} bytes of JSON", f"at most {limit} bytes")
    return written


def _is_fine(value: Any, depth: int, left: list[int]) -> bool:
    left[0] -= 1  # every value takes a byte at least: stop before a shared list explodes
    if left[0] < -1 or depth > _DEEPEST:
        return False
    kind = type(value)
    if kind is str:
        return (value.isascii() and "\0" not in value) or _storable(value)
    if kind is dict:
        return all(
            type(key) is str and _is_fine(key, depth, left) and _is_fine(item, depth + 1, left)
            for key, item in value.items()
        )
    if kind is list or kind is tuple:
        return all(_is_fine(item, depth + 1, left) for item in value)
    return value is None or kind is bool or (kind is int and value.bit_length() <= _LONGEST_INTEGER)


def _explain(value: Any, what: str, limit: int) -> None:
    """Look again, with a path to everything, at what did not look fine; raise if it is not."""
    for seen, (path, item, depth) in enumerate(_walk(value)):
        problem = _problem(item, path, depth)
        if problem:
            raise PayloadError(what, problem, _STORABLE if problem.endswith(_UNSTORABLE) else _JSON_VALUES)
        if seen > limit:
            raise PayloadError(what, f"more than {limit} values", f"at most {limit} bytes of JSON")


def checked_name(value: Any, *, what: str, limit: int = 255) -> str:
    """Return a name that can be a key: non-empty text of bounded length without control characters."""
    if not isinstance(value, str) or not value.strip():
        raise PayloadError(what, f"{_quoted(value)} is not a name", "non-empty text")
    if len(value) > limit:
        raise PayloadError(what, f"{len(value)} characters", f"at most {limit} characters")
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in value):
        raise PayloadError(what, f"{_quoted(value)} has control characters", "printable text")
    return value


def checked_text(value: Any, *, what: str, limit: int = _LONGEST_WORDS) -> str:
    """Return text of any kind that can be stored, possibly empty."""
    if not isinstance(value, str) or not _storable(value):
        raise PayloadError(what, f"{_quoted(value)} cannot be stored", _STORABLE)
    if len(value) > limit:
        raise PayloadError(what, f"{len(value)} characters", f"at most {limit} characters")
    return value


def mended_text(value: str) -> str:
    """Words about a failure as they can be stored: what cannot is replaced, what is too much is cut."""
    short = value if len(value) <= _LONGEST_WORDS else value[:_LONGEST_WORDS] + "…"
    return "".join(char if _storable(char) else _REPLACEMENT for char in short)


def _walk(value: Any) -> Iterator[tuple[str, Any, int]]:
    """Every value inside, with its path and depth, without recursion."""
    waiting: list[tuple[str, Any, int]] = [("$", value, 0)]
    while waiting:
        path, item, depth = waiting.pop()
        yield path, item, depth
        if isinstance(item, dict):
            waiting.extend((f"{path}.{key}", inner, depth + 1) for key, inner in reversed(item.items()))
        elif isinstance(item, list | tuple):
            waiting.extend((f"{path}[{index}]", item[index], depth + 1) for index in reversed(range(len(item))))


def _problem(value: Any, path: str, depth: int) -> str | None:
    if depth > _DEEPEST:
        return f"{path[:60]}… is nested more than {_DEEPEST} levels deep"
    path = _cut(path)
    if value is None or isinstance(value, bool | list | tuple):
        return None
    if isinstance(value, dict):
        bad = [key for key in value if not isinstance(key, str) or not _storable(key)]
        return f"{path} has the key {_quoted(bad[0])}, which is not storable text" if bad else None
    return _scalar_problem(value, path)


def _scalar_problem(value: Any, path: str) -> str | None:
    match value:
        case int() if value.bit_length() > _LONGEST_INTEGER:
            return f"{path} is an integer of {value.bit_length()} bits"
        case str() if not _storable(value):
            return f"{path} has a NUL character or half a surrogate pair"
        case float() if not math.isfinite(value):
            return f"{path} is {value}, which JSON does not have"
        case int() | str() | float():
            return None
        case _:
            return f"{path} is a {type(value).__qualname__}"


def _quoted(value: Any) -> str:
    """A value as a message repeats it: escaped, and not longer than a line."""
    return _cut(repr(value))


def _cut(words: str) -> str:
    short = words if len(words) <= _LONGEST_QUOTE else f"{words[:_LONGEST_QUOTE]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def _storable(text: str) -> bool:
    return not any(char == "\0" or 0xD800 <= ord(char) <= 0xDFFF for char in text)
