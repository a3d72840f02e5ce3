"""What a task inherits to become a consumer: with threads, or with asyncio. Both behave the same.

A task says what to do with one item. How often, how long, how many at once and what is seen of it is
for the engine and its policy. A task does no I/O of its own making: what it needs is handed to it.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from pipeline.consumer_engine import checks
from pipeline.consumer_engine.asyncio_driver import AsyncioDriver
from pipeline.consumer_engine.attempts import EngineContext, current_attempt
from pipeline.consumer_engine.errors import TransactionException
from pipeline.consumer_engine.guard import AbandonedCalls, InFlight
from pipeline.consumer_engine.items import ConsumerSetup, WorkItem
from pipeline.consumer_engine.lifecycle import Step
from pipeline.consumer_engine.loop import Loop
from pipeline.consumer_engine.outcomes import ItemOutcome, LoopReport
from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.sources import AcknowledgingSource, AsyncSource, Source
from pipeline.consumer_engine.stops import StopToken
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
        checks.require_item(self, transaction)
        if not hooks.in_flight.take(transaction.transaction_id, lambda: None):
            words = f"Transaction {transaction.transaction_id!r} is being worked on by this {type(self).__name__}"
            raise InvalidInputError(f"{words}; expected one that is not. Wait for its outcome.")
        return WorkItem(transaction, hooks.in_flight)

    def _single_setup(self) -> ConsumerSetup:
        return self._setup(checks.policy_of(self, None), _no_fetch, getattr(self, "source", None))


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
        chosen, given = checks.policy_of(self, policy), checks.source_of(self, source)
        fetch = checks.fetch_of(self, given, "fetch_transactions", chosen.steps.fetch.extra)
        checks.require_policy_accepted(self, given, chosen)
        checks.require_hooks(self, ConsumerMixin.process_transaction)
        checks.require_plain_listener(on_outcome)
        checks.require_no_event_loop(self, [fetch])
        hooks = self._setup(chosen, fetch, given)
        driver = ThreadDriver(hooks)
        return driver.run(self._loop(hooks, driver, on_outcome))

    def start_processing(self, transaction: Transaction) -> ItemOutcome:
        """Work on one item that was not fetched, in this thread, by the policy of the task."""
        hooks = self._single_setup()
        checks.require_hooks(self, ConsumerMixin.process_transaction)
        checks.require_no_event_loop(
            self, [work.function for step, work in hooks.steps.items() if step is not Step.FETCH]
        )
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
        chosen, given = checks.policy_of(self, policy), checks.source_of(self, source)
        fetch = checks.fetch_of(self, given, "fetch_transactions_async", chosen.steps.fetch.extra)
        checks.require_policy_accepted(self, given, chosen)
        checks.require_hooks(self, AsyncConsumerMixin.process_transaction)
        checks.require_plain_listener(on_outcome)
        hooks = self._setup(chosen, fetch, given)
        checks.require_async(self, [work.function for work in hooks.steps.values()])
        driver = AsyncioDriver(hooks)
        return await driver.run(self._loop(hooks, driver, on_outcome))

    async def start_processing(self, transaction: Transaction) -> ItemOutcome:
        """Work on one item that was not fetched, in this task, by the policy of the task."""
        hooks = self._single_setup()
        checks.require_hooks(self, AsyncConsumerMixin.process_transaction)
        checks.require_async(self, [work.function for work in hooks.steps.values()])
        return await AsyncioDriver(hooks).run_item(self._single_item(transaction, hooks))


async def _no_fetch(*_: Any, **__: Any) -> Any:
    """A single item is handed in."""
