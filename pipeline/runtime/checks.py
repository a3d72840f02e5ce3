"""What is wrong with a declaration, in words; None when nothing is."""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from cronsim import CronSim, CronSimError

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_PHASES = {"prepare": 2, "mutate": 2, "next": 3}
_OPTIONS = {
    "batch",
    "ordered",
    "requires_approval",
    "after_failed_mutation",
    "start_at",
    "failures",
    "wake",
}


def schedule_problem(every: timedelta | None, cron: str | None) -> str | None:
    """A producer has exactly one schedule, and one that makes sense."""
    if (every is None) == (cron is None):
        return "a producer needs either every=timedelta(...) or cron='...', and not both"
    if every is not None and every <= timedelta(0):
        return f"every is {every}; expected a positive timedelta"
    if cron is not None:
        try:
            CronSim(cron, _EPOCH)
        except CronSimError as error:
            return f"cron {cron!r} cannot be read: {error}"
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
    unknown = sorted(set(options) - _OPTIONS)
    loses_state = concurrency > 1 and not hasattr(instance, "merge") and _annotated_state(instance)
    problems = (
        (unknown, f"has the unknown option {unknown[:1]}; known are: {', '.join(sorted(_OPTIONS))}"),
        (not subscribes, "subscribes to nothing; expected at least one topic"),
        (options.get("batch", 1) < 1, f"has batch={options.get('batch')}; expected at least 1"),
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


def warn_after_request(instance: Any, name: str) -> None:
    """Warn of statements after the one that asks for the mutation: the host acts only when mutate has returned."""
    try:
        source = textwrap.dedent(inspect.getsource(type(instance).mutate))
    except (OSError, TypeError):
        return
    (function,) = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ][:1]
    body = function.body
    for number, statement in enumerate(body[:-1]):
        if _asks(statement, function.args.args[1].arg if len(function.args.args) > 1 else "ctx"):
            line = body[number + 1].lineno
            warnings.warn(
                f"{name}.mutate has code after it asked for its mutation (line {line} of the method);"
                " it runs before the mutation is sent and cannot see its result. Move it to next.",
                stacklevel=4,
            )
            return


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
    """Whether next says by its annotation that it returns something."""
    method = getattr(instance, "next", None)
    returned = inspect.signature(method).return_annotation if method else None
    return returned not in (inspect.Signature.empty, None, "None")
