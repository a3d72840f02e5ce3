"""Pipeline in the Celery app of a shop: its tasks behave as before, and ours are as durable as in our own app."""

import json
import os
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from pipeline.client import BrokerClient, EventInput
from pipeline.config import EXIT_UNSAFE
from pipeline.embedded import servers
from pipeline.store import migrate
from pipeline.store.database import Database
from tests.acceptance import test_killed_workers
from tests.acceptance.test_killed_children import (
    test_children_killed_while_their_handlers_or_calls_are_busy_lose_and_repeat_nothing,  # noqa: F401
)
from tests.acceptance.test_server_crashes import (
    home,  # noqa: F401
    test_a_redis_that_comes_back_empty_costs_time_and_nothing_else,  # noqa: F401
)
from tests.acceptance.test_unreliable_messages import (
    test_three_of_ten_messages_dropped_doubled_delayed_and_overtaken_lose_and_repeat_nothing,  # noqa: F401
)
from tests.support import databases, forked_python
from tests.support.environ import clean_environ
from tests.support.installation import PROJECT, RARE, Installation, Node, installed
from tests.support.ports import free_port
from tests.support.wait import wait_for

HOST = "tests.support.host_app"
USE = "import json; from tests.support import host_app; print(json.dumps(host_app.use()))"


