"""Real workers whose broker or database fails them, or that are asked to stop: each exit code is a documented one."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from sqlalchemy.engine import make_url

from pipeline.config import EXIT_RESTART
from pipeline.embedded import servers
from pipeline.tasks import process, signals
from pipeline.testing import Fault, FaultyProxy, is_complete_postgres_messages
from tests.support import databases
from tests.support.installation import Installation, alone
from tests.support.wait import wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def shop(embedded: servers.Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """An installation with a Redis of its own, and no nodes."""
    with alone(embedded.database_url, tmp_path_factory.mktemp("exits")) as found:
        yield found


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_that_is_interrupted_ends_with_0(shop: Installation, pool: str) -> None:
    worker = shop.worker(f"--pool={pool}", "--concurrency=1")
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(timeout=60) == 0


def test_a_worker_whose_redis_becomes_read_only_is_to_be_started_again(shop: Installation) -> None:
    worker = shop.worker()
    redis.Redis.from_url(shop.broker_url).replicaof("127.0.0.1", "1")  # as a failover leaves the old primary
    assert worker.process.wait(timeout=120) == EXIT_RESTART
    assert "let its supervisor start it again" in worker.log.read_text()


def test_a_worker_that_finds_a_full_redis_is_to_be_started_again(shop: Installation) -> None:
    redis.Redis.from_url(shop.broker_url).config_set("maxmemory", "1")
    command = ["worker", "--loglevel=INFO", "--hostname=full@here", "--concurrency=1"]
    worker = shop._node("full", command, "", {})
    assert worker.process.wait(timeout=120) == EXIT_RESTART


def test_a_worker_that_cannot_be_set_up_is_to_be_started_again(shop: Installation, tmp_path: Path) -> None:
    command = ["worker", f"--logfile={tmp_path / 'missing' / 'worker.log'}", "--hostname=mute@here"]
    worker = shop._node("mute", command, "", {})
    assert worker.process.wait(timeout=120) == EXIT_RESTART
    assert "cannot be set up" in worker.log.read_text()


def test_a_database_that_vanishes_at_any_statement_of_the_start_asks_for_a_restart(
    embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with databases.clone_database(embedded.database_url, f"vanishing_{os.getpid()}") as url:
        server = make_url(url)
        assert server.host is not None
        assert server.port is not None
        with FaultyProxy(server.host, server.port, is_complete=is_complete_postgres_messages) as proxy:
            environ = {
                "PIPELINE_DATABASE_URL": server.set(host=proxy.host, port=proxy.port).render_as_string(False),
                "PIPELINE_BROKER_URL": embedded.broker_url,
                "PIPELINE_WORKFLOWS": "tests.support.load_workflow",
            }
            for name, value in environ.items():
                monkeypatch.setenv(name, value)
            codes = list(iter(partial(start_over, proxy, count(), monkeypatch), None))
    assert len(codes) > 20, "the start was cut off in many places"
    assert set(codes) == {EXIT_RESTART}


def start_over(proxy: FaultyProxy, passing: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a worker whose database is away after so many requests. Return the exit code; None once it has started."""
    monkeypatch.setattr(process, "_processes", {})
    proxy.will(*[Fault.PASSES] * next(passing), *[Fault.RESETS_BEFORE] * 50)
    try:
        signals.check_startup(SimpleNamespace(pool_cls=SimpleNamespace))
    except SystemExit as ended:
        return ended.code
    finally:
        process.current_process().db.dispose()
        proxy.restore()
    return None


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGQUIT])
def test_a_busy_worker_that_is_interrupted_again_and_again_ends_with_0_or_by_the_signal(
    shop: Installation, pool: str, kind: signal.Signals
) -> None:
    worker = shop.worker(f"--pool={pool}", "--concurrency=1")
    shop.recorder.shut("prepare")
    shop.publish(1)
    shop.ring()
    shop.recorder.wait_at("prepare")

    def interrupt() -> bool:
        if worker.process.poll() is None:
            worker.process.send_signal(kind)
        return worker.process.poll() is not None

    wait_for(interrupt, within=60, every=0.2, why="the end of the worker")
    assert worker.process.wait(timeout=60) in (0, -kind), worker.log.read_text()[-2000:]
