"""Check declarations. Each check returns the problem as text, or None."""

import ast
import inspect
import itertools
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypedDict, get_type_hints

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, PydanticUndefinedAnnotation, PydanticUserError

from pipeline.domain.policies import FailurePolicy, Retention, WakePolicy
from pipeline.domain.states import CONSUMER_TASKS, PhaseTask
from pipeline.domain.values import ConsumerOptions, HandlerOptions
from pipeline.domain.workflows import count_problem
from pipeline.transitions import payload_schemas

_LONGEST_PAUSE = timedelta(days=366)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_PHASE_ARGUMENTS = {task.method: 3 if task is PhaseTask.NEXT else 2 for task in CONSUMER_TASKS}
_HIGHEST_VERSION = 2**31 - 1  # of the column that stores it


class ConsumerKeywords(TypedDict, total=False):
    """The fields of ``ConsumerOptions`` for type checkers, and the name. A choice is given as text."""

    name: str
    renamed_from: str
    batch: int
    ordered: bool
    requires_approval: bool
    after_failed_mutation: str
    start_at: str
    failures: FailurePolicy
    wake: WakePolicy


class ProducerKeywords(TypedDict, total=False):
    """The fields of ``HandlerOptions`` for type checkers, and the name."""

    name: str
    renamed_from: str
    failures: FailurePolicy


def _keyword_types(options: type) -> dict[str, type]:
    """The type of each keyword that a declaration takes: that of the option, or text for a choice."""
    given = {name: str if issubclass(kind, StrEnum) else kind for name, kind in get_type_hints(options).items()}
    return {"name": str, **given}


CONSUMER_OPTIONS: Mapping[str, type] = _keyword_types(ConsumerOptions)
PRODUCER_OPTIONS: Mapping[str, type] = _keyword_types(HandlerOptions)
#: Options with a fixed set of values, and these values.
CHOICES: Mapping[str, type[StrEnum]] = {
    name: kind for name, kind in get_type_hints(ConsumerOptions).items() if issubclass(kind, StrEnum)
}


def workflow_problem(version: Any, concurrency: Any, retention: Any) -> str | None:
    """Check that the numbers of a workflow are numbers that the database can store."""
    given = {"version": version, "concurrency": concurrency, "retention": retention}
    wrong = option_problem(given, {"version": int, "concurrency": int, "retention": Retention})
    if wrong:
        return wrong
    if abs(version) > _HIGHEST_VERSION:
        return f"has version={version}; expected at most {_HIGHEST_VERSION}"
    return _named_count_problem("concurrency", concurrency)


def _named_count_problem(name: str, value: int) -> str | None:
    problem = count_problem(value)
    return f"has {name}={value}; {problem}" if problem else None


def schema_problem(name: str, schema: Any) -> str | None:
    """Check that the schema of a topic is a model with which services can check payloads."""
    if schema is None:
        return None
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return f"the schema of topic {name!r} is {schema!r}; expected a pydantic model"
    try:
        problem = payload_schemas.pattern_problem(payload_schemas.json_schema(schema))
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        return (
            f"the schema of topic {name!r}, {schema.__name__}, cannot be written as JSON Schema, with which services "
            f"check payloads before they publish: {error.message}"
        )
    return problem and (
        f"the schema of topic {name!r} has a pattern that Python's `re` does not know, {problem}; services "
        "check payloads with it before they publish: write it as both know it, or check it in a validator"
    )


def schedule_problem(every: timedelta | None, cron: str | None) -> str | None:
    """Check that a producer has exactly one valid schedule."""
    if (every is None) == (cron is None):
        return "a producer needs either every=timedelta(...) or cron='...', and not both"
    if every is not None and (not isinstance(every, timedelta) or not timedelta(0) < every <= _LONGEST_PAUSE):
        return f"every is {every!r}; expected a positive timedelta of at most {_LONGEST_PAUSE.days} days"
    if cron is not None:
        try:
            next(CronSim(cron, _EPOCH))
        except (CronSimError, TypeError, AttributeError) as error:
            return f"cron {cron!r} cannot be read: {error}"
        except StopIteration:
            return f"cron {cron!r} has no slot"
    return None


