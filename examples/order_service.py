"""A service that publishes in its own transaction.

An order and its event are written together: both are there, or neither is. Run it with the URL of a
database in which the workflow of `examples/receipts.py` is registered:

    python -m examples.order_service postgresql://user:password@host:5432/name pay 4711 a@example.org
"""

import sys
from collections.abc import Sequence

from sqlalchemy import Connection, create_engine, text

from pipeline.client import EventInput, database_url_of, publish

USAGE = "usage: python -m examples.order_service DATABASE_URL pay ORDER EMAIL\n"
TABLES = """
CREATE TABLE IF NOT EXISTS orders (
    number text PRIMARY KEY,
    email text NOT NULL,
    paid_at timestamptz NOT NULL DEFAULT now()
)
"""


def pay(connection: Connection, number: str, email: str) -> bool:
    """Record the payment and publish the event. Return False if the order was paid before."""
    taken = connection.execute(
        text("INSERT INTO orders (number, email) VALUES (:number, :email) ON CONFLICT DO NOTHING RETURNING number"),
        {"number": number, "email": email},
    ).first()
    if taken is None:
        return False
    paid = EventInput(topic="orders.paid", message_id=f"order:{number}", payload={"order": number, "email": email})
    publish(connection, "receipts", [paid])
    return True


def main(arguments: Sequence[str]) -> int:
    """Pay one order, and return the exit code."""
    if len(arguments) != 4 or arguments[1] != "pay":
        sys.stderr.write(USAGE)
        return 2
    database_url, _, number, email = arguments
    engine = create_engine(database_url_of(database_url))
    with engine.begin() as connection:
        connection.execute(text(TABLES))
        is_new = pay(connection, number, email)
    sys.stdout.write("paid\n" if is_new else "was paid before\n")
    engine.dispose()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
