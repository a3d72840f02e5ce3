"""Databases that were never migrated, one per test."""

import os
from collections.abc import Iterator
from itertools import count

import pytest

from pipeline.embedded import servers
from pipeline.store.database import Database
from tests.support import databases

_NUMBERS = count(1)


@pytest.fixture
def bare(embedded: servers.Servers) -> Iterator[Database]:
    """A database without anything in it."""
    with databases.empty(embedded.database_url, f"migrate_{os.getpid()}_{next(_NUMBERS)}") as url:
        yield Database.connect_unpooled(url)
