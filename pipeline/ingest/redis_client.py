"""A Redis client that hides nothing: no retries, and a socket that outwaits a blocking read.

Left to its defaults redis-py 8 gives up on a quiet connection after five seconds and tries ten times
more before it says so: a read that blocks for five seconds would take most of a minute, and a server
that is gone would look like one that is slow. A pool would also replace a dropped connection without
a word, so one connection is held.
"""

import re
from typing import Any

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.connection import UnixDomainSocketConnection, parse_url
from redis.exceptions import RedisError
from redis.retry import Retry

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.errors import QueueError

CONNECT_TIMEOUT = 5.0  #: seconds
READ_MARGIN = 5.0  #: seconds that the answer to a blocking read may be late
_MIN_READ_MARGIN = 1.0
_EXPECTED = "expected redis://:password@host:6379/0, with special characters percent-encoded"


def connect_redis(url: str, *, longest_block_ms: int = 5_000) -> Redis:
    """A connection for reads that block at most so long. One thread at a time uses it; others wait for it."""
    ours = {
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "socket_timeout": longest_block_ms / 1000 + READ_MARGIN,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "socket_keepalive": True,
        "health_check_interval": 0,
        "decode_responses": False,
        "protocol": 2,
    }
    theirs = _url_options(url)
    if theirs.get("connection_class") is UnixDomainSocketConnection:
        del ours["socket_keepalive"]  # the kernel knows when the other side of a file is gone
    try:
        made = Redis(connection_pool=ConnectionPool(**{**theirs, **ours}), single_connection_client=True)
    except TypeError as error:
        named = re.search(r"argument '(\w+)'", str(error))
        what = f"the option {named[1]!r}" if named and named[1] in theirs else "an option"
        raise InvalidInputError(f"The URL of Redis has {what} that its client does not know; remove it.") from None
    except ValueError:
        raise InvalidInputError(f"The URL of Redis has an option that cannot be used; {_EXPECTED}.") from None
    except RedisError as error:
        words = str(error).rstrip(".")
        raise QueueError(
            f"Redis cannot be reached: {words}. Expected a running server; start it, or correct the URL."
        ) from error
    made.auto_close_connection_pool = True
    return made


def _url_options(url: str) -> dict[str, Any]:
    """What the URL says. Our own settings win over it: the URL is often the broker's, and tuned for that."""
    try:
        found: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError:  # its text could quote a piece of the password
        raise InvalidInputError(f"The URL of Redis cannot be used; {_EXPECTED}.") from None
    if "ssl_cert_reqs" in found:  # Celery also takes the names of Python's constants
        found["ssl_cert_reqs"] = str(found["ssl_cert_reqs"]).removeprefix("CERT_").lower()
    return found


def require_usable_client(client: Redis, block_ms: int) -> None:
    """Refuse a client that would retry or reconnect on its own, cut a blocking read short, or answer in another shape.

    What is not said is the library's to choose, and its choice changed before: it counts as wrong.
    """
    kwargs = client.get_connection_kwargs()
    retry = kwargs.get("retry")
    problems = {
        "it may retry by itself": retry is None or retry.get_retries() != 0,
        "it takes connections from a pool, which replaces a dropped one without a word": client.connection is None,
        "it decodes responses": bool(kwargs.get("decode_responses")),
        "it does not speak protocol 2": str(kwargs.get("protocol")) != "2",
        "its socket timeout is not set": "socket_timeout" not in kwargs,
    }
    found = [problem for problem, is_there in problems.items() if is_there]
    if found:
        raise ValueError(
            f"This Redis client cannot be used: {'; '.join(found)}. Make it with pipeline.ingest.connect_redis."
        )
    require_socket_timeout(client, block_ms)


def require_socket_timeout(client: Redis, block_ms: int) -> None:
    """Refuse a read that blocks longer than the socket waits: its entries would be delivered to nobody."""
    timeout, needed = client.get_connection_kwargs()["socket_timeout"], block_ms / 1000 + _MIN_READ_MARGIN
    if timeout is not None and timeout < needed:
        raise ValueError(
            f"A read that blocks for {block_ms} ms needs a socket timeout of at least {needed:g} s; this client's is "
            f"{timeout:g} s. Give connect_redis a longer longest_block_ms."
        )
