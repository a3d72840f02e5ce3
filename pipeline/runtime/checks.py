"""What is wrong with a declaration, in words; None when nothing is."""

import ast
import inspect
import itertools
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cronsim import CronSim, CronSimError

from pipeline.domain.policies import FailurePolicy, WakePolicy

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_PHASES = {"prepare": 2, "mutate": 2, "next": 3}
#: What a declaration may say besides its topics, and of which type that is.
CONSUMER_OPTIONS: Mapping[str, type] = {
    "batch": int,
    "ordered": bool,
    "requires_approval": bool,
    "after_failed_mutation": str,
    "start_at": str,
    "failures": FailurePolicy,
    "wake": WakePolicy,
}
PRODUCER_OPTIONS: Mapping[str, type] = {"failures": FailurePolicy}


def schedule_problem(every: timedelta | None, cron: str | None) -> str | None:
    """A producer has exactly one schedule, and one that makes sense."""
    if (every is None) == (cron is None):
        return "a producer needs either every=timedelta(...) or cron='...', and not both"
    if every is not None and (not isinstance(every, timedelta) or every <= timedelta(0)):
        return f"every is {every!r}; expected a positive timedelta"
    if cron is not None:
        try:
            next(CronSim(cron, _EPOCH))
        except (CronSimError, TypeError, AttributeError) as error:
            return f"cron {cron!r} cannot be read: {error}"
        except StopIteration:
            return f"cron {cron!r} never comes"
    return None


def option_problem(options: Mapping[str, Any], known: Mapping[str, type]) -> str | None:
    """Every option exists and is of its type."""
    for name, value in options.items():
        if name not in known:
            return f"has the unknown option {name!r}; known are: {', '.join(sorted(known))}"
        if not isinstance(value, known[name]) or (known[name] is int and isinstance(value, bool)):
            return f"has {name}={value!r}; expected a {known[name].__name__}"
    return None


def signature_problem(function: Callable[..., Any], count: int, name: str) -> str | None:
    """The function can be called with the arguments the host will give it."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        return f"{name} cannot be called with {count} arguments ({error})"
    return None


def consumer_problem(
    instance: Any, name: str, subscribes: Sequence[Any], options: dict[str, Any], concurrency: int
) -> str | None:
    """The first thing wrong with a consumer."""
    loses_state = concurrency > 1 and not hasattr(instance, "merge") and _annotated_state(instance)
    wrong = option_problem(options, CONSUMER_OPTIONS)
    problems = (
        (wrong, wrong),
        (not subscribes, "subscribes to nothing; expected at least one topic"),
        (not wrong and options.get("batch", 1) < 1, f"has batch={options.get('batch')}; expected at least 1"),
        (
            loses_state,
            f"returns state and its workflow runs {concurrency} at once, which would lose updates; "
            "define merge(current, returned), or set concurrency=1",
        ),
    )
    first = next((f"consumer {name} {words}" for holds, words in problems if holds), None)
    return first or next((problem for phase in _PHASES if (problem := _phase_problem(instance, name, phase))), None)


def _phase_problem(instance: Any, name: str, phase: str) -> str | None:
    method = getattr(instance, phase, None)
    if method is None:
        return f"consumer {name} has no method {phase!r}; expected prepare, mutate and next"
    return signature_problem(method, _PHASES[phase], f"{name}.{phase}")


def warn_after_request(function: Callable[..., Any], name: str) -> None:
    """Warn of statements after the one that asks for the mutation: the host acts only when mutate has returned."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    found = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    context = next(iter(inspect.signature(function).parameters), "ctx")
    line = next(_lines_after_request(found, context), None) if found else None
    if line is not None:
        warnings.warn(
            f"{name} has code after it asked for its mutation (line {line} of it);"
            " it runs before the mutation is sent and cannot see its result. Move it to next.",
            stacklevel=4,
        )


def _lines_after_request(function: ast.AST, context: str) -> Iterator[int]:
    """Where a block goes on after a statement that asked, unless it only returns."""
    for node in ast.walk(function):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            statements = block if isinstance(block, list) else []
            for statement, later in itertools.pairwise(statements):
                if _asks(statement, context) and not isinstance(later, ast.Return):
                    yield later.lineno


def _asks(statement: ast.stmt, context: str) -> bool:
    """A call of the form ctx.connector.operation(...) as a statement or an assignment."""
    if not isinstance(statement, ast.Expr | ast.Assign):
        return False
    value = statement.value.value if isinstance(statement.value, ast.Await) else statement.value
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    inner = value.func.value
    return isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == context


def _annotated_state(instance: Any) -> bool:
    """Whether next says by its annotation that it returns something; ``Any`` says nothing."""
    method = getattr(instance, "next", None)
    returned = inspect.signature(method).return_annotation if method else None
    return returned not in (inspect.Signature.empty, None, "None", Any, "Any")