def option_problem(options: Mapping[str, Any], known: Mapping[str, type], *named: str) -> str | None:
    """Check that every option exists and has its type. ``named`` are the other options of the declaration."""
    for name, value in options.items():
        if name not in known:
            return f"has the unknown option {name!r}; known are: {', '.join(sorted([*known, *named]))}"
        if not isinstance(value, known[name]) or (known[name] is int and isinstance(value, bool)):
            return f"has {name}={value!r}; expected {known[name].__name__}"
    return None


def signature_problem(function: Callable[..., Any], count: int, name: str) -> str | None:
    """Check that the function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return f"{name} cannot be called with {count} arguments ({error})"
    return None


def consumer_problem(
    instance: Any, name: str, subscribes: Sequence[Any], options: dict[str, Any], overlap_reason: str | None
) -> str | None:
    """Check a consumer. ``overlap_reason`` says why its runs may end in another order, if they may."""
    merges = getattr(instance, "merge", None) is not None
    loses_state = overlap_reason is not None and not merges and _returns_state(instance)
    wrong = option_problem(options, CONSUMER_OPTIONS, "publishes", "subscribes")
    wrong = wrong or _named_count_problem("batch", options.get("batch", 1))
    problems = (
        (wrong, wrong),
        (not subscribes, "subscribes to nothing; expected at least one topic"),
        (
            loses_state,
            f"returns state and its workflow {overlap_reason}, which would lose updates; "
            'define merge(current, returned), or let it run one by one (concurrency=1 and on_uncertain="pause")',
        ),
    )
    first = next((f"consumer {name} {text}" for is_found, text in problems if is_found), None)
    calls = {**_PHASE_ARGUMENTS, "merge": 2} if merges else _PHASE_ARGUMENTS
    return first or next(
        (problem for phase in calls if (problem := _call_problem(instance, name, phase, calls[phase]))), None
    )


def _call_problem(instance: Any, name: str, phase: str, count: int) -> str | None:
    method = getattr(instance, phase, None)
    if method is None:
        return f"consumer {name} has no method {phase!r}; expected prepare, mutate and next"
    return signature_problem(method, count, f"{name}.{phase}")


def warn_after_request(function: Callable[..., Any], name: str) -> None:
    """Warn of statements after the request of the mutation: it is sent only after mutate has returned."""
    found = _tree(function)
    context = next(iter(inspect.signature(function).parameters), "ctx")
    line = next(_lines_after_request(found, context), None) if found else None
    if line is not None:
        warnings.warn(
            f"{name} has code after it requested its mutation (line {line} of it);"
            " it runs before the mutation is sent and cannot see its result. Move it to next.",
            stacklevel=4,
        )


def _lines_after_request(function: ast.AST, context: str) -> Iterator[int]:
    """Yield the lines after a statement that requests a mutation, except a return."""
    for node in ast.walk(function):
        for block in _blocks(node):
            for statement, later in itertools.pairwise(block):
                if _continues_after_request(statement, context) and not isinstance(later, ast.Return):
                    yield later.lineno


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a statement: of a branch, a loop, a ``with`` or a ``try`` with its handlers."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
    for handler in getattr(node, "handlers", ()):
        yield handler.body


def _continues_after_request(statement: ast.stmt, context: str) -> bool:
    """Return whether the next statement may run after this one made a request."""
    inside = (block for block in _blocks(statement) if not isinstance(block[-1:] and block[-1], ast.Return | ast.Raise))
    return _is_request(statement, context) or any(
        _continues_after_request(each, context) for block in inside for each in block
    )


def _is_request(statement: ast.stmt, context: str) -> bool:
    """Return whether a statement is or assigns a call of the form ctx.connector.operation(...)."""
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return False
    value = statement.value.value if isinstance(statement.value, ast.Await) else statement.value
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    inner = value.func.value
    return isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == context


def _returns_state(instance: Any) -> bool:
    """Return whether next is annotated to return a state; without an annotation its first run shows it."""
    annotated = inspect.signature(getattr(instance, "next", lambda: None)).return_annotation
    return annotated not in (inspect.Signature.empty, Any, "Any", None, "None")


def _tree(function: Callable[..., Any]) -> ast.AST | None:
    """Return the syntax tree of a function, if its source can be found and parsed alone."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)), None)
