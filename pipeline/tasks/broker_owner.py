"""Detect that two databases share queues, by a key in Redis that names the first database.

Workers of two databases with the same prefix of queues on one Redis number would take each other's events, each into
its own database, without an error. RabbitMQ has no place for such a key.
"""

import logging
from typing import Any

from pipeline.celery import app, installed
from pipeline.store.database import Database, identity

log = logging.getLogger(__name__)


def owner_key() -> str:
    """Return the name of the key."""
    return f"{installed().prefix}.database"


def check_broker_owner(db: Database) -> None:
    """Log an error when the queues belong to another database. Without an answer nothing is checked."""
    if str(app.conf.broker_url).startswith("amqp"):
        return
    try:
        with db.transaction() as tx:
            ours = identity(tx)
        found = _broker_owner(ours)
    except Exception as error:  # noqa: BLE001 - the check must not keep a worker from its work
        log.info("cannot check whether another installation uses this broker: %s", error)
        return
    if found != ours:
        log.error(
            "this broker belongs to another database: expected %s, found %s. Workers of both take each other's "
            "events, each into its own database. Give every database a Redis number of its own (PIPELINE_BROKER_URL) "
            "or names of queues of its own (PIPELINE_QUEUE_PREFIX). If it is the same database and has moved, delete "
            "the key %s from this Redis and start again",
            ours,
            found,
            owner_key(),
        )


def _broker_owner(ours: str) -> str:
    """Set the key to our database unless it exists, and return its value."""
    with app.connection_for_write(connect_timeout=2) as connection, connection.channel() as channel:
        client: Any = channel.client
        client.set(owner_key(), ours, nx=True)
        found = client.get(f"{channel.global_keyprefix}{owner_key()}")  # kombu puts it before the key of SET only
    return found.decode(errors="replace") if isinstance(found, bytes) else str(found)
