"""A stream as a source of the consumer engine: its items, their settlement, and when an entry may be claimed."""

import asyncio
import inspect
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline.consumer_engine.attempts import Pause
from pipeline.consumer_engine.bounded import CallResult
from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.errors import FetchException
from pipeline.consumer_engine.items import WorkItem, run_item
from pipeline.consumer_engine.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    ExceptionPolicy,
    FetchPolicy,
    ProcessPolicy,
    RetryPolicy,
    SuccessPolicy,
)
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.engine_source import AsyncStreamSource, StreamSource, max_processing_time
from pipeline.ingest.errors import PoisonError
from pipeline.ingest.queue import RedisStreamsQueue
from tests.ingest.redis_streams import Place, in_thread
from tests.support.rule import rule
from tests.support.wait import wait_for


def a_policy(
    *,
    size: int = 10,
    value: int = 2,
    limit: float | None = None,
    process: RetryPolicy | None = None,
    success: RetryPolicy | None = None,
    exception: RetryPolicy | None = None,
    fetch: RetryPolicy | None = None,
    extra: dict[str, Any] | None = None,
    continuous: bool = False,
) -> ConsumerPolicy:
    return ConsumerPolicy(
        loop=ConsumerLoopPolicy(
            batch=BatchPolicy(size=size),
            concurrency=ConcurrencyPolicy(value=value),
            transaction_timeout=limit,
            continuous=continuous,
        ),
        steps=ConsumerSteps(
            fetch=FetchPolicy(retry=fetch or RetryPolicy(), extra=extra or {}),
            process=ProcessPolicy(retry=process or RetryPolicy()),
            success=SuccessPolicy(retry=success or RetryPolicy()),
            exception=ExceptionPolicy(retry=exception or RetryPolicy()),
        ),
    )


ONE_SECOND = RetryPolicy(timeout=1)
THRICE = RetryPolicy(max_attempts=3, timeout=1, backoff=2, backoff_multiplier=2)
BOUNDED = a_policy(limit=2, exception=ONE_SECOND)  # five rounds of two items, three seconds each
#: For tests that work on items: a limit that no honest work meets, and an idle time beyond what follows from it.
ROOMY = a_policy(limit=60)
AGES = 3_600_000  # milliseconds


def a_queue(place: Place, **options: Any) -> RedisStreamsQueue:
    """One that can bring the batches of the policies here."""
    return place.queue(max_read_count=10, **options)


