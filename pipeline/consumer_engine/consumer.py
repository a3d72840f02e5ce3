"""The mixins that make a task a consumer: one with threads, one with asyncio. Both behave the same.

A task does the work of one item. The engine and its policy decide attempts, limits, concurrency and
telemetry. A task gets its clients and its source from outside.

The sources of items are the specification's connector, as protocols. The engine fetches at most as many items as it
will process. If a source gives more, the engine processes all of them. The ``*args`` of a fetch are never passed. They
let a type checker accept sources that name further arguments, or have none.
"""

import asyncio
import functools
import inspect
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, Protocol, runtime_checkable

from pipeline.consumer_engine.asyncio_driver import AsyncioDriver
from pipeline.consumer_engine.attempts import EngineContext, StepSpec, StopToken, current_attempt
from pipeline.consumer_engine.bounded import AbandonedCalls, InFlight
from pipeline.consumer_engine.errors import TransactionException
from pipeline.consumer_engine.items import ConsumerSetup, WorkItem
from pipeline.consumer_engine.lifecycle import ItemOutcome, LoopReport, Step
from pipeline.consumer_engine.loop import Loop
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.telemetry import PROCESS_WIDE, Telemetry
from pipeline.consumer_engine.threads import ThreadDriver
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError


class Source(Protocol):
    """A source for a consumer that works with threads."""

    def fetch_transactions(self, batch_size: int, /, *args: Any, **extra: Any) -> Sequence[Transaction]:
        """Return at most ``batch_size`` items, or none. ``extra`` comes from the fetch policy."""
        ...


class AsyncSource(Protocol):
    """A source for a consumer that works with asyncio."""

    async def fetch_transactions_async(self, batch_size: int, /, *args: Any, **extra: Any) -> Sequence[Transaction]:
        """Return at most ``batch_size`` items, or none. ``extra`` comes from the fetch policy."""
        ...


@runtime_checkable
class AcknowledgingSource(Protocol):
    """A source that gives an item out again until the item is acknowledged.

    The default success handler acknowledges the item at the source that gave it out. For an async
    consumer, the method may be async.
    """

    def ack_transaction(self, transaction: Transaction, /) -> Any:
        """Acknowledge an item: do not give it out again."""
        ...


@runtime_checkable
class BatchAcknowledgingSource(Protocol):
    """A source that acknowledges several items in one call, for ``loop.batch.acknowledge_together``."""

    def ack_transactions(self, transactions: Sequence[Transaction], /) -> Any:
        """Acknowledge the items. For an async consumer, the method may be async."""
        ...


@runtime_checkable
class PolicyCheckingSource(Protocol):
    """A source that refuses some policies, for example one that redelivers slow items."""

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        """Raise ``InvalidInputError`` for a policy that does not fit. Called before the first fetch."""
        ...


OnOutcome = Callable[[ItemOutcome], None]

_OTHER_FETCH = {  #: the fetch of the other variant, and the mixin that calls it
    "fetch_transactions": ("fetch_transactions_async", "AsyncConsumerMixin"),
    "fetch_transactions_async": ("fetch_transactions", "ConsumerMixin"),
}
_HOOK_ARGUMENTS = {
    "process_transaction": ("transaction",),
    "handle_transaction_success": ("transaction", "result"),
    "handle_transaction_exception": ("transaction", "error"),
}


class _ConsumerState:
    """State that a task keeps between loops: the stop request, ids in flight, abandoned calls."""

    def __init__(self) -> None:
        self.stop, self.in_flight, self.abandoned = StopToken(), InFlight(), AbandonedCalls()
        self.loop: Loop | None = None  #: the latest one


