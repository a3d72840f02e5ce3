"""What the engine costs per item, beside bare loops that do the same work in the same run.

Only ratios are compared, the best of several rounds, in processor time: another process on the
machine must not decide. The work is as small as it can be, so the ratio is the worst there is.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeline.consumer_engine.consumer import AsyncConsumerMixin, ConsumerMixin
from pipeline.consumer_engine.transactions import Transaction
from tests.consumer_engine.scripted_tasks import Cut, items, policy

COUNT, WIDTH, SIZE, MOST = 2000, 8, 100, 2.5
#: The least of ever more rounds comes ever closer to what it costs: a busy machine needs more of them.
ROUNDS, MOST_ROUNDS = 7, 70
LINE = items(COUNT)
POLICY = policy(concurrency=WIDTH, size=SIZE)


class Threaded(ConsumerMixin):
    """Does next to nothing, with threads."""

    def process_transaction(self, transaction: Transaction) -> str:
        return transaction.transaction_id

    def handle_transaction_success(self, transaction: Transaction, result: Any) -> None: ...


class Awaited(AsyncConsumerMixin):
    """Does next to nothing, with asyncio: it lets go of the event loop once, or it would need none."""

    async def process_transaction(self, transaction: Transaction) -> str:
        await asyncio.sleep(0)
        return transaction.transaction_id

    async def handle_transaction_success(self, transaction: Transaction, result: Any) -> None: ...


def bare_threads(task: Threaded, source: Cut) -> int:
    """What one writes without an engine: a pool, a batch, both hooks."""
    done = 0

    def work(transaction: Transaction) -> None:
        try:
            task.handle_transaction_success(transaction, task.process_transaction(transaction))
        except Exception as error:  # noqa: BLE001 - as one writes it
            task.handle_transaction_exception(transaction, error)  # type: ignore[arg-type]

    with ThreadPoolExecutor(WIDTH) as pool:
        while batch := source.fetch_transactions(SIZE):
            for future in [pool.submit(work, transaction) for transaction in batch]:
                future.result()
                done += 1
    return done


async def bare_asyncio(task: Awaited, source: Cut) -> int:
    """What one writes without an engine: a semaphore, a batch, both hooks."""
    done, places = 0, asyncio.Semaphore(WIDTH)

    async def work(transaction: Transaction) -> None:
        async with places:
            try:
                await task.handle_transaction_success(transaction, await task.process_transaction(transaction))
            except Exception as error:  # noqa: BLE001 - as one writes it
                await task.handle_transaction_exception(transaction, error)  # type: ignore[arg-type]

    while batch := await source.fetch_transactions_async(SIZE):
        done += len(await asyncio.gather(*[work(transaction) for transaction in batch]))
    return done


def compared(bare: Callable[[], int], engine: Callable[[], int]) -> tuple[float, float]:
    """The least processor time per item of both, in microseconds, taken in turns."""
    least = [math.inf, math.inf]
    gc.collect()
    gc.freeze()  # what other tests left in memory is not looked through again and again
    try:
        for number in range(MOST_ROUNDS):
            if number >= ROUNDS and least[1] < MOST * least[0]:
                break
            for which, run in enumerate((bare, engine)):
                begun = time.process_time()
                assert run() == COUNT
                least[which] = min(least[which], time.process_time() - begun)
    finally:
        gc.unfreeze()
    return least[0] / COUNT * 1e6, least[1] / COUNT * 1e6


def with_threads() -> tuple[float, float]:
    """Microseconds of processor time per item: a bare loop over a thread pool, and the engine."""
    return compared(
        lambda: bare_threads(Threaded(), Cut(LINE)),
        lambda: Threaded().consume_transactions(source=Cut(LINE), policy=POLICY).processed,
    )


def with_asyncio() -> tuple[float, float]:
    """The same beside a bare loop over a semaphore."""

    async def engine_run() -> int:
        return (await Awaited().consume_transactions(source=Cut(LINE), policy=POLICY)).processed

    return compared(lambda: asyncio.run(bare_asyncio(Awaited(), Cut(LINE))), lambda: asyncio.run(engine_run()))


@pytest.mark.parametrize("loops", [with_threads, with_asyncio])
def test_a_consumer_costs_less_than_two_and_a_half_bare_loops(loops: Callable[[], tuple[float, float]]) -> None:
    bare, engine = loops()
    assert engine / bare < MOST, f"{engine:.1f} µs per item, a bare loop {bare:.1f} µs"
