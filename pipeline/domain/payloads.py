"""Check what may be stored, before anything is written.

Postgres refuses some text that Python lets through (NUL, lone surrogates) and some numbers that
``json`` writes (NaN). Checked here, the refusal names the value and the path to it instead of
surfacing as a database error in the middle of a cohort. The message of a failure is never refused:
it is made storable, because the failure must be recorded.
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.domain.codec import MARKER, Sealed
from pipeline.domain.errors import InvalidInputError, PayloadError
from pipeline.text import printable_text

_JSON_VALUES = "a JSON object, array, string, number, boolean or null"
_STORABLE = "text without NUL and lone surrogates"
_MAX_DEPTH = 64
_MAX_INTEGER_BITS = 1024  #: bits
_MAX_TEXT_LENGTH = 10_000
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_MAX_QUOTE_LENGTH = 80  #: characters of a value that a message repeats
_NUMBERS = (int, float)
_MAX_PLAIN_NUMBER = 2**63
_MAX_PLAIN_SIZE = 26  #: bytes of such a number with its comma, and more than those of brackets or quotes
_MAX_ESCAPE_SIZE = 6  #: bytes of a character
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ROUND_TRIP_MODEL = "a model that its own JSON reads back; publish what cannot be written like that as plain JSON"


def checked_json(value: Any, *, what: str, limit: int) -> Any:
    """Return ``value`` if it can be stored as it is; raise ``PayloadError`` naming what is wrong.

    A value that this process has sealed was checked before.
    """
    if isinstance(value, Sealed):
        return value
    if not is_plain(value, limit):
        _serialize(value, what, limit)
    return value


def is_plain(value: Any, limit: int) -> bool:
    """Whether a value is clearly storable: made of plain values, and far from the limit.

    Nearly every payload is. This walk takes a tenth of the time of the exact one, which alone refuses a value.
    """
    if isinstance(value, dict) and MARKER in value:
        return False
    texts: list[Any] = []
    level: list[Any] = [value]
    size = 0  #: of the JSON at most, the characters of texts excepted
    for _ in range(_MAX_DEPTH):
        size += len(level) * _MAX_PLAIN_SIZE
        inner = _next_level(level, texts, limit - size)
        if not inner:
            return inner is not None and _are_plain(texts, limit - size)
        level = inner
    return False


def _next_level(level: list[Any], texts: list[Any], limit: int) -> list[Any] | None:
    """What the containers of a level contain; None if that is too much, or if a value is not plain. Collects texts."""
    inner: list[Any] = []
    for item in level:
        kind = type(item)
        if kind is str:
            texts.append(item)
        elif kind is dict:
            texts += item
            inner += item.values()
        elif kind is list:
            inner += item
        elif not (item is None or kind is bool or (kind in _NUMBERS and abs(item) < _MAX_PLAIN_NUMBER)):
            return None
        if len(inner) > limit:  # asked here, before a list that shares its parts explodes
            return None
    return inner


def _are_plain(texts: list[Any], limit: int) -> bool:
    try:
        text = "".join(texts)
    except TypeError:  # a key that is no text
        return False
    return len(texts) * _MAX_PLAIN_SIZE + len(text) * _MAX_ESCAPE_SIZE <= limit and _is_storable(text)


def json_copy(value: Any, *, what: str, limit: int) -> Any:
    """A copy of ``value`` as it will be stored, so that what its owner does to it afterwards changes nothing."""
    return json.loads(_serialize(value, what, limit))


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object, for ``json.loads``. Of two values for one key parsers disagree which counts: a ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the key {_quoted(twice)} is there twice")
    return found


def parsed_json(text: str, *, what: str, expected: str = "") -> Any:
    """Parse JSON from outside; raise ``InvalidInputError`` that names what it is."""
    try:
        return json.loads(text, object_pairs_hook=distinct_keys)
    except RecursionError:
        problem = "is nested too deeply to be read"
    except ValueError as error:
        problem = f"is no JSON: {error}"
    raise InvalidInputError(f"{what} {problem}.{expected and f' Expected {expected}.'}")


def json_payload(value: Any, *, what: str) -> Any:
    """A payload as JSON: a model as a service without the model would publish it, anything else as it is.

    A model that its JSON does not read back as it is would be another one for its consumers (a secret is
    written as asterisks, an excluded field not at all, and a validator may change what it changed before).
    It is refused while its owner still has it. Names in its JSON are those that the model reads.
    """
    if not isinstance(value, BaseModel):
        return value
    problem = ""
    for by_alias in (True, False):
        try:
            written = value.model_dump(mode="json", by_alias=by_alias, round_trip=True, warnings=False)
            lost = _first_difference(
                value, type(value).model_validate(deepcopy(written)), "$"
            )  # a validator may take it apart
        except ValidationError as error:
            lost = ".".join(("$", *map(str, error.errors(include_url=False, include_input=False)[0]["loc"])))
        except ValueError:  # what pydantic raises where it has no way to write something
            raise PayloadError(
                what, f"a {type(value).__qualname__} cannot be written as JSON", _ROUND_TRIP_MODEL
            ) from None
        if lost is None:
            return written
        problem = problem or f"{lost} of a {type(value).__qualname__} would be lost or changed"
    raise PayloadError(what, problem, _ROUND_TRIP_MODEL)


def _first_difference(value: Any, back: Any, path: str) -> str | None:
    """Where something differs from what came back. What a model keeps for itself is no part of it."""
    pairs: list[tuple[Any, Any, str]]
    if isinstance(value, BaseModel) and type(value) is type(back):
        value, back = _model_fields(value), _model_fields(back)
    if isinstance(value, dict) and isinstance(back, dict) and value.keys() == back.keys():
        pairs = [(item, back[key], f"{path}.{key}") for key, item in value.items()]
    elif isinstance(value, list | tuple) and isinstance(back, list | tuple) and len(value) == len(back):
        pairs = [(item, back[index], f"{path}[{index}]") for index, item in enumerate(value)]
    else:
        return None if _is_equal(value, back) else path
    return next((lost for item in pairs if (lost := _first_difference(*item))), None)


def _model_fields(model: BaseModel) -> dict[str, Any]:
    held = model.__dict__  # not by getattr: a deprecated field would warn
    return {name: held[name] for name in type(model).model_fields if name in held} | (model.model_extra or {})


def _is_equal(value: Any, back: Any) -> bool:
    """A type that does not say when two of it are equal is trusted."""
    says: Any = type(value).__eq__
    return bool(value == back) or (type(value) is type(back) and says is object.__eq__)


def _serialize(value: Any, what: str, limit: int) -> str:
    if isinstance(value, dict) and MARKER in value:
        raise PayloadError(
            what,
            f"it has the key {MARKER!r}, which marks an encrypted value",
            "an object without this key; a value that is encrypted is read where PIPELINE_CODEC_KEYS has its key",
        )
    left = [limit]
    found = _flaw(value, 0, left)
    if left[0] < 0:
        raise PayloadError(what, f"more than {limit} values", f"at most {limit} bytes of JSON")
    if found is not None:
        path, problem, expected = found
        raise PayloadError(what, f"{printable_text(f'${path}', _MAX_QUOTE_LENGTH)} {problem}", expected)
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    size = len(written.encode())
    if size > limit:
        raise PayloadError(what, f"{size} bytes of JSON", f"at most {limit} bytes")
    return written


def _flaw(value: Any, depth: int, left: list[int]) -> tuple[str, str, str] | None:
    """What cannot be stored: where it is, what is wrong with it, and what is expected.

    The path is put together on the way back, because nearly every value is fine. ``left`` counts values: each takes
    a byte at least, so the walk ends before a list that shares its parts explodes.
    """
    left[0] -= 1
    if left[0] < 0 or depth > _MAX_DEPTH:
        return "", f"is nested more than {_MAX_DEPTH} levels deep", _JSON_VALUES
    if not isinstance(value, dict | list | tuple):
        return _scalar_flaw(value)
    is_object = isinstance(value, dict)
    pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        if is_object and not (isinstance(key, str) and _is_storable(key)):
            return "", f"has the key {_quoted(key)}, which is not storable text", _STORABLE
        if found := _flaw(item, depth + 1, left):
            return (f".{key}" if is_object else f"[{key}]") + found[0], *found[1:]
    return None


def _scalar_flaw(value: Any) -> tuple[str, str, str] | None:
    match value:
        case str():
            return None if _is_storable(value) else ("", "has a NUL character or half a surrogate pair", _STORABLE)
        case int() if value.bit_length() > _MAX_INTEGER_BITS:
            return "", f"is an integer of {value.bit_length()} bits", _JSON_VALUES
        case float() if not math.isfinite(value):
            return "", f"is {value}, which JSON does not have", _JSON_VALUES
        case int() | float() | None:
            return None
    return "", f"is a {type(value).__qualname__}", _JSON_VALUES


def checked_name(value: Any, *, what: str, limit: int = 255) -> str:
    """Return a name that can be a key: non-empty text of bounded length without control characters."""
    if not isinstance(value, str) or not value.strip():
        raise PayloadError(what, f"{_quoted(value)} is not a name", "non-empty text")
    if len(value) > limit:
        raise PayloadError(what, f"{len(value)} characters", f"at most {limit} characters")
    if not value.isprintable() and any(unicodedata.category(char) in ("Cc", "Cs") for char in value):
        raise PayloadError(what, f"{_quoted(value)} has control characters", "printable text")
    return value


def checked_text(value: Any, *, what: str, limit: int = _MAX_TEXT_LENGTH) -> str:
    """Return text of any kind that can be stored, possibly empty."""
    if not isinstance(value, str) or not _is_storable(value):
        raise PayloadError(what, f"{_quoted(value)} cannot be stored", _STORABLE)
    if len(value) > limit:
        raise PayloadError(what, f"{len(value)} characters", f"at most {limit} characters")
    return value


def storable_text(value: str) -> str:
    """A message as it can be stored: characters that cannot be stored are replaced, a long message is cut."""
    short = value if len(value) <= _MAX_TEXT_LENGTH else value[:_MAX_TEXT_LENGTH] + "…"
    return _UNSTORABLE.sub(_REPLACEMENT, short)


def _quoted(value: Any) -> str:
    """A value as a message repeats it: escaped, and not longer than a line."""
    return printable_text(repr(value), _MAX_QUOTE_LENGTH)


def _is_storable(text: str) -> bool:
    return text.isprintable() or _UNSTORABLE.search(text) is None
