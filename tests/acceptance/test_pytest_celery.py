"""The same worker through pytest-celery: ready, answering, killed with -9, started again."""

from collections.abc import Iterator

import pytest
from pytest_celery import (
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
    RedisTestBroker,
)

from tests.support.installation import Installation
from tests.support.pytest_celery_nodes import LocalRedis, LocalWorker, NoContainer, worker_container
from tests.support.wait import wait_for


@pytest.fixture
def celery_broker_cluster(nodes: Installation) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(RedisTestBroker(LocalRedis(NoContainer(nodes.broker_url))))


@pytest.fixture
def celery_backend_cluster() -> None:
    """Results live in Postgres."""


@pytest.fixture
def celery_worker_cluster(nodes: Installation) -> Iterator[CeleryWorkerCluster]:
    worker = CeleryTestWorker(LocalWorker(worker_container(nodes)), app=None)
    cluster = CeleryWorkerCluster(worker)
    yield cluster
    cluster.teardown()


@pytest.fixture(autouse=True)
def closed(celery_setup: CeleryTestSetup) -> Iterator[None]:
    """Leave no connection of the test's own app behind."""
    yield
    celery_setup.app.close()


def test_a_worker_killed_with_9_and_started_again_loses_and_repeats_nothing(
    nodes: Installation, celery_setup: CeleryTestSetup
) -> None:
    assert celery_setup.ready(ping=False, control=True, docker=True)
    (answer,) = wait_for(lambda: ping(celery_setup), within=60, why="the worker answering")
    assert [each["ok"] for each in answer.values()] == ["pong"]
    nodes.beat()
    nodes.recorder.shut("after")
    nodes.publish(5)
    celery_setup.app.send_task("pipeline.schedule", args=("shop",), queue="pipeline.schedule")
    nodes.recorder.wait_at("after")
    celery_setup.worker.kill()
    assert celery_setup.worker.container.status == "exited"
    nodes.recorder.open("after")
    celery_setup.worker.restart()
    wait_for(lambda: ping(celery_setup), within=60, why="the new worker answering")
    nodes.all_done_once()


def ping(setup: CeleryTestSetup) -> list[dict[str, dict[str, str]]]:
    """The first answer to a ping, if one came within a second."""
    found: list[dict[str, dict[str, str]]] = setup.app.control.ping(timeout=1, limit=1)
    return found
