"""Policies from files and from the environment. What is wrong is said all at once, by name."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.domain.errors import InvalidInputError
from pipeline.engine.policies import ConsumerPolicy

PREFIX = "CONSUME_"
_NONE = frozenset({"", "none", "null"})


class PolicyError(InvalidInputError):
    """A policy that cannot be used. Nothing was started."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.where, self.problems = where, tuple(problems)
        super().__init__(f"{where} cannot be used: {'; '.join(problems)}. Nothing was started.")


def load(path: Path | None, environ: Mapping[str, str], base: ConsumerPolicy | None = None) -> ConsumerPolicy:
    """The policy of a file, if one is given, with what the environment says instead, on top of ``base``.

    ``CONSUME_LOOP__CONCURRENCY__VALUE=8`` is the field ``loop.concurrency.value``; ``none`` is no value.
    """
    values = (base or ConsumerPolicy()).model_dump()
    where = "The policy"
    if path is not None:
        values, where = _merged(values, from_file(path)), f"The policy in {path}"
    return build(_merged(values, from_environ(environ)), where)


def build(values: Mapping[str, Any], where: str = "The policy") -> ConsumerPolicy:
    """A checked policy, or everything that is wrong with it."""
    try:
        return ConsumerPolicy.model_validate(values)
    except ValidationError as error:
        raise PolicyError(where, [_sentence(each) for each in error.errors()]) from None


def from_file(path: Path) -> dict[str, Any]:
    """What a TOML, YAML or JSON file says. YAML needs the package pyyaml."""
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix.lower():
            case ".toml":
                found: Any = tomllib.loads(text)
            case ".yaml" | ".yml":
                found = _yaml(text)
            case ".json":
                found = json.loads(text)
            case other:
                raise PolicyError(str(path), [f"its name ends in {other!r}; expected .toml, .yaml, .yml or .json"])
    except (OSError, ValueError) as error:
        raise PolicyError(str(path), [str(error)]) from error
    if not isinstance(found, dict):
        raise PolicyError(str(path), [f"it holds a {type(found).__name__}; expected a table with loop and steps"])
    return found


def from_environ(environ: Mapping[str, str], prefix: str = PREFIX) -> dict[str, Any]:
    """What the environment says, as nested values. Text is read as the field's type when the policy is built."""
    values: dict[str, Any] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(prefix):
            continue
        *path, last = name.removeprefix(prefix).lower().split("__")
        inner = values
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise PolicyError(
                    name, [f"{prefix}{part.upper()} is given as a whole as well; expected one of the two"]
                )
        inner[last] = None if text.strip().lower() in _NONE else text
    return values


def fields(model: type[BaseModel] = ConsumerPolicy, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a policy by its path, with its default."""
    for name, field in model.model_fields.items():
        default = field.default
        if isinstance(default, BaseModel):
            yield from fields(type(default), f"{above}{name}.")
        else:
            yield f"{above}{name}", default


def _yaml(text: str) -> Any:
    try:
        import yaml  # here: only those who write YAML need it
    except ImportError:
        raise ValueError("YAML needs the package pyyaml; install it, or write TOML") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(old, value) if both and name != "extra" else value  # type: ignore[arg-type]
    return merged


def _sentence(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "it"
    if error["type"] == "extra_forbidden":
        near = get_close_matches(path, [name for name, _ in fields()], n=1)
        return f"{path} is not a field" + (f" (did you mean {near[0]}?)" if near else "")
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "expected", 1)
    if error["type"] == "value_error" or "extra" in error["loc"]:  # what is given to a source may be secret
        return f"{path}: {message}"
    return f"{path}: {message}, got {error['input']!r}"
