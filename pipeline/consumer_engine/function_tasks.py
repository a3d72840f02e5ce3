"""A task of the consumer engine in one function: ``@consume(source, batch=100, attempts=5, timeout=60)``."""

import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, overload

from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError

Handler = TypeVar("Handler", bound=Callable[..., Any])
Process = Callable[[Transaction], Any]
AsyncProcess = Callable[[Transaction], Coroutine[Any, Any, Any]]


class _Function:
    """What a task in one function has beside its mixin: the function, its handlers, and a source that is built once."""

    source: Any
    process_transaction: Any
    handle_transaction_success: Any
    handle_transaction_exception: Any

    def __init__(self, function: Process, source: Any, policy: ConsumerPolicy) -> None:
        self.process_transaction, self.policy = function, policy
        self._building = threading.Lock()
        if isinstance(source, type) or (callable(source) and not _is_source(source)):
            self._build = source
        else:
            self.__dict__["source"] = source
        self.__doc__ = function.__doc__

    def __call__(self, transaction: Transaction) -> Any:
        """Call the function itself, without attempts and handlers."""
        return self.process_transaction(transaction)

    def __getattr__(self, name: str) -> Any:
        """Build the source at its first use."""
        if name != "source":
            raise AttributeError(f"{type(self).__name__!r} task has no attribute {name!r}")
        with self._building:
            if "source" not in self.__dict__:
                self.__dict__["source"] = self._built_source()
        return self.__dict__["source"]

    def _built_source(self) -> Any:
        try:
            return self._build()
        except AttributeError as error:  # as it is, Python would take it for a task without a source
            raise InvalidInputError(
                f"The source of {type(self).__name__} could not be built: {error}. Correct the function that builds it."
            ) from error

    def on_success(self, handler: Handler) -> Handler:
        """Use a function as the success handler: ``handler(transaction, result)``."""
        self.handle_transaction_success = handler
        return handler

    def on_exception(self, handler: Handler) -> Handler:
        """Use a function as the exception handler: ``handler(transaction, error)``."""
        self.handle_transaction_exception = handler
        return handler

    def acknowledge(self, transaction: Transaction) -> Any:
        """Acknowledge an item as the default success handler does; for a success handler of your own."""
        mixin: Any = AsyncConsumerMixin if isinstance(self, AsyncConsumerMixin) else ConsumerMixin
        return mixin.handle_transaction_success(self, transaction, None)


class FunctionTask(_Function, ConsumerMixin):
    """A plain function as a task with threads."""


class AsyncFunctionTask(_Function, AsyncConsumerMixin):
    """An ``async def`` function as a task with asyncio."""


class _Decorator:
    """Makes a task from a function."""

    def __init__(self, source: Any, policy: ConsumerPolicy) -> None:
        self._source, self._policy = source, policy

    @overload
    def __call__(self, function: AsyncProcess) -> AsyncFunctionTask: ...
    @overload
    def __call__(self, function: Process) -> FunctionTask: ...
    def __call__(self, function: Process) -> FunctionTask | AsyncFunctionTask:
        if not inspect.isroutine(function):
            raise InvalidInputError(
                f"@consume decorates something of type {type(function).__name__}; expected a function with one "
                "argument, the transaction. For more than a function write a class with ConsumerMixin."
            )
        kind = AsyncFunctionTask if inspect.iscoroutinefunction(function) else FunctionTask
        named: Any = type(
            function.__name__, (kind,), {"__module__": function.__module__}
        )  # its name is the metric label
        task: FunctionTask | AsyncFunctionTask = named(function, self._source, self._policy)
        return task


def consume(
    source: Any,
    *,
    batch: int = 1,
    concurrency: int = 1,
    attempts: int = 1,
    timeout: float | None = None,
    policy: ConsumerPolicy | None = None,
    **more: Any,
) -> _Decorator:
    """Make a task of the consumer engine from a function that does the work of one item.

    ``source`` is a source, or a function without arguments that builds one at the first use. The other arguments are
    those of `ConsumerPolicy.of`, or a whole ``policy`` takes their place. The task is a `ConsumerMixin`, or an
    `AsyncConsumerMixin` if the function is ``async def``.
    """
    if inspect.isfunction(source) and _takes_arguments(source):
        raise InvalidInputError(
            f"@consume was given the function {source.__qualname__}, which takes arguments; expected a source, or a "
            "function without arguments that builds one: @consume(source)."
        )
    short = {"batch": batch, "concurrency": concurrency, "attempts": attempts, "timeout": timeout, **more}
    if policy is None:
        return _Decorator(source, ConsumerPolicy.of(**short))
    unused = [name for name, value in short.items() if value != _DEFAULTS.get(name)]
    if unused:
        raise InvalidInputError(
            f"@consume got policy= and {', '.join(f'{name}=' for name in unused)}; expected one of the two, because a "
            "policy holds these settings."
        )
    return _Decorator(source, policy)


_DEFAULTS = {"batch": 1, "concurrency": 1, "attempts": 1, "timeout": None}


def _takes_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a function cannot be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    return False


def _is_source(source: Any) -> bool:
    return any(hasattr(source, name) for name in ("fetch_transactions", "fetch_transactions_async"))
