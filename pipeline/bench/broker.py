"""The broker of a measurement: whether it is free, and how it is left empty.

The queues have fixed names, so workers of a measurement would take the messages of another installation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.celery import app
from pipeline.tasks.broker_owner import OWNER_KEY
from pipeline.tasks.messages import queue_depth

_UNACKED = ("unacked", "unacked_index")  #: messages that workers hold, as Celery keeps them in Redis


def foreign_owner(url: str, ours: str) -> str | None:
    """Return the other database that a broker belongs to. RabbitMQ has no place for this."""
    with _connection(url) as connection:
        if not _is_redis(url):
            return None
        found = connection.default_channel.client.get(OWNER_KEY)
    owner = found.decode(errors="replace") if isinstance(found, bytes) else found
    return None if owner in {None, ours} else str(owner)


def filled_queues(url: str) -> list[str]:
    """Return the queues of a broker that hold messages, those of other programs on the same Redis number too."""
    with _connection(url) as connection:
        if _is_redis(url):
            return _redis_queues(connection.default_channel.client)
        return [name for name in sorted(app.amqp.queues) if queue_depth(connection, name)]


def empty_queues(url: str) -> None:
    """Remove what a measurement left in the queues, which were empty when it began."""
    with _connection(url) as connection:
        channel = connection.default_channel
        for name in filled_queues(url):
            if _is_redis(url):
                channel.client.delete(name)
            else:
                channel.queue_purge(name)


def _redis_queues(client: Any) -> list[str]:
    names = [*client.scan_iter(_type="list"), *(name for name in _UNACKED if client.exists(name))]
    return sorted(name.decode(errors="replace") if isinstance(name, bytes) else name for name in names)


def _is_redis(url: str) -> bool:
    return not url.startswith("amqp")


@contextmanager
def _connection(url: str) -> Iterator[Any]:
    with app.connection_for_write(url, connect_timeout=5) as connection:
        yield connection
