"""An installation per test module: a database, a Redis and a recorder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.embedded import servers
from tests.support.installation import Installation, alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes on a busy machine take their time; what they wait for is bounded test by test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="module")
def installation(embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """No node runs yet. What a test starts keeps running for the tests after it, unless it is ended."""
    with alone(embedded.database_url, tmp_path_factory.mktemp("installation")) as found:
        yield found


@pytest.fixture
def nodes(installation: Installation) -> Iterator[Installation]:
    """The installation with nothing in it, and all nodes gone after the test."""
    installation.begin_anew()
    yield installation
    installation.end_nodes()


@pytest.fixture
def shop(installation: Installation, request: pytest.FixtureRequest) -> Installation:
    """The installation with the nodes that the module's ``begin`` starts; they stay from test to test."""
    installation.stand(request.module.begin, failed=request.session.testsfailed)
    return installation
