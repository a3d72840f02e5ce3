"""An installation for each test module, as the tests with real processes have it."""

from collections.abc import Iterator

import pytest

from pipeline.dev import servers
from tests.support.cluster import Installation, alone


@pytest.fixture(scope="module")
def installation(embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """No node runs yet. What a test starts keeps running for the tests after it, unless it is ended."""
    with alone(embedded.database_url, tmp_path_factory.mktemp("counted")) as found:
        yield found
