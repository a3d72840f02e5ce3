"""What must be right about a task before anything is fetched. What is wrong is said in one sentence."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.sources import PolicyCheckingSource
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError

_FETCHES = {
    "fetch_transactions": ("fetch_transactions_async", "AsyncConsumerMixin"),
    "fetch_transactions_async": ("fetch_transactions", "ConsumerMixin"),
}
_HOOKS = {  #: what the engine calls each of them with
    "process_transaction": ("transaction",),
    "handle_transaction_success": ("transaction", "result"),
    "handle_transaction_exception": ("transaction", "error"),
}


def policy_of(task: Any, policy: ConsumerPolicy | None) -> ConsumerPolicy:
    """The policy that was given, or the task's own: checked fields, not a table of them."""
    found: object = task.policy if policy is None else policy
    if not isinstance(found, ConsumerPolicy):
        words = f"The policy of {_type_name(task)} is of type {_type_name(found)}; expected a ConsumerPolicy, which"
        raise InvalidInputError(
            f"{words} pipeline.consumer_engine.policy_files.build makes of a table. Nothing was fetched."
        )
    return found


def require_item(task: object, given: object) -> None:
    """A single item is handed in by somebody, who may have only its payload."""
    if not isinstance(given, Transaction):
        words = f"What {_type_name(task)} was given to process is of type {_type_name(given)}"
        raise InvalidInputError(f"{words}; expected a Transaction. Nothing was done.")


def source_of(task: object, source: Any) -> Any:
    """The source that was given, or the task's own. One that counts nothing, and so is false, is one too."""
    found = getattr(task, "source", None) if source is None else source
    if found is None:
        words = (
            f"{_type_name(task)} has no source; expected an attribute `source` that gives out items, or the argument"
        )
        raise InvalidInputError(f"{words} source=. Nothing was fetched.")
    return found


def fetch_of(task: object, source: Any, method: str, extra: Mapping[str, Any]) -> Callable[..., Any]:
    """How the source is asked, if it can be asked with these arguments."""
    fetch = getattr(source, method, None)
    if not callable(fetch):
        other, mixin = _FETCHES[method]
        words = (
            f"The source of {_type_name(task)} is of type {_type_name(source)}; expected an object with "
            f"{method}(batch_size)."
        )
        hint = f" It has {other}: let the task inherit {mixin}." if hasattr(source, other) else ""
        raise InvalidInputError(f"{words}{hint} Nothing was fetched.")
    found: Callable[..., Any] = fetch
    problem = _signature_problem(found, 1, **extra)
    if problem is not None:
        words = (
            f"{function_name(found)} cannot be called with what steps.fetch.extra of {_type_name(task)} "
            f"names: {problem}."
        )
        raise InvalidInputError(f"{words} Expected the names of its arguments after the first. Nothing was fetched.")
    return found


def require_policy_accepted(task: object, source: Any, policy: ConsumerPolicy) -> None:
    """A source may have conditions for a policy: it hears the one that the loop runs with, whoever it came from."""
    if not isinstance(source, PolicyCheckingSource):
        return
    if is_async(source.check_policy):
        words = (
            f"{function_name(source.check_policy)}, which {_type_name(task)} calls, is async and would never be awaited"
        )
        raise InvalidInputError(f"{words}; expected a plain function. Nothing was fetched.")
    source.check_policy(policy)


def require_hooks(task: Any, unwritten: Callable[..., Any]) -> None:
    """A hook that is not there, has a slip in its name or cannot take what it is given would only fail every item of
    the source; where it is the one that acknowledges, after the effect, and every time the item is given out."""
    if getattr(task.process_transaction, "__func__", None) is unwritten:
        words = f"{_type_name(task)} has no process_transaction(transaction); expected what it does with one item."
        raise InvalidInputError(f"{words} Write it, and look at its spelling. Nothing was fetched.")
    for name, arguments in _HOOKS.items():
        hook = getattr(task, name)
        problem = _signature_problem(hook, *arguments) if callable(hook) else f"it is of type {_type_name(hook)}"
        if problem is not None:
            words = f"{name} of {_type_name(task)} cannot be called with ({', '.join(arguments)}): {problem}."
            raise InvalidInputError(f"{words} Expected a function that takes these. Nothing was fetched.")


def require_plain_listener(on_outcome: Callable[..., Any] | None) -> None:
    """What is told of outcomes is called, not awaited."""
    if on_outcome is not None and is_async(on_outcome):
        words = f"on_outcome is {function_name(on_outcome)}, which is async and would never be awaited"
        raise InvalidInputError(f"{words}; expected a plain function. Nothing was fetched.")


def require_async(task: object, functions: Iterable[Callable[..., Any]]) -> None:
    """A plain function would hold up the event loop, and no timeout could end it."""
    for function in functions:
        if not is_async(function):
            raise InvalidInputError(
                f"{function_name(function)}, which {_type_name(task)} calls, is not async; expected `async "
                f"def`, because it would "
                "hold up the event loop. Use ConsumerMixin for code that blocks. Nothing was fetched."
            )


def require_no_event_loop(task: object, functions: Iterable[Callable[..., Any]]) -> None:
    """Async code that is called in this thread needs an event loop of its own, and there is one already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    for function in functions:
        if is_async(function):
            raise InvalidInputError(
                f"{function_name(function)}, which {_type_name(task)} calls, is async, and "
                f"{_type_name(task)} was started in a running "
                "event loop; expected an AsyncConsumerMixin there, or a thread of its own. Nothing was fetched."
            )


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: what it wraps does not matter, it may block itself."""
    plain = _unwrap_partial(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function, without the arguments that are bound to it: those may be secret."""
    plain = _unwrap_partial(function)
    return str(getattr(plain, "__qualname__", None) or _type_name(plain))


def _unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _signature_problem(function: Callable[..., Any], /, *args: Any, **extra: Any) -> str | None:
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # not everything can tell
        return None
    try:
        signature.bind(*args, **extra)
    except TypeError as error:
        return str(error)
    return None


def _type_name(value: object) -> str:
    return type(value).__name__