@pytest.fixture(scope="module")
def installation(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:  # noqa: F811
    """An installation in the shop's app, on servers that tests may kill."""
    with servers.running(home, clean_environ()) as urls:
        migrate.upgrade(Database.connect_unpooled(urls.database_url))
        with installed(tmp_path_factory.mktemp("nodes"), urls.database_url, urls.broker_url, HOST) as found:
            yield found


def begin(shop: Installation) -> None:
    """A worker of the shop's app and a beat; they stay from test to test."""
    shop.worker("--concurrency=2", "-E")
    shop.beat()


def used(environ: dict[str, str]) -> Any:
    """Call the tasks of the shop as a service does, and return what it got."""
    ended = subprocess.run(
        [sys.executable, "-c", USE], env=environ, cwd=PROJECT, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def behaviour(found: Installation, broker_url: str, *, installs: bool) -> dict[str, Any]:
    """Run a worker with an embedded beat on a broker of its own, and everything that can be seen of it."""
    name = f"compared{installs}"
    environ = found.environ | {"HOST_BROKER": broker_url, "PIPELINE_BROKER_URL": "", "HOST_INSTALLS": "1" * installs}
    schedule = found.home / name
    options = ["-B", f"--schedule={schedule}", "--concurrency=2", "--loglevel=INFO", "-E", f"--hostname={name}@here"]
    worker = Node(name, "celery", ["-A", HOST, "worker", *options], environ, found.home / f"{name}.log")
    found.nodes.append(worker)
    worker.wait_until_ready()
    got = used(environ | {"HOST_NODE": f"{name}@here"})
    with redis.Redis.from_url(broker_url) as client:
        wait_for(lambda: b'["beat", "clock"]' in client.smembers("seen"), within=60, why="the shop's beat entry")
        code = worker.stop()
        seen = sorted(client.smembers("seen"))
        assert not client.exists("pipeline.dead_letters"), "Celery discards unknown tasks of the shop, as before"
    lines = worker.log.read_text().splitlines()
    assert any(line.startswith("SHOP Task shop.mail") for line in lines), "the shop's log format"
    return {"code": code, "got": got, "seen": seen}


def test_the_tasks_of_the_shop_behave_as_without_us(installation: Installation) -> None:
    installation.begin_anew()
    server = installation.broker_url.rpartition("/")[0]
    with ThreadPoolExecutor(2) as both:
        without, beside = both.map(
            lambda n: behaviour(installation, f"{server}/{n}", installs=bool(n - 8)), (8, 9), timeout=280
        )
    assert without["got"]["deliveries"] == {"shop.dies": 1, "shop.survives": 2}
    assert without["got"]["worker"]["prefetch"] == 3 * 2
    assert beside == without


def test_a_worker_with_a_setting_that_contradicts_ours_does_not_start(installation: Installation) -> None:
    refusals = {
        "visibility_timeout 30 s": {"HOST_VISIBILITY_TIMEOUT": "30"},
        "expected 'json' in it": {"HOST_ALSO_ACCEPTS": "yaml"},
        "is not the broker of the app 'shop'": {"PIPELINE_BROKER_URL": "redis://127.0.0.1:1/0"},
    }
    environ = installation.environ
    for given in refusals.values():
        environ |= given

    def refused(*options: str) -> str:
        command = ("-A", HOST, "worker", *options)
        ended = forked_python.run(*command, module="celery", environ=environ, timeout=120, has_ours=False)
        assert ended.returncode == EXIT_UNSAFE, ended.stderr
        return ended.stderr

    said = refused("--pool=threads")
    assert all(sentence in said for sentence in refusals), said
    assert "PIPELINE_MUTATE_TIME_LIMIT" in said


def test_a_worker_that_reads_none_of_our_queues_is_left_alone(installation: Installation) -> None:
    installation.begin_anew()
    worker = installation.worker("-Q", "shop", "--pool=solo", PIPELINE_DATABASE_URL="postgresql://127.0.0.1:1/none")
    assert worker.stop() == 0


@pytest.mark.skipif(find_spec("django_celery_beat") is None, reason="needs the package django-celery-beat")
def test_our_beat_entries_stand_beside_those_of_the_shop_in_the_tables_of_django_celery_beat(
    installation: Installation, tmp_path: Path
) -> None:
    installation.begin_anew()
    file = tmp_path / "beat.sqlite3"
    (tmp_path / "beat_settings.py").write_text(
        "SECRET_KEY, USE_TZ, INSTALLED_APPS = 'none', True, ['django_celery_beat']\n"
        f"DATABASES = {{'default': {{'ENGINE': 'django.db.backends.sqlite3', 'NAME': {str(file)!r}}}}}\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    django = {"DJANGO_SETTINGS_MODULE": "beat_settings", "PYTHONPATH": path, "PIPELINE_TICK": "5s"}
    migrate = [sys.executable, "-m", "django", "migrate", "--verbosity=0"]
    subprocess.run(migrate, env=installation.environ | django, cwd=PROJECT, check=True, timeout=120)
    installation.worker("--pool=threads", **RARE)
    installation.sweep_nothing()
    scheduler = {"HOST_BEAT_SCHEDULER": "django_celery_beat.schedulers:DatabaseScheduler"}
    beat = installation.beat(**django, **scheduler)
    wait_for(lambda: "Sending due task pipeline.tick" in beat.log.read_text(), within=60, why="our entry is sent")
    with sqlite3.connect(file) as tables:
        rows = tables.execute("SELECT name, task, queue FROM django_celery_beat_periodictask WHERE enabled")
    found = {name: (task, queue) for name, task, queue in rows}
    assert found["clock"] == ("shop.clock", None)
    assert found["pipeline.tick"] == ("pipeline.sweep.tick", "pipeline.schedule")
    with redis.Redis.from_url(installation.broker_url) as client:
        wait_for(lambda: b'["beat", "clock"]' in client.smembers("seen"), within=60, why="the shop's entry ran")
    installation.begin_anew()


def test_two_installations_share_a_redis_with_prefixes_of_their_own(
    installation: Installation, embedded: servers.Servers, tmp_path: Path
) -> None:
    installation.begin_anew()
    prefix = {"PIPELINE_QUEUE_PREFIX": "eu.shop"}
    with (
        databases.clone_database(embedded.database_url, f"beside_{os.getpid()}") as url,
        installed(tmp_path, url, installation.broker_url) as other,
    ):
        nodes = [installation.worker("--pool=threads", **prefix), other.worker("--pool=threads")]
        for each in (installation, other):
            each.publish(5)
        with Celery(broker=installation.broker_url) as service:
            BrokerClient(service, queue_prefix="eu.shop").publish(
                "shop", [EventInput(topic="orders", message_id="by broker", payload={})]
            )
            installation.published.append("by broker")
            service.send_task("no.such.task", queue="eu.shop.publish")
        for each in (installation, other):
            each.all_done_once()
        assert not [node for node in nodes if "belongs to another database" in node.log.read_text()]
        kept = wait_for(lambda: dead_letters(installation.environ | prefix), within=60, every=0.5)
        assert [letter["task"] for letter in kept] == ["no.such.task"]
        assert dead_letters(other.environ) == []
        other.end_nodes()
    installation.begin_anew()


def dead_letters(environ: dict[str, str]) -> Any:
    """List the dead letters by the command, with the app of the shop where it is installed."""
    app = {"PIPELINE_APP": HOST} if "HOST_INSTALLS" in environ else {}
    answer = forked_python.run("dead-letters", "list", "--json", environ=environ | app, has_ours=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_a_worker_of_the_shop_that_comes_back_after_its_lease_finds_its_writes_refused(shop: Installation) -> None:
    test_killed_workers.test_a_worker_that_comes_back_after_its_lease_finds_its_writes_refused(shop, "next")


def test_both_kinds_of_tasks_go_on_side_by_side_and_flower_shows_both(shop: Installation) -> None:
    port = free_port()
    flower = shop._node(
        "flower", ["flower", f"--port={port}", "--address=127.0.0.1"], "", {"FLOWER_UNAUTHENTICATED_API": "true"}
    )

    def answer(path: str) -> Any:
        assert flower.process.poll() is None, flower.log.read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as found:
            return json.loads(found.read())

    def sees_events() -> bool:
        try:
            return bool(answer("/api/tasks"))  # of the clock; Flower answers before it listens
        except OSError:
            return False

    wait_for(sees_events, within=90, every=0.3, why="Flower sees the tasks of the clock")
    shop.publish(3)
    some = "from tests.support import host_app as shop; shop.mail.delay('ada').get(timeout=60); shop.fails.delay()"
    subprocess.run([sys.executable, "-c", some], env=shop.environ, cwd=PROJECT, check=True, timeout=120)
    shop.all_done_once()
    expected = {"shop.mail", "shop.fails", "pipeline.prepare", "pipeline.mutate", "pipeline.next"}

    def shows_both() -> bool:
        names = {task["name"] for task in answer("/api/tasks").values()}
        assert names >= expected, names
        return True

    wait_for(shows_both, within=90, every=0.3, why="tasks of both in Flower")
    flower.stop()
    shop.nodes.remove(flower)
