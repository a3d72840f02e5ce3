"""A source is asked whether it can be consumed with the policy of the loop, not only with the one it was made with."""

import asyncio
from typing import Any

import pytest

from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.policies import (
    BatchPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    FetchPolicy,
    RetryPolicy,
)
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.engine_source import AsyncStreamSource, StreamSource
from tests.ingest.redis_streams import Place


def a_policy(*, size: int = 1, limit: float | None = 60, fetch: float | None = None) -> ConsumerPolicy:
    """One item may take two minutes: a time that no honest work meets."""
    return ConsumerPolicy(
        loop=ConsumerLoopPolicy(batch=BatchPolicy(size=size), transaction_timeout=limit),
        steps=ConsumerSteps(
            fetch=FetchPolicy(retry=RetryPolicy(timeout=fetch)),
        ),
    )


OWN = a_policy()


class Task(ConsumerMixin):
    """With threads."""

    def process_transaction(self, transaction: Transaction) -> None:
        """Nothing to do."""


class AsyncTask(AsyncConsumerMixin):
    """With asyncio."""

    async def process_transaction(self, transaction: Transaction) -> None:
        """Nothing to do."""


@pytest.fixture(params=["threads", "asyncio"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def consume(place: Place, variant: str, policy: ConsumerPolicy, *, made_for: ConsumerPolicy = OWN, **how: Any) -> int:
    """How many items were settled by a loop with this policy, over a source made for another."""
    queue = place.queue(variant, max_read_count=10, block_ms=200, claim_idle_ms=125_000)
    if variant == "threads":
        source = StreamSource(queue, made_for, **how)
        return Task().consume_transactions(source=source, policy=policy).processed
    other = AsyncStreamSource(queue, made_for, **how)
    return asyncio.run(AsyncTask().consume_transactions(source=other, policy=policy)).processed


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(a_policy(limit=61), "expected at least 127000", id="a longer life"),
        pytest.param(a_policy(size=2), "expected at least 245000", id="a bigger batch"),
        pytest.param(a_policy(limit=None), "does not bound the processing time", id="a life without end"),
        pytest.param(a_policy(fetch=0.1), "expected a longer timeout", id="a fetch given up before its read returns"),
    ],
)
@pytest.mark.parametrize("recovers", [False, True])
def test_a_loop_whose_policy_does_not_fit_its_stream_is_refused_before_anything_is_fetched(
    place: Place, variant: str, policy: ConsumerPolicy, expected: str, recovers: bool
) -> None:
    place.queue()
    place.add({"n": 1})
    with pytest.raises(InvalidInputError, match=expected):
        consume(place, variant, policy, recovers=recovers)
    assert not place.pending()


def test_a_loop_with_its_own_policy_or_a_shorter_processing_time_runs(place: Place, variant: str) -> None:
    place.queue()
    place.add({"n": 1})
    assert consume(place, variant, OWN) == 1
    place.add({"n": 2})
    assert consume(place, variant, a_policy(limit=30)) == 1


def test_a_source_without_a_bounded_policy_accepts_unbounded_loops(place: Place, variant: str) -> None:
    place.queue()
    place.add({"n": 1})
    assert consume(place, variant, a_policy(limit=None), made_for=a_policy(limit=None)) == 1


class Picky:
    """A custom source with its own check_policy."""

    def __init__(self) -> None:
        self.asked: list[ConsumerPolicy] = []

    def check_policy(self, policy: ConsumerPolicy, /) -> None:
        self.asked.append(policy)

    def fetch_transactions(self, batch_size: int, /) -> list[Transaction]:
        del batch_size
        return []

    async def fetch_transactions_async(self, batch_size: int, /) -> list[Transaction]:
        return self.fetch_transactions(batch_size)


class Later(Picky):
    """One whose condition would never be awaited."""

    async def check_policy(self, policy: ConsumerPolicy, /) -> None:  # type: ignore[override]
        """Never called."""


def loop(source: Picky, variant: str, policy: ConsumerPolicy) -> None:
    if variant == "threads":
        Task().consume_transactions(source=source, policy=policy)
    else:
        asyncio.run(AsyncTask().consume_transactions(source=source, policy=policy))


def test_a_custom_source_checks_the_policy_of_the_loop_once(variant: str) -> None:
    source = Picky()
    loop(source, variant, OWN)
    assert source.asked == [OWN]


def test_an_async_check_policy_is_refused(variant: str) -> None:
    with pytest.raises(InvalidInputError, match="expected a plain function"):
        loop(Later(), variant, OWN)
