"""A Celery chain of three tasks, without a ledger or with one that is written by hand.

In the serial variant the last task of a chain sends the chain of the next order, so that one order is done at a time.
"""

import os
from functools import cache

from celery import Celery, chain
from redis import Redis

from benchmarks.compare import work

app = Celery("compare", broker=os.environ.get(work.BROKER, ""))
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
)
prepare, act = (app.task(step, name=step.__name__) for step in (work.prepare, work.act))
_IS_SERIAL = "COMPARE_SERIAL" in os.environ
_WAITING = "compare.waiting"  #: a list in the broker: orders of the serial variant that have no chain yet


@app.task(name="publish")
def publish(order: str) -> None:
    """Do the last step; in the serial variant, send the chain of the next order."""
    work.publish(order)
    if _IS_SERIAL and (following := _broker().lpop(_WAITING)) is not None:
        _send(following.decode())


def enqueue(orders: list[str]) -> None:
    """Send a chain for each order; in the serial variant for the first."""
    if _IS_SERIAL:
        orders, later = orders[:1], orders[1:]
        if later:
            _broker().rpush(_WAITING, *later)
    for order in orders:
        _send(order)


def _send(order: str) -> None:
    chain(prepare.si(order), act.si(order), publish.si(order)).apply_async()


@cache
def _broker() -> Redis:
    return Redis.from_url(os.environ[work.BROKER])


def run_worker() -> None:
    """Run one worker with two processes, or with so many threads."""
    threads = os.environ.get("COMPARE_THREADS")
    pool = ["--pool=threads", f"--concurrency={threads}"] if threads else ["--concurrency=2"]
    app.worker_main(["worker", "--loglevel=ERROR", *pool])


if __name__ == "__main__":
    work.main(lambda: None, enqueue, run_worker)
