"""A bank in a database of its own, and an observer that reads it from outside."""

from collections.abc import Iterator

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine

from pipeline.embedded.servers import Servers
from tests.connectors.sql_database import Bank, judging, target


@pytest.fixture(scope="module")
def url(embedded: Servers, worker_id: str) -> Iterator[str]:
    with target(embedded.database_url, f"sql_{worker_id}") as made:
        yield made


@pytest.fixture
def judge(url: str) -> Iterator[Engine]:
    with judging(url) as engine:
        yield engine


@pytest.fixture
def bank(url: str, judge: Engine) -> Iterator[Bank]:
    made = Bank(SecretStr(url))
    yield made
    made.engine.dispose()
