"""The work of one order, the same for every engine: a row before the call, the call, its outcome, an event.

Each engine spreads it over three steps, as ours does: prepare, act, publish. The call appends the order to a file, the
outside witness. The last step appends the order and the instant after its commit to another file. Instants are those of
the machine's monotonic clock, which all processes share.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg2

DSN, BROKER, HOME = "COMPARE_DATABASE", "COMPARE_BROKER", "COMPARE_HOME"
HAS_LEDGER, CALL_MS = "COMPARE_LEDGER", "COMPARE_CALL_MS"
TABLES = """
CREATE TABLE ledger (id text PRIMARY KEY, status text NOT NULL, sent_at timestamptz NOT NULL DEFAULT now(),
                     resolved_at timestamptz);
CREATE TABLE events (id text PRIMARY KEY, created_at timestamptz NOT NULL DEFAULT now());
"""
_local = threading.local()


def prepare(order: str) -> None:
    """Begin an order: a step of its own, as in ours."""
    del order


def act(order: str) -> None:
    """Record the call, make it, record its outcome."""
    if _has_ledger():
        _execute("INSERT INTO ledger (id, status) VALUES (%s, 'in flight')", order)
    _append("effects", order)
    if ms := int(os.environ.get(CALL_MS, "0")):
        threading.Event().wait(ms / 1000)
    if _has_ledger():
        _execute("UPDATE ledger SET status = 'applied', resolved_at = now() WHERE id = %s", order)


def publish(order: str) -> None:
    """Publish what follows, and leave the instant."""
    if _has_ledger():
        _execute("INSERT INTO events (id) VALUES (%s)", order)
    _append("done", f"{order} {time.monotonic()}")


def main(setup: Callable[[], None], enqueue: Callable[[list[str]], None], work: Callable[[], None]) -> None:
    """Set an engine up, enqueue the orders of each line of JSON, or work until the end."""
    if sys.argv[1] == "setup":
        with psycopg2.connect(os.environ[DSN]) as connection, connection.cursor() as cursor:
            cursor.execute(TABLES)
        setup()
    elif sys.argv[1] == "work":
        work()
    else:
        for line in sys.stdin:
            orders = json.loads(line)
            _append("sent", *(f"{order} {time.monotonic()}" for order in orders))
            enqueue(orders)
            sys.stdout.write("\n")
            sys.stdout.flush()


def _has_ledger() -> bool:
    return os.environ.get(HAS_LEDGER) == "1"


def _execute(sql: str, *params: object) -> None:
    if not hasattr(_local, "connection"):
        _local.connection = psycopg2.connect(os.environ[DSN])
        _local.connection.autocommit = True
    with _local.connection.cursor() as cursor:
        cursor.execute(sql, params)


def _append(name: str, *lines: str) -> None:
    file = os.open(Path(os.environ[HOME]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(file)
