"""The sources of items: the specification's connector, as protocols.

The engine fetches at most as many items as it will process. If a source gives more, the engine
processes all of them. The ``*args`` below are never passed. They let a type checker accept sources
that name further arguments, or have none.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.transactions import Transaction


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
class PolicyCheckingSource(Protocol):
    """A source that refuses some policies, for example one that redelivers slow items."""

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        """Raise ``InvalidInputError`` for a policy that does not fit. Called before the first fetch."""
        ...
