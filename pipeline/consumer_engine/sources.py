"""Where items come from: the specification's connector. Any object with these methods will do.

The engine asks for at most as many items as it will work on. What it has been given it works on, also
when that was more than it asked for.

The ``*args`` below are never given; they let a type checker accept sources that name their further
arguments, or have none.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from pipeline.consumer_engine.policies import ConsumerPolicy
from pipeline.consumer_engine.transactions import Transaction


class Source(Protocol):
    """Gives out items to a consumer that works with threads."""

    def fetch_transactions(self, batch_size: int, /, *args: Any, **extra: Any) -> Sequence[Transaction]:
        """At most so many items; none when there is nothing now. ``extra`` comes from the fetch policy."""
        ...


class AsyncSource(Protocol):
    """Gives out items to a consumer that works with asyncio."""

    async def fetch_transactions_async(self, batch_size: int, /, *args: Any, **extra: Any) -> Sequence[Transaction]:
        """At most so many items; none when there is nothing now. ``extra`` comes from the fetch policy."""
        ...


@runtime_checkable
class AcknowledgingSource(Protocol):
    """A source that gives an item out again until it hears that it is done. May be async where its consumer is.

    The success handler that comes with a consumer acknowledges, to the source that gave the item out.
    """

    def ack_transaction(self, transaction: Transaction, /) -> Any:
        """It is done: do not give it out again."""
        ...


@runtime_checkable
class PolicyCheckingSource(Protocol):
    """A source that cannot be consumed with every policy, such as one that gives out again what took too long."""

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        """Raise ``InvalidInputError`` where it cannot. Called before a loop fetches, with the policy it runs with."""
        ...
