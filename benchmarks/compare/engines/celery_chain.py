"""A Celery chain of three tasks, without a ledger or with one that is written by hand."""

import os

from celery import Celery, chain

from benchmarks.compare import work

app = Celery("compare", broker=os.environ.get(work.BROKER, ""))
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
)
prepare, act, publish = (app.task(step, name=step.__name__) for step in (work.prepare, work.act, work.publish))


def enqueue(orders: list[str]) -> None:
    """Send a chain for each order."""
    for order in orders:
        chain(prepare.si(order), act.si(order), publish.si(order)).apply_async()


def run_worker() -> None:
    """Run one worker with two processes, or with so many threads."""
    threads = os.environ.get("COMPARE_THREADS")
    pool = ["--pool=threads", f"--concurrency={threads}"] if threads else ["--concurrency=2"]
    app.worker_main(["worker", "--loglevel=ERROR", *pool])


if __name__ == "__main__":
    work.main(lambda: None, enqueue, run_worker)
