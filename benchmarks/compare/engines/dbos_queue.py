"""A DBOS workflow of three steps on a queue, polled every 50 ms."""

import os
import threading

from dbos import DBOS, DBOSClient

from benchmarks.compare import work

QUEUE, VERSION = "compare", "1"
prepare, act, publish = (DBOS.step()(step) for step in (work.prepare, work.act, work.publish))


@DBOS.workflow(name="fulfil")
def fulfil(order: str) -> None:
    """Do the work of one order."""
    prepare(order)
    act(order)
    publish(order)


def _launch() -> None:
    DBOS(
        config={
            "name": "compare",
            "system_database_url": os.environ[work.DSN],
            "log_level": "ERROR",
            "application_version": VERSION,
            "executor_id": str(os.getpid()),
        }
    )
    DBOS.launch()
    DBOS.register_queue(QUEUE, worker_concurrency=20, polling_interval_sec=0.05)


def setup() -> None:
    """Make the tables and the queue."""
    _launch()
    DBOS.destroy()


def enqueue(orders: list[str]) -> None:
    """Enqueue a workflow for each order."""
    client = _client()
    for order in orders:
        client.enqueue({"queue_name": QUEUE, "workflow_name": "fulfil", "app_version": VERSION}, order)


_clients: list[DBOSClient] = []


def _client() -> DBOSClient:
    if not _clients:
        _clients.append(DBOSClient(system_database_url=os.environ[work.DSN]))
    return _clients[0]


def run_worker() -> None:
    """Work until the end."""
    _launch()
    threading.Event().wait()


if __name__ == "__main__":
    work.main(setup, enqueue, run_worker)
