"""Offer pytest fixtures for tests of workflows. Installing the package is enough.

A server is started only when a test uses one of these fixtures. A test with ``pipeline_run`` gets a real Postgres with
empty tables, and every invariant is checked after it.

Every run of pytest in the environment loads this module. It imports nothing called `pipeline`, which may be a module of
the project under test.
"""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from celery_durable_effects import describe_other

if TYPE_CHECKING:
    from pipeline.embedded.servers import Servers
    from pipeline.store.database import Database
    from pipeline.testing.inline import Inline
    from pipeline.workflows.authoring import Workflow


@pytest.fixture(scope="session")
def _ours_is_found() -> None:
    """Fail the tests that need our package if another is imported in its place."""
    if found := describe_other(sys.path):
        pytest.fail(found, pytrace=False)


@pytest.fixture(scope="session")
def pipeline_servers(_ours_is_found: None, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Servers]":
    """Postgres and Redis: those of ``PIPELINE_DATABASE_URL`` and ``PIPELINE_BROKER_URL``, or embedded ones.

    All processes of a test run share the embedded servers, which stop after it.
    """
    from pipeline.embedded import servers

    base = tmp_path_factory.getbasetemp()
    home = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "pipeline-servers"
    with servers.running(home) as found:
        yield found


@pytest.fixture(scope="session")
def _pipeline_pool(pipeline_servers: "Servers") -> "Iterator[Database]":
    """A migrated database of this process. Tests never write to the database that the URL names."""
    from pipeline.store.database import Database
    from pipeline.testing import databases

    name = f"pipeline_test_{os.getpid()}_{secrets.token_hex(4)}"
    with databases.clone_database(pipeline_servers.database_url, name) as url:
        pool = Database.connect(url, pool_size=8)
        yield pool
        pool.dispose()


@pytest.fixture
def pipeline_db(_pipeline_pool: "Database") -> "Iterator[Database]":
    """An empty database with a clock of its own. After the test every invariant must hold."""
    from pipeline.store.database import Database
    from pipeline.testing import databases

    db = Database(_pipeline_pool.engine)
    yield db
    try:
        with db.transaction() as tx:
            found = databases.invariant_findings(tx)
        assert found == [], "the test broke an invariant; see `pipeline doctor`"
    finally:
        databases.delete_all_rows(db)


@pytest.fixture
def pipeline_run(pipeline_db: "Database") -> "Iterator[Callable[..., Inline]]":
    """Run workflows inside the test: ``run = pipeline_run(workflow, connectors=[...])``."""
    from pipeline.testing.inline import Inline

    made: list[Inline] = []

    def make(*workflows: "Workflow", **options: Any) -> Inline:
        made.append(Inline(pipeline_db, workflows, **options))
        return made[-1]

    yield make
    for inline in made:
        inline.close()
