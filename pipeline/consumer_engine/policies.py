"""The policies of the consumer engine, with the names and units of its specification, and where they are read from.

They are frozen data, checked when they are built, and the same after a trip through JSON. Durations
are seconds as floats. No default loops without a pause or retries without end. Files and the
environment may set them; all problems are reported at once, by name.

`RetryPolicy` here is not `MutationRetryPolicy` of `pipeline.domain.policies`. That one spaces out mutations, with
jitter and always with a cap. This one follows the specification's formula exactly, has a timeout,
and writes "no cap" as 0. Its pauses are the same in every run.
"""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from pipeline.config import expectation
from pipeline.consumer_engine.transactions import freeze, require_json_value, thaw
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.policies import Policy


def _refuse_bool(value: Any) -> Any:
    """Refuse true and false, which Python would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number, got true or false")
    return value


_MAX_SECONDS = 10 * 365 * 86_400.0  #: ten years; the operating system refuses much longer waits
_Number = BeforeValidator(_refuse_bool)
Seconds = Annotated[float, _Number, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]
#: 0 is refused: no work fits into it
Timeout = Annotated[float, _Number, Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False)]
Multiplier = Annotated[float, _Number, Field(ge=1, allow_inf_nan=False)]
Count = Annotated[int, _Number, Field(ge=1)]
Arguments = Annotated[
    Mapping[str, Any], AfterValidator(require_json_value), AfterValidator(freeze), PlainSerializer(thaw)
]


class EnginePolicy(Policy):
    """A policy whose errors do not show its input: the arguments of a source may be secret."""

    model_config = ConfigDict(hide_input_in_errors=True)


def delay(backoff: float, multiplier: float, cap: float, index: int) -> float:
    """Return pause ``index`` (from 0): ``backoff * multiplier ** index``, at most ``cap`` unless 0.

    A pause that no float can hold becomes the cap, or the longest pause that is allowed.
    """
    try:
        pause = backoff * multiplier**index
    except OverflowError:
        pause = math.inf if backoff else 0.0
    return min(pause, cap) if cap > 0 else min(pause, _MAX_SECONDS)


def _check_bounds(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" + (f" and at most {most}" if most is not None else "")
        raise ValueError(f"{name} is {value}; expected {bounds}")


class RetryPolicy(EnginePolicy):
    """Attempts of one step: how many, how long each may take, and the pauses between."""

    max_attempts: Count = 1  #: the first one included
    timeout: Timeout | None = None  #: seconds for one attempt
    backoff: Seconds = 0.0  #: seconds before the second attempt
    backoff_multiplier: Multiplier = 2.0  #: factor from one pause to the next
    backoff_cap: Seconds = 0.0  #: the longest pause; 0 means no cap

    def pause(self, index: int) -> float:
        """Return the seconds to wait after failure ``index``, counted from 0."""
        return delay(self.backoff, self.backoff_multiplier, self.backoff_cap, index)

    def longest(self) -> float:
        """Return the seconds of all attempts and pauses. An attempt without a timeout counts as none."""
        total, pauses = self.max_attempts * (self.timeout or 0.0), self.max_attempts - 1
        for index in range(pauses):
            pause = self.pause(index)
            if pause == self.pause(index + 1):  # so are all that follow
                return total + pause * (pauses - index)
            total += pause
        return total


class ConcurrencyPolicy(EnginePolicy):
    """How many items are processed at once."""

    value: Count = 1  #: items at once, exactly
    min: Count = 1  #: a bound for a tool that chooses ``value``
    max: Count | None = None  #: a bound for a tool that chooses ``value``

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        _check_bounds("value", self.value, self.min, self.max)
        return self


class BatchPolicy(EnginePolicy):
    """How many items are fetched at once."""

    size: Count = 1  #: items in one fetch, at most
    min_size: Count = 1  #: a bound for a tool that chooses ``size``
    max_size: Count | None = None  #: a bound for a tool that chooses ``size``
    interval: Seconds = 0.0  #: reserved by the specification; nothing reads it
    acknowledge_together: bool = False  #: whether the engine acknowledges the items of a batch in one call at its end

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        _check_bounds("size", self.size, self.min_size, self.max_size)
        return self


class EmptyQueuePolicy(EnginePolicy):
    """Pauses of a streaming loop after empty fetches. They grow until a fetch brings items."""

    backoff: Seconds = 1.0  #: seconds after the first empty fetch
    backoff_multiplier: Multiplier = 2.0  #: factor from one pause to the next
    backoff_cap: Seconds = 30.0  #: the longest pause; 0 means no cap
    interval: Seconds = 0.0  #: reserved by the specification; nothing reads it

    def pause(self, index: int) -> float:
        """Return the seconds to wait after empty fetch ``index`` in a row, counted from 0."""
        return delay(self.backoff, self.backoff_multiplier, self.backoff_cap, index)


class FetchPolicy(EnginePolicy):
    """How items are fetched."""

    retry: RetryPolicy = RetryPolicy()
    #: further arguments for the source; never printed
    extra: Arguments = Field(default={}, validate_default=True, repr=False)


class ProcessPolicy(EnginePolicy):
    """How items are processed."""

    retry: RetryPolicy = RetryPolicy()


class SuccessPolicy(EnginePolicy):
    """How the success handler is called."""

    retry: RetryPolicy = RetryPolicy()


class ExceptionPolicy(EnginePolicy):
    """How the exception handler is called."""

    retry: RetryPolicy = RetryPolicy()


class ConsumerSteps(EnginePolicy):
    """The four steps, each with its own attempts."""

    fetch: FetchPolicy = FetchPolicy()
    process: ProcessPolicy = ProcessPolicy()
    success: SuccessPolicy = SuccessPolicy()
    exception: ExceptionPolicy = ExceptionPolicy()


class ConsumerLoopPolicy(EnginePolicy):
    """When the loop fetches, how many items it processes at once, and when it ends."""

    batch: BatchPolicy = BatchPolicy()
    concurrency: ConcurrencyPolicy = ConcurrencyPolicy()
    timeout: Timeout | None = None  #: seconds for the whole loop
    limit: Annotated[int, _Number, Field(ge=0)] | None = None  #: items fetched before the loop ends; 0 fetches none
    transaction_timeout: Timeout | None = None  #: seconds for one item, from the moment a worker starts on it
    streaming: bool = False  #: whether the loop continues after an empty fetch
    continuous: bool = False  #: whether the next batch is fetched while items of the last one are in progress
    empty_queue: EmptyQueuePolicy = EmptyQueuePolicy()


class ConsumerPolicy(EnginePolicy):
    """The whole policy of a consumer."""

    name: str | None = None
    loop: ConsumerLoopPolicy = ConsumerLoopPolicy()
    steps: ConsumerSteps = ConsumerSteps()

    @classmethod
    def of(  # noqa: PLR0913 - settings by name
        cls,
        *,
        batch: int = 1,
        concurrency: int = 1,
        attempts: int = 1,
        timeout: float | None = None,
        backoff: float = 0.0,
        limit: int | None = None,
        streaming: bool = False,
        continuous: bool = False,
        acknowledge_together: bool = False,
    ) -> "ConsumerPolicy":
        """Build a policy from the settings that most tasks need.

        ``attempts`` and ``backoff`` are those of processing. ``timeout`` is that of an item, from its start to the end
        of its handlers.
        """
        retry = {"max_attempts": attempts, "backoff": backoff}
        if isinstance(backoff, int | float) and backoff:
            retry["backoff_cap"] = max(30.0, backoff)
        loop = {
            "batch": {"size": batch, "acknowledge_together": acknowledge_together},
            "concurrency": {"value": concurrency},
            "transaction_timeout": timeout,
            "limit": limit,
            "streaming": streaming,
            "continuous": continuous,
        }
        values = {"loop": loop, "steps": {"process": {"retry": retry}}}
        return build_policy(values, "The policy", _SHORT_NAMES)


PREFIX = "CONSUME_"
Origins = Mapping[tuple[str, ...], str]  #: path in the policy -> the variable or argument that set it
_SHORT_NAMES: Origins = {
    ("loop", "batch", "size"): "batch",
    ("loop", "batch", "acknowledge_together"): "acknowledge_together",
    ("loop", "concurrency", "value"): "concurrency",
    ("loop", "transaction_timeout"): "timeout",
    ("loop", "limit"): "limit",
    ("loop", "streaming"): "streaming",
    ("loop", "continuous"): "continuous",
    ("steps", "process", "retry", "max_attempts"): "attempts",
    ("steps", "process", "retry", "backoff"): "backoff",
}

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
    return build_policy(_merge(values, from_environ(environ)), where, _origins(environ))


def build_policy(
    values: Mapping[str, Any], where: str = "The policy", origins: Origins | None = None
) -> ConsumerPolicy:
    """Return a checked policy, or raise all its problems with the variables that set them."""
    try:
        return ConsumerPolicy.model_validate(values)
    except ValidationError as error:
        found = [(_variable_at(each["loc"], origins or {}), each) for each in error.errors()]
        if origins is not _SHORT_NAMES and all(name for name, _ in found):
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
