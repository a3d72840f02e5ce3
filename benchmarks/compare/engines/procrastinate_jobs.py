"""Three jobs of Procrastinate, each of which defers the next. Handlers are coroutines that block on psycopg2."""

import os

import procrastinate

from benchmarks.compare import work

QUEUE = "compare"
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ.get(work.DSN, "")))


@app.task(queue=QUEUE, name="prepare")
async def prepare(order: str) -> None:
    """Do the first step."""
    work.prepare(order)
    await act.defer_async(order=order)


@app.task(queue=QUEUE, name="act")
async def act(order: str) -> None:
    """Do the second step."""
    work.act(order)
    await publish.defer_async(order=order)


@app.task(queue=QUEUE, name="publish")
async def publish(order: str) -> None:
    """Do the third step."""
    work.publish(order)


def setup() -> None:
    """Make the tables."""
    with _sync().open() as opened:
        opened.schema_manager.apply_schema()


def _sync() -> procrastinate.App:
    """An app that knows no task, as that of a service that only defers."""
    return procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=os.environ[work.DSN]))


_open: list[procrastinate.App] = []


def enqueue(orders: list[str]) -> None:
    """Defer the first job of each order."""
    if not _open:
        _open.append(_sync())
        _open[0].open()
    _open[0].configure_task("prepare", queue=QUEUE).batch_defer(*({"order": order} for order in orders))


if __name__ == "__main__":
    work.main(setup, enqueue, lambda: app.run_worker(queues=[QUEUE], concurrency=20, fetch_job_polling_interval=0.5))
