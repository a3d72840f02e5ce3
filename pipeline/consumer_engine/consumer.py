"""What a task inherits to become a consumer: with threads, or with asyncio. Both behave the same.

A task says what to do with one item. How often, how long, how many at once and what is seen of it is
for the engine and its policy. A task does no I/O of its own making: what it needs is handed to it.
"""

import asyncio
import functools
import inspect
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, Protocol

from pipeline.consumer_engine.asyncio_driver import AsyncioDriver
from pipeline.consumer_engine.attempts import EngineContext, StopToken, current_attempt
from pipeline.consumer_engine.bounded import AbandonedCalls, InFlight
from pipeline.consumer_engine.errors import TransactionException
from pipeline.consumer_engine.items import ConsumerSetup, WorkItem
from pipeline.consumer_engine.lifecycle import ItemOutcome, LoopReport, Step
from pipeline.consumer_engine.loop import Loop
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.sources import AcknowledgingSource, AsyncSource, PolicyCheckingSource, Source
from pipeline.consumer_engine.telemetry import PROCESS_WIDE, Telemetry
from pipeline.consumer_engine.threads import ThreadDriver
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError

OnOutcome = Callable[[ItemOutcome], None]


class _ConsumerState:
    """What a task remembers between loops: who was asked to end, and which ids code that was left behind holds."""

    def __init__(self) -> None:
        self.stop, self.in_flight, self.abandoned = StopToken(), InFlight(), AbandonedCalls()


class _Consumer:
    """What both variants have in common."""

    policy: ConsumerPolicy = ConsumerPolicy()
    telemetry: ClassVar[Telemetry] = PROCESS_WIDE
    process_transaction: Callable[..., Any]
    handle_transaction_success: Callable[..., Any]
    handle_transaction_exception: Callable[..., Any]

    def stop(self, *, now: bool = False) -> None:
        """Ask to end, from any thread or a signal handler: fetch nothing more and settle what was fetched.

        With ``now``, leave what was fetched too. A task that was asked stays so; make a new one to go on.
        """
        self._state.stop.request(now=now)

    @property
    def _state(self) -> _ConsumerState:
        # A mixin has no __init__ to rely on; setdefault lets one of two threads win.
        state: _ConsumerState = self.__dict__.get("_engine_state") or self.__dict__.setdefault(
            "_engine_state", _ConsumerState()
        )
        return state

    def _setup(self, policy: ConsumerPolicy, fetch: Callable[..., Any], source: Any = None) -> ConsumerSetup:
        calls = {
            Step.FETCH: fetch,
            Step.PROCESS: self.process_transaction,
            Step.SUCCESS: self.handle_transaction_success,
            Step.EXCEPTION: self.handle_transaction_exception,
        }
        observer, state = self.telemetry.observer(type(self).__name__), self._state
        host = EngineContext(observer=observer, stop=state.stop, source=source, abandoned=state.abandoned)
        return ConsumerSetup.of(host, policy, state.in_flight, calls)

    def _item_source(self) -> Any:
        """Who gave out the item that is being worked on; the task's own source where nobody did."""
        try:
            return current_attempt().source
        except LookupError:
            return getattr(self, "source", None)

    def _loop(self, hooks: ConsumerSetup, driver: ThreadDriver | AsyncioDriver, on_outcome: OnOutcome | None) -> Loop:
        timeout = hooks.policy.loop.timeout
        ends_at = None if timeout is None else hooks.context.clock() + timeout
        return Loop(setup=hooks, ends_at=ends_at, post=driver.post, on_outcome=on_outcome or (lambda _: None))

    def _single_item(self, transaction: Transaction, hooks: ConsumerSetup) -> WorkItem:
        """One item, handed in rather than fetched."""
        require_item(self, transaction)
        if not hooks.in_flight.take(transaction.transaction_id, lambda: None):
            words = f"Transaction {transaction.transaction_id!r} is being worked on by this {type(self).__name__}"
            raise InvalidInputError(f"{words}; expected one that is not. Wait for its outcome.")
        return WorkItem(transaction, hooks.in_flight)

    def _single_setup(self) -> ConsumerSetup:
        return self._setup(policy_of(self, None), _no_fetch, getattr(self, "source", None))


