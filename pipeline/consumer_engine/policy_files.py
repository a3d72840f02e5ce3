"""Read policies from files and the environment. All problems are reported at once, by name."""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.config import expectation
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.domain.errors import InvalidInputError

PREFIX = "CONSUME_"
Origins = Mapping[tuple[str, ...], str]  #: path in the policy -> the variable that set it

_NONE = frozenset({"", "none", "null"})


class PolicyError(InvalidInputError):
    """A policy that cannot be used. Nothing was started."""

    def __init__(self, where: str, problems: list[str]) -> None:
        self.where, self.problems = where, tuple(problems)
        super().__init__(f"{where} cannot be used: {'; '.join(problems)}. Nothing was started.")


def load_policy(path: Path | None, environ: Mapping[str, str], base: ConsumerPolicy | None = None) -> ConsumerPolicy:
    """Read a policy: ``base``, then the file if there is one, then the environment.

    ``CONSUME_LOOP__CONCURRENCY__VALUE=8`` sets the field ``loop.concurrency.value``; ``none`` is no
    value. The arguments for the source are merged one by one.
    """
    where = "The policy"
    given: object = base or ConsumerPolicy()  # a task's attribute `policy` is not checked before
    if not isinstance(given, ConsumerPolicy):
        problem = f"it is of type {type(given).__name__}; expected a ConsumerPolicy; load_policy reads one from a file"
        raise PolicyError(where, [problem])
    values = given.model_dump()
    if path is not None:
        values, where = _merge(values, from_file(path)), f"The policy in {path}"
    return build(_merge(values, from_environ(environ)), where, _origins(environ))


def build(values: Mapping[str, Any], where: str = "The policy", origins: Origins | None = None) -> ConsumerPolicy:
    """Return a checked policy, or raise all its problems with the variables that set them."""
    try:
        return ConsumerPolicy.model_validate(values)
    except ValidationError as error:
        found = [(_variable_at(each["loc"], origins or {}), each) for each in error.errors()]
        if all(name for name, _ in found):
            where = "The environment"
        raise PolicyError(where, [_problem_text(each, name) for name, each in found]) from None


def from_file(path: Path) -> dict[str, Any]:
    """Read a TOML, YAML or JSON file. YAML needs the package pyyaml."""
    read = _READERS.get(path.suffix.lower())
    if read is None:
        problem = f"its name ends in {path.suffix.lower()!r}; expected .toml, .yaml, .yml or .json"
        raise PolicyError(str(path), [problem])
    try:
        found = read(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise PolicyError(str(path), ["it is nested too deeply; expected a table with loop and steps"]) from None
    except OSError as error:
        raise PolicyError(str(path), [error.strerror or str(error)]) from error
    except UnicodeDecodeError as error:
        raise PolicyError(str(path), ["it is not text in UTF-8"]) from error
    except ValueError as error:
        raise PolicyError(str(path), [str(error)]) from error
    if not isinstance(found, dict):
        problem = f"it holds something of type {type(found).__name__}; expected a table with loop and steps"
        raise PolicyError(str(path), [problem])
    return found


def from_environ(environ: Mapping[str, str], prefix: str = PREFIX) -> dict[str, Any]:
    """Return the values of the environment as nested text. Building the policy converts the text."""
    values: dict[str, Any] = {}
    for path, name in _origins(environ, prefix).items():
        inner = values
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise PolicyError(name, [f"{prefix}{part.upper()} is set as a whole too; expected one of the two"])
        text = environ[name]
        inner[path[-1]] = None if text.strip().lower() in _NONE else text
    return values


def fields(model: type[BaseModel] = ConsumerPolicy, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field of a policy by its path, with its default."""
    for name, field in model.model_fields.items():
        default = field.default
        if isinstance(default, BaseModel):
            yield from fields(type(default), f"{above}{name}.")
        else:
            yield f"{above}{name}", default


def _origins(environ: Mapping[str, str], prefix: str = PREFIX) -> Origins:
    named = sorted(name for name in environ if name.startswith(prefix))
    return {tuple(name.removeprefix(prefix).lower().split("__")): name for name in named}


def _parse_yaml(text: str) -> Any:
    try:
        import yaml  # optional dependency
    except ImportError:
        raise ValueError("YAML needs the package pyyaml; install it, or write TOML") from None
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ValueError(f"{error.problem or 'it is not YAML'}{line}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": json.loads,
}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            merged[name] = value
        else:
            merged[name] = _merge_arguments(old, value) if name == "extra" else _merge(old, value)
    return merged


def _merge_arguments(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the arguments for a source one by one.

    The environment has neither small letters nor numbers. An existing name keeps its spelling, and
    text for an existing value that is not text is read as JSON.
    """
    spelled = {str(name).lower(): name for name in below}
    merged = dict(below)
    for given, value in above.items():
        name = given if given in below else spelled.get(given, given)
        merged[name] = _convert_like(below.get(name), value)
    return merged


def _convert_like(old: Any, new: Any) -> Any:
    if not isinstance(new, str) or old is None or isinstance(old, str):
        return new
    try:
        return json.loads(new)
    except ValueError:
        return new


def _variable_at(path: tuple[Any, ...], origins: Origins) -> str | None:
    """Return the variable that set the value at a path."""
    lowered = tuple(str(part).lower() for part in path)
    common = {origin: min(len(origin), len(lowered)) for origin in origins}
    return next((origins[origin] for origin, most in common.items() if origin[:most] == lowered[:most]), None)


def _problem_text(error: Any, variable: str | None) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "it"
    shown = f"{variable} ({path})" if variable else path
    if error["type"] == "extra_forbidden":
        near = get_close_matches(path, [name for name, _ in fields()], n=1)
        return f"{shown} is not a field" + (f" (did you mean {near[0]}?)" if near else "")
    wanted = expectation(error)
    if error["type"] == "value_error" or "extra" in error["loc"]:  # an argument of a source may be secret
        return f"{shown}: {wanted}"
    return f"{shown}: {wanted}, got {'nothing' if error['input'] is None else repr(error['input'])}"
