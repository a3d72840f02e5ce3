"""A stream of its own for every test, on a real Redis."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import redis

from pipeline.embedded import servers
from tests.ingest.redis_streams import Place
from tests.support.installation import own_broker

_NUMBERS = count()


@pytest.fixture
def place(embedded: servers.Servers, worker_id: str) -> Iterator[Place]:
    """A stream of this test alone, on the Redis that all tests share."""
    with redis.Redis.from_url(embedded.broker_url, protocol=2) as raw:
        found = Place(embedded.broker_url, f"ingest-{worker_id}-{next(_NUMBERS)}", raw)
        yield found
        found.close()


@pytest.fixture(scope="session")
def _quiet_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_broker(tmp_path_factory.mktemp("quiet")) as url:
        yield url


@pytest.fixture
def quiet(_quiet_url: str) -> Iterator[Place]:
    """A stream on a Redis of this test alone, so that its commands can be counted."""
    with redis.Redis.from_url(_quiet_url, protocol=2) as raw:
        found = Place(_quiet_url, f"quiet-{next(_NUMBERS)}", raw)
        yield found
        found.close()


@pytest.fixture
def killable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Path]]:
    """A stream on a Redis that may be killed, and the home of that Redis."""
    home = tmp_path_factory.mktemp("redis")
    with own_broker(home) as url, redis.Redis.from_url(url, protocol=2) as raw:
        found = Place(url, "killable", raw)
        yield found, home
        found.close()
