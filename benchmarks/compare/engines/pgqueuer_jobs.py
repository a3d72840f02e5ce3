"""Three jobs of pgqueuer, each of which enqueues the next. Handlers are coroutines that block on psycopg2."""

import asyncio
import os

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from benchmarks.compare import work

_runner = asyncio.Runner()
_queries: list[Queries] = []


async def _connect() -> AsyncpgDriver:
    return AsyncpgDriver(await asyncpg.connect(os.environ[work.DSN]))


async def _enqueue(orders: list[str]) -> None:
    if not _queries:
        _queries.append(Queries(await _connect()))
    await _queries[0].enqueue(["prepare"] * len(orders), [order.encode() for order in orders], [0] * len(orders))


async def _work() -> None:
    engine, queries = PgQueuer(await _connect()), Queries(await _connect())

    @engine.entrypoint("prepare")
    async def prepare(job) -> None:
        work.prepare(job.payload.decode())
        await queries.enqueue("act", job.payload)

    @engine.entrypoint("act")
    async def act(job) -> None:
        work.act(job.payload.decode())
        await queries.enqueue("publish", job.payload)

    @engine.entrypoint("publish")
    async def publish(job) -> None:
        work.publish(job.payload.decode())

    await engine.run(batch_size=10)


async def _setup() -> None:
    await Queries(await _connect()).install()


if __name__ == "__main__":
    work.main(lambda: _runner.run(_setup()), lambda orders: _runner.run(_enqueue(orders)), lambda: _runner.run(_work()))
