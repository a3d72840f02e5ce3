"""Fill paths and query values that have parameters in braces.

``{id}`` takes text or a whole number. ``{id:int}``, ``{id:str}`` and ``{id:uuid}`` take that type only. ``{key}`` is
the idempotency key and ``{json.order.id}`` is a value of the request's body. These two are not parameters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote
from uuid import UUID

from pydantic import AfterValidator

from pipeline.domain.errors import InvalidInputError, LogicError

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"(?P<name>[a-z_][a-z0-9_]*)(:(?P<kind>[a-z]+))?", re.IGNORECASE)
_BODY_PATH = re.compile(r"json(\.\w+)+")
_RESERVED = frozenset({"self", "call", "json", "query"})


def _check_segment(value: str | int) -> str | int:
    """Refuse a path segment that would change the path: empty text or dots."""
    if value in ("", ".", ".."):
        raise ValueError(f"{value!r} would lead to another path; expected text that names one thing")
    return value


_TYPES: dict[str | None, Any] = {
    None: Annotated[str | int, AfterValidator(_check_segment)],
    "str": Annotated[str, AfterValidator(_check_segment)],
    "int": int,
    "uuid": UUID,
}


@dataclass(frozen=True, slots=True)
class Template:
    """Text with placeholders. It is checked once, when the operation is declared."""

    text: str
    parameters: dict[str, Any] = field(init=False)  #: parameters by name, with their types
    uses_key: bool = field(init=False)

    def __post_init__(self) -> None:
        kinds, holes = {}, _PLACEHOLDER.findall(self.text)
        if _PLACEHOLDER.sub("", self.text).count("{") or _PLACEHOLDER.sub("", self.text).count("}"):
            raise InvalidInputError(f"{self.text!r} has a brace without its other half; expected names in braces.")
        for hole in holes:
            if hole == "key" or _BODY_PATH.fullmatch(hole):
                continue
            match = _NAME.fullmatch(hole)
            if match is None or match["kind"] not in _TYPES or match["name"] in _RESERVED:
                known = ", ".join(kind for kind in _TYPES if kind)
                raise InvalidInputError(
                    f"{self.text!r} has {{{hole}}}; expected a name like {{id}}, of a type like {{id:int}} "
                    f"({known}), {{key}}, or a value of the body like {{json.id}}."
                )
            kinds[match["name"]] = _TYPES[match["kind"]]
        object.__setattr__(self, "parameters", kinds)
        object.__setattr__(self, "uses_key", "key" in holes)

    def fill(self, values: Mapping[str, Any], *, as_path: bool) -> str:
        """Return the text with these values. In a path each value is quoted, including slashes."""
        return _PLACEHOLDER.sub(lambda match: _placeholder_text(match[1].partition(":")[0], values, as_path), self.text)


def checked_path(text: str) -> Template:
    """Check a path below the base URL."""
    if not text.startswith("/") or "?" in text or "#" in text or "//" in text:
        raise InvalidInputError(f"The path {text!r} cannot be used; expected one like '/things/{{id}}', without query.")
    return Template(text)


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return the value with this name or dotted path. None if there is none."""
    found: Any = values
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def all_parameters(*templates: Template) -> dict[str, Any]:
    """Return the parameters of all these templates."""
    return {name: kind for template in templates for name, kind in template.parameters.items()}


def _placeholder_text(name: str, values: Mapping[str, Any], as_path: bool) -> str:
    value = value_at(values, name)
    if value is None:
        given = ", ".join(sorted(values)) or "nothing"
        raise LogicError(f"{name} is missing; given were: {given}")
    if not as_path:
        return str(value)
    try:
        return quote(str(_check_segment(str(value))), safe="")
    except ValueError as error:
        raise LogicError(f"{name} cannot be part of a path: {error}") from None