class ConsumerMixin(_Consumer):
    """A consumer that works with threads. Its hooks may be ``async def`` too; each call then has a loop of its own."""

    source: Source

    def process_transaction(self, transaction: Transaction) -> Any:
        """Do the work of one item and return what came of it."""
        raise NotImplementedError(f"{type(self).__name__} needs process_transaction(transaction)")

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        """Settle an item that was processed: by default, acknowledge it where the source wants that."""
        del result
        source = self._item_source()
        return source.ack_transaction(transaction) if isinstance(source, AcknowledgingSource) else None

    def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> Any:
        """Settle an item that failed: by default do nothing, so that the source gives it out again if it does that."""

    def consume_transactions(
        self,
        *,
        source: Source | None = None,
        policy: ConsumerPolicy | None = None,
        on_outcome: OnOutcome | None = None,
    ) -> LoopReport:
        """Fetch and work until nothing is left, the limit is reached or somebody asks to end; then say how it went.

        Raises ``FetchException`` when nothing can be fetched, and ``ConsumerLoopTimeoutException`` when
        the loop's time is up. ``on_outcome`` is told of every item, in the calling thread.
        """
        chosen, given = policy_of(self, policy), source_of(self, source)
        fetch = fetch_of(self, given, "fetch_transactions", chosen.steps.fetch.extra)
        require_policy_accepted(self, given, chosen)
        require_hooks(self, ConsumerMixin.process_transaction)
        require_plain_listener(on_outcome)
        require_no_event_loop(self, [fetch])
        hooks = self._setup(chosen, fetch, given)
        driver = ThreadDriver(hooks)
        return driver.run(self._loop(hooks, driver, on_outcome))

    def start_processing(self, transaction: Transaction) -> ItemOutcome:
        """Work on one item that was not fetched, in this thread, by the policy of the task."""
        hooks = self._single_setup()
        require_hooks(self, ConsumerMixin.process_transaction)
        require_no_event_loop(self, [work.function for step, work in hooks.steps.items() if step is not Step.FETCH])
        return ThreadDriver(hooks).run_item(self._single_item(transaction, hooks))


class AsyncConsumerMixin(_Consumer):
    """A consumer that works with asyncio. Everything the engine calls must be ``async def``."""

    source: AsyncSource

    async def process_transaction(self, transaction: Transaction) -> Any:
        """Do the work of one item and return what came of it."""
        raise NotImplementedError(f"{type(self).__name__} needs process_transaction(transaction)")

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        """Settle an item that was processed: by default, acknowledge it where the source wants that."""
        del result
        source = self._item_source()
        if isinstance(source, AcknowledgingSource):
            answer = source.ack_transaction(transaction)
            return await answer if inspect.isawaitable(answer) else answer
        return None

    async def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> Any:
        """Settle an item that failed: by default do nothing, so that the source gives it out again if it does that."""

    async def consume_transactions(
        self,
        *,
        source: AsyncSource | None = None,
        policy: ConsumerPolicy | None = None,
        on_outcome: OnOutcome | None = None,
    ) -> LoopReport:
        """Fetch and work until nothing is left, the limit is reached or somebody asks to end; then say how it went.

        Raises ``FetchException`` when nothing can be fetched, and ``ConsumerLoopTimeoutException`` when
        the loop's time is up. ``on_outcome`` is told of every item, in the event loop.
        """
        chosen, given = policy_of(self, policy), source_of(self, source)
        fetch = fetch_of(self, given, "fetch_transactions_async", chosen.steps.fetch.extra)
        require_policy_accepted(self, given, chosen)
        require_hooks(self, AsyncConsumerMixin.process_transaction)
        require_plain_listener(on_outcome)
        hooks = self._setup(chosen, fetch, given)
        require_async(self, [work.function for work in hooks.steps.values()])
        driver = AsyncioDriver(hooks)
        return await driver.run(self._loop(hooks, driver, on_outcome))

    async def start_processing(self, transaction: Transaction) -> ItemOutcome:
        """Work on one item that was not fetched, in this task, by the policy of the task."""
        hooks = self._single_setup()
        require_hooks(self, AsyncConsumerMixin.process_transaction)
        require_async(self, [work.function for work in hooks.steps.values()])
        return await AsyncioDriver(hooks).run_item(self._single_item(transaction, hooks))


async def _no_fetch(*_: Any, **__: Any) -> Any:
    """A single item is handed in."""


class Stoppable(Protocol):
    """Something that can be asked to end."""

    def stop(self, *, now: bool = False) -> None:
        """End, politely or now."""
        ...


@contextmanager
def stopped_by_signals(task: Stoppable) -> Iterator[None]:
    """While this is open, SIGTERM and SIGINT ask the task to end: politely the first time, then now.

    To be used in the main thread, which alone can set handlers. Those that were there come back.
    """
    asked = 0

    def heard(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        task.stop(now=asked > 1)

    before: dict[int, Any] = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        raise InvalidInputError(f"{words} pipeline.consumer_engine.load_policy reads from a file. Nothing was fetched.")
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
