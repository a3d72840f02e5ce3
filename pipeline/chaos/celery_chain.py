"""The workload of a chaos run as an ordinary Celery chain, for ``pipeline chaos --compare celery``.

It is written as a careful user of Celery would:

- messages are acknowledged late, and given back when a pool process dies;
- every exception of a call or of the database is retried, with growing pauses and jitter;
- the key of a request is its order, so a provider that honours keys counts repeats once;
- an order that is known to be sent is not sent again, and one that failed for good is recorded as failed;
- the orders and what became of them are in Postgres, so no result backend is needed.

Only the harness of a chaos run uses this module, and the workers that it starts.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

import httpx
import kombu.exceptions
import psycopg2  # type: ignore[import-untyped]
import redis
from celery import Celery, Task, chain

from pipeline.chaos.faults import PROVIDER_VARIABLE, TIMEOUT, operation_of

QUEUE = "celery"
BROKER_VARIABLE, DATABASE_VARIABLE = "CHAOS_BROKER", "CHAOS_DATABASE"
#: Longer than any pause of a retry, any call, and any time that a worker stands still.
VISIBILITY_TIMEOUT = 30
MAX_BACKOFF = 8  #: seconds
MAX_RETRIES = 10
TABLE = """
CREATE TABLE orders (id text PRIMARY KEY, operation text NOT NULL, status text NOT NULL DEFAULT 'open', receipt text)
"""
#: What a call meets while Postgres or Redis is away.
UNAVAILABLE = (psycopg2.Error, redis.RedisError, kombu.exceptions.OperationalError)
_FAILURE_ATTEMPTS = 10

app = Celery("chaos_celery_chain", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get(BROKER_VARIABLE),
    chaos_database=os.environ.get(DATABASE_VARIABLE),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT},
)


class OrderTask(Task):  # type: ignore[misc]
    """A step of an order. It is retried, and recorded as failed when no retry is left."""

    autoretry_for = (httpx.HTTPError, psycopg2.Error)
    max_retries = MAX_RETRIES
    retry_backoff = True
    retry_backoff_max = MAX_BACKOFF
    retry_jitter = True

    def on_failure(self, _exc: Any, _task_id: str, args: Sequence[Any], _kwargs: Any, _einfo: Any) -> None:
        """Record that the order failed. Postgres may be away for a while."""
        pause = threading.Event()
        for _ in range(_FAILURE_ATTEMPTS):
            with suppress(psycopg2.Error):
                execute("UPDATE orders SET status = 'failed' WHERE id = %s AND status = 'open'", args[0])
                return
            pause.wait(1.0)


@app.task(name="send", base=OrderTask)  # type: ignore[untyped-decorator]
def send(order: str, operation: str) -> None:
    """Request the effect of an order, unless it is known to have happened."""
    if execute("SELECT FROM orders WHERE id = %s AND receipt IS NOT NULL", order):
        return
    response = httpx.post(
        f"{os.environ[PROVIDER_VARIABLE]}/{operation}",
        json={"order": order},
        headers={"Idempotency-Key": quote(order)},
        timeout=TIMEOUT.total_seconds(),
    )
    response.raise_for_status()
    execute("UPDATE orders SET receipt = %s WHERE id = %s", response.json()["receipt"], order)


@app.task(name="finish", base=OrderTask)  # type: ignore[untyped-decorator]
def finish(order: str) -> None:
    """Record that an order is done."""
    execute("UPDATE orders SET status = 'done' WHERE id = %s", order)


def publish(seed: int, orders: Sequence[str]) -> None:
    """Record orders, and send the chain of each order that is new. What could not be sent may be published again."""
    for order in orders:
        operation = operation_of(seed, order)
        if execute("INSERT INTO orders (id, operation) VALUES (%s, %s) ON CONFLICT DO NOTHING", order, operation):
            try:
                chain(send.si(order, operation), finish.si(order)).apply_async()
            except UNAVAILABLE:
                execute("DELETE FROM orders WHERE id = %s AND status = 'open'", order)
                raise


def statuses() -> dict[str, str]:
    """Return what is recorded about each order."""
    with _cursor() as cursor:
        cursor.execute("SELECT id, status FROM orders")
        return dict(cursor.fetchall())


def execute(sql: str, *params: object) -> int:
    """Execute one statement in its own transaction; return the number of its rows."""
    with _cursor() as cursor:
        cursor.execute(sql, params)
        return int(cursor.rowcount)


@contextmanager
def _cursor() -> Iterator[Any]:
    """Lend a cursor of the connection that this process keeps, and close the connection after an error."""
    key = (os.getpid(), app.conf.chaos_database)
    if key not in _connections:
        _connections[key] = psycopg2.connect(app.conf.chaos_database)
        _connections[key].autocommit = True
    try:
        with _connections[key].cursor() as cursor:
            yield cursor
    except psycopg2.Error:
        _connections.pop(key).close()
        raise


_connections: dict[tuple[int, str], Any] = {}  #: by process, as a fork must not share one, and by database
