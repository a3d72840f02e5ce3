"""Where items come from: the specification's connector. Any object with these methods will do.

The engine asks for at most as many items as it will work on. What it has been given it works on, also
when that was more than it asked for.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from pipeline.engine.transactions import Transaction


class Source(Protocol):
    """Gives out items to a consumer that works with threads."""

    def fetch_transactions(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """At most so many items; none when there is nothing now. ``extra`` comes from the fetch policy."""
        ...


class AsyncSource(Protocol):
    """Gives out items to a consumer that works with asyncio."""

    async def fetch_transactions_async(self, batch_size: int, /, **extra: Any) -> Sequence[Transaction]:
        """At most so many items; none when there is nothing now. ``extra`` comes from the fetch policy."""
        ...


@runtime_checkable
class Acknowledges(Protocol):
    """A source that gives an item out again until it hears that it is done. May be async where its consumer is.

    The success handler that comes with a consumer acknowledges; what to do with a failed item is for
    the task to say.
    """

    def ack_transaction(self, transaction: Transaction, /) -> Any:
        """It is done: do not give it out again."""
        ...

    def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> Any:
        """It is not done: give it out again, or set it aside."""
        ...
