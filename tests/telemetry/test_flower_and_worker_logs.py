"""Flower and JSON log lines of a worker, without payloads."""

import base64
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from celery import Celery

from pipeline.client.publishing import BrokerClient
from pipeline.embedded import servers
from tests.support import databases
from tests.support.installation import UNHURRIED, Installation, Node, installed, own_broker
from tests.support.prometheus_scrapes import free_port
from tests.support.wait import wait_for

pytestmark = pytest.mark.timeout(300)
SECRET = "hush-4242"


class Watched(NamedTuple):
    installation: Installation
    worker: Node
    beat: Node
    flower: str


@pytest.fixture(scope="module")
def watched(embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Start a worker with JSON logs, beat, and Flower with a password; complete three orders."""
    home = tmp_path_factory.mktemp("watched")
    with (
        databases.clone_database(embedded.database_url, f"watched_{os.getpid()}_{home.name}") as url,
        own_broker(home / "broker") as broker,
        installed(home, url, broker) as found,
    ):
        port = free_port()
        flower = found._node(
            "flower", ["flower", f"--port={port}", "--address=127.0.0.1"], "", {"FLOWER_BASIC_AUTH": "operator:letmein"}
        )
        json_lines = {"PIPELINE_LOG_FORMAT": "json"}
        worker = found.worker("--concurrency=1", "-E", PYTHONPROFILEIMPORTTIME="1", **UNHURRIED, **json_lines)
        beat = found._node("beat", ["beat", "--loglevel=INFO", f"--schedule={home / 'schedule'}"], "", json_lines)
        watched = Watched(found, worker, beat, f"http://127.0.0.1:{port}")
        wait_for(lambda: _listens(flower, watched), within=90, every=0.2)
        _publish(found)
        wait_for(lambda: _done(found), within=80, every=0.1, why="all orders done")
        yield watched


def _publish(found: Installation) -> None:
    """Publish from another Celery app: with our client, and without our package."""
    app = Celery(broker=found.broker_url)
    orders: list[dict[str, Any]] = [
        {"topic": "orders", "message_id": f"m{n}", "payload": {"card": SECRET}} for n in range(3)
    ]
    BrokerClient(app).publish("shop", orders[:1])
    app.send_task("pipeline.publish", kwargs={"workflow": "shop", "events": orders[1:]}, queue="pipeline.schedule")
    found.published += [str(order["message_id"]) for order in orders]
    app.close()


def _done(found: Installation) -> bool:
    (row,) = found.ask("SELECT count(*) AS done FROM pipeline.events WHERE topic = 'done'")
    return bool(row.done == 3)


def _listens(flower: Node, watched: Watched) -> bool:
    """Return whether Flower has seen a heartbeat of the worker: it answers before it receives events."""
    if flower.process.poll() is not None:
        raise RuntimeError(flower.log.read_text())
    try:
        return "flower_worker_online{" in _got(watched, "/metrics", "operator:letmein")
    except OSError:
        return False


def _got(watched: Watched, path: str, account: str = "") -> str:
    request = urllib.request.Request(watched.flower + path)
    if account:
        request.add_header("Authorization", f"Basic {base64.b64encode(account.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_flower_shows_which_runs_of_which_handler_a_task_carries_and_no_payload(watched: Watched) -> None:
    def tasks() -> list[dict[str, Any]]:
        shown = json.loads(_got(watched, "/api/tasks", "operator:letmein"))
        found: list[dict[str, Any]] = list(shown.values())
        assert {task["name"] for task in found} >= {f"pipeline.{name}" for name in ("prepare", "mutate", "next")}
        published = sorted(task["kwargs"] for task in found if task["name"] == "pipeline.publish")
        assert published == ["1 event for shop", "2 events for shop"]
        return found

    found = wait_for(tasks, every=0.2)
    assert not [task["name"] for task in found if task["name"].startswith("pipeline.sweep")], "Flower shows work only"
    for task in found:
        if task["name"] in ("pipeline.prepare", "pipeline.mutate", "pipeline.next"):
            assert task["kwargs"] == "shop.Fulfil"
            assert task["args"].startswith(("run 0", "2 runs from 0", "3 runs from 0"))
    assert SECRET not in json.dumps(found)


@pytest.mark.parametrize("path", ["/", "/api/tasks", "/api/workers"])
@pytest.mark.parametrize("account", ["", "operator:guess"])
def test_flower_shows_nothing_without_a_password(watched: Watched, path: str, account: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        _got(watched, path, account)
    with refused.value:
        assert refused.value.code == 401


def test_the_lines_of_a_worker_are_json_with_ids_as_fields_and_no_payload(watched: Watched) -> None:
    runs = {str(run.id) for run in watched.installation.runs() if run.event_ids}

    def written() -> list[dict[str, Any]]:
        lines = _lines(watched.worker)
        assert {line["run_id"] for line in lines if line.get("transition") == "run.committed"} >= runs
        return lines

    lines = wait_for(written)
    committed = [line for line in lines if line.get("transition") == "run.committed"]
    assert {line["logger"] for line in lines} >= {"pipeline", "celery.worker.strategy", "celery.app.trace"}
    assert {line["workflow"] for line in committed} == {"shop"}
    received = [line for line in lines if line["message"].startswith("Task pipeline.mutate")]
    assert received
    assert SECRET not in watched.worker.log.read_text()


def test_the_lines_of_beat_are_json_as_well(watched: Watched) -> None:
    def written() -> list[dict[str, Any]]:
        lines = _lines(watched.beat)
        assert "celery.beat" in {line["logger"] for line in lines}
        return lines

    lines = wait_for(written, within=60)
    assert all({"time", "level", "message"} <= set(line) for line in lines)


def test_without_an_endpoint_no_process_of_a_worker_imports_the_tracing_sdk(watched: Watched) -> None:
    imported = watched.worker.log.read_text()
    assert "opentelemetry.trace" in imported  # what is imported is seen
    for name in ("sdk.trace", "instrumentation", "exporter"):  # the client of Redis imports the SDK of metrics
        assert f"opentelemetry.{name}" not in imported


def _lines(node: Node) -> list[dict[str, Any]]:
    """Return the JSON lines of a node's log; Celery's banner and incomplete lines are skipped."""
    whole = node.log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
