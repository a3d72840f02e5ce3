"""An installation for tests of metrics and traces, without beat."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
from celery import Celery

from pipeline.embedded import servers
from pipeline.store.reads import gauges
from pipeline.testing import scripted
from tests.support import mutations_in_doubt, scripted_consumers
from tests.support.installation import QUICK, UNHURRIED, Installation, alone
from tests.support.wait import wait_for

#: For workers of which every count and span is wanted.
PATIENT = UNHURRIED | {"PIPELINE_WORKFLOWS": f"{QUICK['PIPELINE_WORKFLOWS']},tests.support.patient_export"}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process gauges are read however long a statement takes, and calls of a shop may begin late.

    A test of either says otherwise.
    """
    monkeypatch.setattr(gauges, "STATEMENT_TIMEOUT", timedelta(seconds=60))
    slowly = partial(scripted, timeout=timedelta(seconds=30))
    for module in (scripted_consumers, mutations_in_doubt):
        monkeypatch.setattr(module, "scripted", slowly)


@pytest.fixture(scope="module")
def _servers(embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with alone(embedded.database_url, tmp_path_factory.mktemp("counted")) as found:
        yield found


@pytest.fixture
def installation(_servers: Installation) -> Iterator[Installation]:
    """Reset the installation: no nodes, orders, messages or closed gates."""
    _servers.begin_anew()
    yield _servers
    _servers.end_nodes()


def publish(installation: Installation, count: int) -> None:
    """Publish orders and notify workers: no beat runs here, and the watchdog replaces it late."""
    installation.publish(count)
    with Celery(broker=installation.broker_url, set_as_current=False) as outside:
        outside.send_task(
            "pipeline.schedule", args=(installation.workflow,), queue="pipeline.schedule", ignore_result=True
        )


def wait_until_done(installation: Installation) -> None:
    """Wait until every order is committed."""
    wait_for(lambda: _done(installation), within=80, every=0.1, why="all orders done")


def _done(installation: Installation) -> bool:
    (row,) = installation.ask("SELECT count(*) AS done FROM pipeline.events WHERE topic = 'done'")
    return bool(row.done == len(installation.published))
