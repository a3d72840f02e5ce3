"""An installation for each test module, as the tests with real processes have it."""

import os
from collections.abc import Iterator

import pytest

from pipeline.dev import servers
from tests.support import databases
from tests.support.cluster import Installation, installed, own_broker


@pytest.fixture(scope="module")
def installation(embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """No node runs yet. What a test starts keeps running for the tests after it, unless it is ended."""
    home = tmp_path_factory.mktemp("counted")
    name = f"counted_{os.getpid()}_{home.name}"
    with (
        databases.cloned(embedded.database_url, name) as url,
        own_broker(home / "broker") as broker,
        installed(home, url, broker) as found,
    ):
        yield found
