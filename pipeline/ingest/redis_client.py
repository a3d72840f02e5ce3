"""A Redis client without retries, whose socket waits longer than a blocking read.

With its defaults, redis-py 8 gives up on a quiet connection after five seconds and retries ten times
before it raises. A read that blocks for five seconds would take most of a minute, and a dead server
would seem slow. A pool would also replace a dropped connection silently, so the client holds
one connection.
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
READ_MARGIN = 5.0  #: seconds that the reply to a blocking read may be late
_MIN_READ_MARGIN = 1.0
ONE_SERVER = "Streams are read over one connection to one server: give its own URL, such as redis://host:6379/0."
_EXPECTED = "expected redis://:password@host:6379/0, with special characters percent-encoded"


def connect_again(client: Redis) -> Redis:
    """Return a second connection with the settings of a client. A blocking read holds the first."""
    pool = client.connection_pool
    try:
        copy = ConnectionPool(connection_class=pool.connection_class, **pool.connection_kwargs)
        second = Redis(connection_pool=copy, single_connection_client=True)
    except RedisError as error:
        raise QueueError(
            f"Redis cannot be reached a second time: {str(error).rstrip('.')}. Start again later."
        ) from error
    second.auto_close_connection_pool = True
    return second


def connect_redis(url: str, *, longest_block_ms: int = 5_000) -> Redis:
    """Return a connection for reads that block at most ``longest_block_ms``.

    One thread at a time uses it; others wait for it.
    """
    own_options = {
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "socket_timeout": longest_block_ms / 1000 + READ_MARGIN,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "socket_keepalive": True,
        "health_check_interval": 0,
        "decode_responses": False,
        "protocol": 2,
    }
    url_options = _url_options(url)
    if url_options.get("connection_class") is UnixDomainSocketConnection:
        del own_options["socket_keepalive"]  # the kernel reports the end of a local socket's peer
    try:
        client = Redis(connection_pool=ConnectionPool(**{**url_options, **own_options}), single_connection_client=True)
    except TypeError as error:
        named = re.search(r"argument '(\w+)'", str(error))
        what = f"the option {named[1]!r}" if named and named[1] in url_options else "an option"
        raise InvalidInputError(f"The URL of Redis has {what} that the client does not know; remove it.") from None
    except ValueError:
        raise InvalidInputError(f"The URL of Redis has an option that cannot be used; {_EXPECTED}.") from None
    except RedisError as error:
        reason = str(error).rstrip(".")
        raise QueueError(
            f"Redis cannot be reached: {reason}. Expected a running server; start it, or correct the URL."
        ) from error
    client.auto_close_connection_pool = True
    return client


def _url_options(url: str) -> dict[str, Any]:
    """Return the options of the URL. Our own settings win: the URL is often tuned for the broker."""
    require_one_server(url)
    try:
        found: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError:  # its message could quote a part of the password
        raise InvalidInputError(f"The URL of Redis cannot be used; {_EXPECTED}.") from None
    if "ssl_cert_reqs" in found:  # Celery also accepts the names of Python's constants
        found["ssl_cert_reqs"] = str(found["ssl_cert_reqs"]).removeprefix("CERT_").lower()
    return found


def require_one_server(url: str) -> None:
    """Refuse the URL of a Redis Cluster or of Redis Sentinel."""
    scheme = url.partition("://")[0].lower()
    for word, kind in {"cluster": "a Redis Cluster", "sentinel": "Redis Sentinel"}.items():
        if word in scheme:
            raise InvalidInputError(f"The URL of Redis, {scheme}://..., names {kind}. {ONE_SERVER}")


def require_usable_client(client: Redis, block_ms: int) -> None:
    """Refuse a client that this package cannot rely on.

    It is refused if it may retry or reconnect by itself, cut a blocking read short, or reply in another
    shape. An option that is not set counts as wrong: the library's defaults have changed before.
    """
    kwargs = client.get_connection_kwargs()
    retry = kwargs.get("retry")
    problems = {
        "it may retry by itself": retry is None or _retries(retry) != 0,
        "it takes connections from a pool, which replaces a dropped one silently": client.connection is None,
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


def _retries(retry: Any) -> int:
    found: int = retry.get_retries() if hasattr(retry, "get_retries") else retry._retries  # before redis-py 6
    return found


def require_socket_timeout(client: Redis, block_ms: int) -> None:
    """Refuse a read that blocks longer than the socket waits: its entries would be lost."""
    timeout, needed = client.get_connection_kwargs()["socket_timeout"], block_ms / 1000 + _MIN_READ_MARGIN
    if timeout is not None and timeout < needed:
        raise ValueError(
            f"A read that blocks for {block_ms} ms needs a socket timeout of at least {needed:g} s; this client's is "
            f"{timeout:g} s. Give connect_redis a larger longest_block_ms."
        )