class _Consumer:
    """The common part of both variants."""

    policy: ConsumerPolicy = ConsumerPolicy()
    telemetry: ClassVar[Telemetry] = PROCESS_WIDE
    process_transaction: Callable[..., Any]
    handle_transaction_success: Callable[..., Any]
    handle_transaction_exception: Callable[..., Any]
    _fetch_method: ClassVar[str]

    def stop(self, *, now: bool = False) -> None:
        """Request the end of the loop, from any thread or signal handler.

        The loop fetches nothing more and settles the items that it has. With ``now``, it leaves those
        too. The request stays: make a new task to consume again.
        """
        self._state.stop.request(now=now)

    def stalled(self, seconds: float) -> str | None:
        """Return what of the latest loop runs for longer than so many seconds, a fetch or an item; else None.

        Any thread may call it, for example one that reports to a supervisor.
        """
        loop = self._state.loop
        return None if loop is None else loop.stalled(seconds)

    @property
    def _state(self) -> _ConsumerState:
        # A mixin has no __init__ to rely on; setdefault lets one of two threads win.
        state: _ConsumerState = self.__dict__.get("_engine_state") or self.__dict__.setdefault(
            "_engine_state", _ConsumerState()
        )
        return state

    def _loop_setup(self, source: Any, policy: ConsumerPolicy | None, on_outcome: OnOutcome | None) -> ConsumerSetup:
        """Check everything that a loop needs before anything is fetched."""
        policy, source = self._checked_policy(policy), self._checked_source(source)
        fetch = self._checked_fetch(source, policy.steps.fetch.extra)
        _require_policy_accepted(self, source, policy)
        self._require_hooks()
        _require_plain_listener(on_outcome)
        setup = self._setup(policy, fetch, source)
        if policy.loop.batch.acknowledge_together:
            setup.acknowledge = StepSpec(
                step="acknowledge", function=self._checked_acknowledge(source), retry=policy.steps.success.retry
            )
            setup.context.acknowledge = None
        is_default = getattr(self.handle_transaction_success, "__func__", None) in _DEFAULT_SUCCESS_HANDLERS
        setup.has_success_handler = not is_default or setup.context.acknowledge is not None
        return setup

    def _item_setup(self) -> ConsumerSetup:
        """Check everything that a single item needs."""
        setup = self._setup(self._checked_policy(None), _no_fetch, getattr(self, "source", None))
        self._require_hooks()
        return setup

    def _setup(self, policy: ConsumerPolicy, fetch: Callable[..., Any], source: Any = None) -> ConsumerSetup:
        calls = {
            Step.FETCH: fetch,
            Step.PROCESS: self.process_transaction,
            Step.SUCCESS: self.handle_transaction_success,
            Step.EXCEPTION: self.handle_transaction_exception,
        }
        observer, state = self.telemetry.observer(type(self).__name__), self._state
        context = EngineContext(observer=observer, stop=state.stop, source=source, abandoned=state.abandoned)
        context.acknowledge = _acknowledge_of(source)
        return ConsumerSetup.of(context, policy, state.in_flight, calls)

    def _acknowledge(self) -> Callable[[Transaction], Any] | None:
        """Return how to acknowledge the current item: at the source that gave it out, or else the task's own."""
        try:
            return current_attempt().acknowledge
        except LookupError:
            return _acknowledge_of(getattr(self, "source", None))

    def _loop(self, setup: ConsumerSetup, driver: ThreadDriver | AsyncioDriver, on_outcome: OnOutcome | None) -> Loop:
        timeout = setup.policy.loop.timeout
        ends_at = None if timeout is None else setup.context.clock() + timeout
        loop = Loop(setup=setup, ends_at=ends_at, post=driver.post, on_outcome=on_outcome or (lambda _: None))
        self._state.loop = loop
        return loop

    def _single_item(self, transaction: Transaction, setup: ConsumerSetup) -> WorkItem:
        """Take the id of an item that the caller passes in."""
        given: object = transaction
        if not isinstance(given, Transaction):
            raise InvalidInputError(
                f"{_type_name(self)} was called with an item that is of type {_type_name(given)}; expected a "
                "Transaction. Nothing was done."
            )
        if not setup.in_flight.take(transaction.transaction_id, lambda: None):
            raise InvalidInputError(
                f"Transaction {transaction.transaction_id!r} is being worked on by this {_type_name(self)}; expected "
                "one that is not. Wait for its outcome."
            )
        return WorkItem(transaction, setup.in_flight)

    def _checked_policy(self, policy: ConsumerPolicy | None) -> ConsumerPolicy:
        found: object = self.policy if policy is None else policy
        if not isinstance(found, ConsumerPolicy):
            raise InvalidInputError(
                f"The policy of {_type_name(self)} is of type {_type_name(found)}; expected a ConsumerPolicy. "
                "pipeline.consumer_engine.load_policy reads one from a file. Nothing was fetched."
            )
        return found

    def _checked_source(self, source: Any) -> Any:
        found = getattr(self, "source", None) if source is None else source  # a source may be false: one with __len__
        if found is None:
            raise InvalidInputError(
                f"{_type_name(self)} has no source; expected an attribute `source` that gives out items, or the "
                "argument source=. Nothing was fetched."
            )
        return found

    def _checked_fetch(self, source: Any, extra: Mapping[str, Any]) -> Callable[..., Any]:
        method = self._fetch_method
        fetch = getattr(source, method, None)
        if not callable(fetch):
            other, mixin = _OTHER_FETCH[method]
            hint = f" It has {other}: let the task inherit {mixin}." if hasattr(source, other) else ""
            raise InvalidInputError(
                f"The source of {_type_name(self)} is of type {_type_name(source)}; expected an object with "
                f"{method}(batch_size).{hint} Nothing was fetched."
            )
        found: Callable[..., Any] = fetch
        problem = _signature_problem(found, 1, **extra)
        if problem is not None:
            raise InvalidInputError(
                f"{_function_name(found)} cannot be called with the arguments in steps.fetch.extra of "
                f"{_type_name(self)}: {problem}. Expected the names of its arguments after the first. "
                "Nothing was fetched."
            )
        return found

    def _checked_acknowledge(self, source: Any) -> Callable[..., Any]:
        if not isinstance(source, BatchAcknowledgingSource):
            raise InvalidInputError(
                f"The source of {_type_name(self)} is of type {_type_name(source)} and has no "
                "ack_transactions(transactions), which loop.batch.acknowledge_together calls; expected that method, or "
                "a policy without acknowledge_together. Nothing was fetched."
            )
        return source.ack_transactions

    def _require_hooks(self) -> None:
        """Refuse a task whose hooks are missing, misspelt or have other arguments.

        Such a hook would fail every item. A wrong success handler would fail after the effect, each
        time that the source gives the item out.
        """
        unwritten = (ConsumerMixin.process_transaction, AsyncConsumerMixin.process_transaction)
        if getattr(self.process_transaction, "__func__", None) in unwritten:
            raise InvalidInputError(
                f"{_type_name(self)} has no process_transaction(transaction); expected the work on one item. "
                "Write it, or check its spelling. Nothing was fetched."
            )
        for name, arguments in _HOOK_ARGUMENTS.items():
            hook = getattr(self, name)
            problem = _signature_problem(hook, *arguments) if callable(hook) else f"it is of type {_type_name(hook)}"
            if _is_generator(hook):
                raise InvalidInputError(
                    f"{name} of {_type_name(self)} is a generator function: a call would run nothing of it, and the "
                    "item would count as done. Expected a function without yield. Nothing was fetched."
                )
            if problem is not None:
                raise InvalidInputError(
                    f"{name} of {_type_name(self)} cannot be called with ({', '.join(arguments)}): {problem}. "
                    "Expected a function with these arguments. Nothing was fetched."
                )


