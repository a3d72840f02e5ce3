"""The small server, and a proxy in front of it."""

from collections.abc import Iterator

import pytest

from pipeline.testing import FaultyProxy, is_complete_http_request
from tests.testing.conformance_server import World, running


@pytest.fixture
def world() -> Iterator[World]:
    with running() as world:
        yield world


@pytest.fixture
def proxy(world: World) -> Iterator[FaultyProxy]:
    with FaultyProxy("127.0.0.1", world.server_port, is_complete=is_complete_http_request) as proxy:
        yield proxy