class Work:
    """Remembers what it was given, and fails for items that say so."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def do(self, transaction: Transaction) -> None:
        self.seen.append(transaction.payload["n"])
        if transaction.payload.get("fails"):
            raise ValueError("no")


class Task(Work, ConsumerMixin):
    """With threads."""

    def process_transaction(self, transaction: Transaction) -> None:
        self.do(transaction)


class AsyncTask(Work, AsyncConsumerMixin):
    """With asyncio."""

    async def process_transaction(self, transaction: Transaction) -> None:
        self.do(transaction)


def consume(place: Place, variant: str, policy: ConsumerPolicy, **options: Any) -> Work:
    queue = place.queue(variant, max_read_count=10, block_ms=100, claim_idle_ms=AGES)
    if variant == "threads":
        task = Task()
        task.source = StreamSource(queue, policy, **options)
        task.consume_transactions(policy=policy)
        return task
    other = AsyncTask()
    other.source = AsyncStreamSource(queue, policy, **options)
    asyncio.run(other.consume_transactions(policy=policy))
    return other


@pytest.fixture(params=["threads", "asyncio"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_processed_item_is_acknowledged_and_a_failed_one_stays_pending(place: Place, variant: str) -> None:
    place.queue()
    entries = place.add(*({"n": n, "fails": n == 3} for n in range(25)))
    task = consume(place, variant, ROOMY)
    assert sorted(task.seen) == list(range(25))
    assert list(place.pending()) == [entries[3]]


@rule("Q-10", "Q-23")
@pytest.mark.parametrize("continuous", [False, True])
def test_a_batch_is_acknowledged_in_one_call_also_while_a_read_blocks(
    quiet: Place, variant: str, continuous: bool
) -> None:
    quiet.queue()
    entries = quiet.add(*({"n": n, "fails": n == 3} for n in range(10)))
    batch = BatchPolicy(size=10, acknowledge_together=True)
    loop = ConsumerLoopPolicy(
        batch=batch, concurrency=ConcurrencyPolicy(value=2), transaction_timeout=60, continuous=continuous
    )
    policy, before = ConsumerPolicy(loop=loop.model_copy(update={"streaming": True})), quiet.calls("xack")
    queue = quiet.queue(variant, max_read_count=10, block_ms=300 if not continuous else 60_000, claim_idle_ms=AGES)
    task: Any = Task() if variant == "threads" else AsyncTask()
    task.source = (StreamSource if variant == "threads" else AsyncStreamSource)(queue, policy)
    running = in_thread(lambda: run_task(task, policy))
    wait_for(lambda: list(quiet.pending()) == [entries[3]])
    if continuous:
        quiet.wait_until_blocked()  # the next read waits for new entries all the while
    task.stop()
    quiet.add({"n": 10})
    running.outcome()
    assert quiet.calls("xack")["xack"] - before["xack"] == (2 if 10 in task.seen else 1)
    assert list(quiet.pending()) == [entries[3]]


def run_task(task: Any, policy: ConsumerPolicy) -> Any:
    answer: Any = task.consume_transactions(policy=policy)
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


def test_an_item_carries_its_entry_and_the_time_it_was_added(place: Place) -> None:
    place.queue()
    entry = place.raw.xadd(place.stream, {"data": '{"n": 1}'}, id="1700000000123-5")
    (item,) = StreamSource(a_queue(place, claim_idle_ms=60_000), BOUNDED).fetch_transactions(10)
    assert item.transaction_id == f"{place.stream}:1700000000123-5"
    assert (item.source, item.metadata["entry"]) == (place.stream, "1700000000123-5")
    assert item.created_at == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert entry == b"1700000000123-5"


def test_an_entry_with_an_id_past_the_year_9999_is_still_an_item(place: Place) -> None:
    place.raw.xadd(place.stream, {"data": "{}"}, id=f"{2**63}-1")
    (item,) = StreamSource(a_queue(place), a_policy()).fetch_transactions(1)
    assert item.created_at.year == 9999


def test_a_recovering_consumer_gets_stale_entries_and_no_new_ones(place: Place, variant: str) -> None:
    place.queue()
    place.add({"n": 1}, {"n": 2})
    place.queue("dead", max_read_count=2).read()
    place.add({"n": 3})
    place.raw.xclaim(place.stream, "workers", "dead", 0, list(place.pending()), idle=2 * AGES)
    task = consume(place, variant, ROOMY, recovers=True)
    assert sorted(task.seen) == [1, 2]
    assert place.pending() == {}


def test_good_items_of_a_batch_with_an_unusable_entry_are_processed_before_the_error(
    place: Place, variant: str
) -> None:
    place.queue()
    place.add({"n": 1})
    bad = place.add_raw({b"data": b"bad"})
    place.add({"n": 2})
    with pytest.raises(FetchException) as caught:
        consume(place, variant, ROOMY)
    assert isinstance(caught.value.__cause__, PoisonError)
    assert list(place.pending()) == [bad], "the good ones were worked on and acknowledged"


@pytest.mark.parametrize("good", [0, 1])
def test_an_unusable_entry_ends_the_loop_whatever_the_attempts_of_a_fetch(
    place: Place, variant: str, good: int
) -> None:
    place.queue()
    bad = place.add_raw({b"data": b"bad"})
    place.add(*({"n": n} for n in range(good)))
    policy = a_policy(fetch=RetryPolicy(max_attempts=3))
    with pytest.raises(FetchException, match=bad) as caught:
        consume(place, variant, policy)
    assert isinstance(caught.value.__cause__, PoisonError)
    assert list(place.pending()) == [bad]


def test_nack_without_requeue_parks_an_item_and_with_requeue_leaves_it_pending(place: Place) -> None:
    place.queue()
    first, second = place.add({"n": 1}, {"n": 2})
    source = StreamSource(place.queue(max_read_count=2), a_policy(size=2))
    one, two = source.fetch_transactions(2)
    source.nack_transaction(one)
    assert list(place.pending()) == [first, second]
    source.nack_transaction(two, requeue=False)
    assert list(place.pending()) == [first]
    assert place.raw.xlen(f"{place.stream}:parked") == 1


def test_an_item_of_another_source_is_not_acknowledged(place: Place) -> None:
    stranger = Transaction(transaction_id="x", created_at=datetime(2026, 1, 1, tzinfo=UTC), source="elsewhere")
    with pytest.raises(InvalidInputError, match="is not from stream"):
        StreamSource(a_queue(place), a_policy()).ack_transaction(stranger)


def test_a_fetch_takes_no_arguments_but_how_long_to_wait(place: Place) -> None:
    source = StreamSource(a_queue(place, block_ms=5_000), a_policy())
    assert source.fetch_transactions(1, block_ms=20) == []
    with pytest.raises(InvalidInputError, match="cannot fetch with colour"):
        source.fetch_transactions(1, colour="blue")


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (a_policy(), math.inf),
        (a_policy(process=ONE_SECOND, exception=ONE_SECOND), math.inf),
        (a_policy(process=ONE_SECOND, success=ONE_SECOND), math.inf),
        (a_policy(size=1, limit=2), 2 + 2),  # the exception handler has the same time again
        (a_policy(size=1, limit=2, exception=ONE_SECOND), 2 + 1),
        (BOUNDED, 15),
        (a_policy(size=3, limit=2, exception=ONE_SECOND), 6),
        (a_policy(size=3, limit=2, exception=ONE_SECOND, continuous=True), 9),  # after those of the batch before
        (a_policy(size=1, process=ONE_SECOND, success=ONE_SECOND, exception=ONE_SECOND), 3),
        (a_policy(size=1, limit=1, process=ONE_SECOND, success=ONE_SECOND, exception=ONE_SECOND), 2),
        (a_policy(size=1, limit=9, success=THRICE, exception=THRICE), 9 + (3 + 2 + 4)),
        (a_policy(size=1, limit=8, success=THRICE, exception=THRICE), 8 + 8),
        (a_policy(size=1, limit=99, process=THRICE, success=THRICE, exception=THRICE), 3 * (3 + 2 + 4)),
    ],
)
def test_the_longest_processing_time_follows_from_the_policy(policy: ConsumerPolicy, seconds: float) -> None:
    assert max_processing_time(policy) == seconds


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("limit", [0.5, 1, 2, 3.5, 9, None])
@pytest.mark.parametrize("retry", [ONE_SECOND, THRICE])
def test_no_item_takes_longer_than_the_longest_processing_time(
    retry: RetryPolicy, limit: float | None, late: bool
) -> None:
    policy = a_policy(size=1, value=1, limit=limit, process=retry, success=retry, exception=retry)
    lives = [longest_processing(policy, too_late_first=first, is_late=late) for first in range(retry.max_attempts + 1)]
    assert max(lives) <= max_processing_time(policy)
    is_tight = late and retry.max_attempts == 1  # pauses that are cut make the others live less
    is_tight = is_tight and limit != 2  # its two steps fill the time, so its exception handler begins before the end
    assert not is_tight or max(lives) > max_processing_time(policy) - 0.1, "and one lives almost as long"


def longest_processing(policy: ConsumerPolicy, *, too_late_first: int, is_late: bool) -> float:
    """Process an item with a clock that moves only while code runs or pauses; return its duration.

    So many attempts at processing are too late, the next returns at the last moment; handlers are all too late,
    or return at the last moment.
    """
    now, calls = 0.0, 0
    hooks: Any = Task()._setup(policy, lambda _: None)
    hooks.context.clock = lambda: now
    item = WorkItem(Transaction(transaction_id="x", created_at=datetime(2026, 1, 1, tzinfo=UTC)), hooks.in_flight)
    assert hooks.in_flight.take("x", lambda: None)
    living, answer = run_item(hooks, item), None
    try:
        while True:
            request = living.send(answer)
            if isinstance(request, Pause):
                now, answer = now + request.seconds, None
                continue
            calls += 1
            is_processing = request.args == (item.transaction,)
            is_slow = calls <= too_late_first if is_processing else is_late
            now += request.limit - (0 if is_slow else 2**-10)
            answer = CallResult(is_timed_out=is_slow)
    except StopIteration:
        return now


@pytest.mark.parametrize("recovers", [False, True])
def test_a_claim_idle_time_below_the_longest_processing_time_is_refused(place: Place, recovers: bool) -> None:
    with pytest.raises(InvalidInputError, match="expected at least 20000"):
        StreamSource(a_queue(place, claim_idle_ms=19_999), BOUNDED, recovers=recovers)
    StreamSource(a_queue(place, claim_idle_ms=20_000), BOUNDED, recovers=recovers)


def test_items_without_a_bounded_processing_time_can_be_read_but_not_recovered(place: Place) -> None:
    StreamSource(a_queue(place), a_policy())
    with pytest.raises(InvalidInputError, match="does not bound the processing time"):
        StreamSource(a_queue(place, claim_idle_ms=10**9), a_policy(process=ONE_SECOND), recovers=True)
    StreamSource(a_queue(place, claim_idle_ms=10**9), a_policy(limit=5), recovers=True)


def test_a_fetch_timeout_below_its_block_is_refused(place: Place) -> None:
    with pytest.raises(InvalidInputError, match="expected a longer timeout"):
        StreamSource(a_queue(place, block_ms=1_000), a_policy(fetch=ONE_SECOND))


def test_a_batch_above_max_read_count_is_refused(place: Place) -> None:
    with pytest.raises(InvalidInputError, match="expected a max_read_count of 10 or more"):
        StreamSource(place.queue(), a_policy())
    with pytest.raises(InvalidInputError, match="expected a max_read_count of 10 or more"):
        StreamSource(place.queue(max_read_count=9), a_policy())
    StreamSource(place.queue(), a_policy(size=1))


@pytest.mark.parametrize(
    ("block_ms", "expected"),
    [
        (4_000, "expected a longer timeout"),
        (60_000, "needs a socket timeout"),
        (0, "expected a whole number"),
        ("1", "expected a whole number"),
    ],
)
def test_block_ms_of_a_policy_is_checked_like_that_of_the_queue(place: Place, block_ms: Any, expected: str) -> None:
    policy = a_policy(fetch=RetryPolicy(timeout=2), extra={"block_ms": block_ms})
    with pytest.raises(InvalidInputError, match=expected):
        StreamSource(a_queue(place, block_ms=1_000), policy)


def test_a_shorter_block_ms_of_the_policy_allows_a_shorter_fetch_timeout(place: Place) -> None:
    StreamSource(a_queue(place, block_ms=5_000), a_policy(fetch=ONE_SECOND, extra={"block_ms": 500}))


def test_a_recovering_consumer_raises_trimmed_entries_after_the_rest(place: Place) -> None:
    queue = a_queue(place, claim_idle_ms=20_000)
    gone, kept = place.add({"n": 1}, {"n": 2})
    queue.read()
    place.raw.xclaim(place.stream, "workers", "dead", 0, [gone, kept], idle=25_000)
    place.raw.xdel(place.stream, gone)
    source = StreamSource(queue, BOUNDED, recovers=True)
    assert [item.metadata["entry"] for item in source.fetch_transactions(10)] == [kept]
    with pytest.raises(PoisonError, match=gone):
        source.fetch_transactions(10)