class ConsumerMixin(_Consumer):
    """A consumer that works with threads.

    Its hooks may be ``async def`` too; each call then runs in an event loop of its own.
    """

    source: Source
    _fetch_method = "fetch_transactions"

    def process_transaction(self, transaction: Transaction) -> Any:
        """Do the work of one item and return its result."""
        raise NotImplementedError(f"{type(self).__name__} needs process_transaction(transaction)")

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        """Settle an item that was processed. By default, acknowledge it if its source wants that."""
        del result
        acknowledge = self._acknowledge()
        return None if acknowledge is None else acknowledge(transaction)

    def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> Any:
        """Settle an item that failed. By default, do nothing: the source may give it out again."""

    def consume_transactions(
        self,
        *,
        source: Source | None = None,
        policy: ConsumerPolicy | None = None,
        on_outcome: OnOutcome | None = None,
    ) -> LoopReport:
        """Fetch and process items until the loop ends, and return its report.

        The loop ends when nothing is left, at the limit, or on a stop request. It raises
        ``FetchException`` when the source fails, and ``ConsumerLoopTimeoutException`` when its time is
        up. ``on_outcome`` is called with every outcome, in the calling thread.
        """
        setup = self._loop_setup(source, policy, on_outcome)
        _require_no_event_loop(self, [setup.steps[Step.FETCH].function])
        driver = ThreadDriver(setup)
        return driver.run(self._loop(setup, driver, on_outcome))

    def start_processing(self, transaction: Transaction) -> ItemOutcome:
        """Process one item that was not fetched, in this thread, by the task's policy."""
        setup = self._item_setup()
        hooks = [spec.function for step, spec in setup.steps.items() if step is not Step.FETCH]
        _require_no_event_loop(self, hooks)
        return ThreadDriver(setup).run_item(self._single_item(transaction, setup))


class AsyncConsumerMixin(_Consumer):
    """A consumer that works with asyncio. Every function that the engine calls must be ``async def``."""

    source: AsyncSource
    _fetch_method = "fetch_transactions_async"

    async def process_transaction(self, transaction: Transaction) -> Any:
        """Do the work of one item and return its result."""
        raise NotImplementedError(f"{type(self).__name__} needs process_transaction(transaction)")

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> Any:
        """Settle an item that was processed. By default, acknowledge it if its source wants that."""
        del result
        acknowledge = self._acknowledge()
        return None if acknowledge is None else await _awaited(acknowledge, transaction)

    async def handle_transaction_exception(self, transaction: Transaction, error: TransactionException) -> Any:
        """Settle an item that failed. By default, do nothing: the source may give it out again."""

    async def consume_transactions(
        self,
        *,
        source: AsyncSource | None = None,
        policy: ConsumerPolicy | None = None,
        on_outcome: OnOutcome | None = None,
    ) -> LoopReport:
        """Fetch and process items until the loop ends, and return its report.

        The loop ends when nothing is left, at the limit, or on a stop request. It raises
        ``FetchException`` when the source fails, and ``ConsumerLoopTimeoutException`` when its time is
        up. ``on_outcome`` is called with every outcome, in the event loop.
        """
        setup = self._loop_setup(source, policy, on_outcome)
        _require_async(self, [spec.function for spec in setup.steps.values()])
        if setup.acknowledge is not None:
            setup.acknowledge.function = functools.partial(_awaited, setup.acknowledge.function)
        driver = AsyncioDriver(setup)
        return await driver.run(self._loop(setup, driver, on_outcome))

    async def start_processing(self, transaction: Transaction) -> ItemOutcome:
        """Process one item that was not fetched, in this asyncio task, by the consumer's policy."""
        setup = self._item_setup()
        _require_async(self, [spec.function for spec in setup.steps.values()])
        return await AsyncioDriver(setup).run_item(self._single_item(transaction, setup))


_DEFAULT_SUCCESS_HANDLERS = (
    ConsumerMixin.handle_transaction_success,
    AsyncConsumerMixin.handle_transaction_success,
)


def _acknowledge_of(source: Any) -> Callable[[Transaction], Any] | None:
    return source.ack_transaction if isinstance(source, AcknowledgingSource) else None


async def _awaited(function: Callable[..., Any], *args: Any) -> Any:
    """Return the value of a function, awaited if needed."""
    answer = function(*args)
    return await answer if inspect.isawaitable(answer) else answer


async def _no_fetch(*_: Any, **__: Any) -> Any:
    """Stand in for the fetch of a single item, which is never called."""


class Stoppable(Protocol):
    """An object whose work can be ended from outside."""

    def stop(self, *, now: bool = False) -> None:
        """End after the work in hand, or now."""
        ...


@contextmanager
def stopped_by_signals(task: Stoppable) -> Iterator[None]:
    """Let SIGTERM and SIGINT stop the task while the context is open.

    The first signal stops it after the work in hand, the second one now. To be used in the main
    thread, which alone can set handlers. The handlers of before are restored.
    """
    received = 0

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        task.stop(now=received > 1)

    before: dict[int, Any] = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _require_policy_accepted(task: object, source: Any, policy: ConsumerPolicy) -> None:
    """Let the source check the policy that the loop runs with."""
    if not isinstance(source, PolicyCheckingSource):
        return
    if _is_async(source.check_policy):
        raise InvalidInputError(
            f"{_function_name(source.check_policy)}, which {_type_name(task)} calls, is async and would never be "
            "awaited; expected a plain function. Nothing was fetched."
        )
    source.check_policy(policy)


def _require_plain_listener(on_outcome: Callable[..., Any] | None) -> None:
    if on_outcome is not None and _is_async(on_outcome):
        raise InvalidInputError(
            f"on_outcome is {_function_name(on_outcome)}, which is async and would never be awaited; expected a "
            "plain function. Nothing was fetched."
        )


def _require_async(task: object, functions: Iterable[Callable[..., Any]]) -> None:
    """Refuse plain functions: they would block the event loop, and no timeout could end them."""
    for function in functions:
        if not _is_async(function):
            raise InvalidInputError(
                f"{_function_name(function)}, which {_type_name(task)} calls, is not async; expected `async def`, "
                "because it would block the event loop. Use ConsumerMixin for code that blocks. Nothing was fetched."
            )


def _require_no_event_loop(task: object, functions: Iterable[Callable[..., Any]]) -> None:
    """Refuse async functions in a thread that runs an event loop: each call needs its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    for function in functions:
        if _is_async(function):
            raise InvalidInputError(
                f"{_function_name(function)}, which {_type_name(task)} calls, is async, and {_type_name(task)} was "
                "started in a running event loop; expected an AsyncConsumerMixin there, or a thread of its own. "
                "Nothing was fetched."
            )


def _is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call gives an awaitable. A function that it wraps does not count."""
    plain = _unwrap_partial(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def _is_generator(function: Callable[..., Any]) -> bool:
    plain = _unwrap_partial(function)
    return inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)


def _function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function without its bound arguments: they may be secret."""
    plain = _unwrap_partial(function)
    return str(getattr(plain, "__qualname__", None) or _type_name(plain))


def _unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _signature_problem(function: Callable[..., Any], /, *args: Any, **extra: Any) -> str | None:
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some callables have no signature
        return None
    try:
        signature.bind(*args, **extra)
    except TypeError as error:
        return str(error)
    return None


def _type_name(value: object) -> str:
    return type(value).__name__
