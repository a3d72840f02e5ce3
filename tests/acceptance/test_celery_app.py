"""`celery -A pipeline` against a real broker: messages reach their queue, and a worker consumes them all."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from pipeline.embedded import servers
from pipeline.store.database import Database
from tests.support.environ import clean_environ
from tests.support.wait import wait_for

QUEUES = {"pipeline.prepare", "pipeline.mutate", "pipeline.next", "pipeline.schedule"}
SEND = """
import sys
from pipeline.celery import app
for name in sys.argv[1:]:
    app.send_task(name)
"""


@pytest.fixture
def environ(tmp_path: Path, db: Database, database_url: str) -> Iterator[dict[str, str]]:
    """The environment of a process with a broker of its own and the database of this test process, which is emptied."""
    given = clean_environ() | {"PIPELINE_DATABASE_URL": database_url, "PIPELINE_WORKFLOWS": "examples.receipts"}
    with servers.running(tmp_path / "home", given) as found:
        yield given | {"PIPELINE_BROKER_URL": found.broker_url}
    servers.remove(tmp_path / "home")


def celery(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", "pipeline", *arguments]


def test_each_message_reaches_one_queue_and_no_other(environ: dict[str, str]) -> None:
    tasks = ["pipeline.prepare", "pipeline.mutate", "pipeline.mutate", "pipeline.next", "pipeline.tick"]
    subprocess.run([sys.executable, "-c", SEND, *tasks], env=environ, check=True, timeout=60)
    with redis.Redis.from_url(environ["PIPELINE_BROKER_URL"]) as client:
        waiting = {name: client.llen(name) for name in QUEUES}
    assert waiting == {
        "pipeline.prepare": 1,
        "pipeline.mutate": 2,
        "pipeline.next": 1,
        "pipeline.schedule": 1,
    }


def test_a_worker_without_further_options_consumes_every_queue(environ: dict[str, str], tmp_path: Path) -> None:
    command = celery("worker", "--concurrency=1", "--hostname=only@here")
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        consumed = wait_for(lambda: consumed_queues(environ), within=90)
        assert consumed == QUEUES | {"pipeline.publish", "pipeline.reconcile.receipts.1"}
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=60) == 0, (tmp_path / "worker.log").read_text()


def consumed_queues(environ: dict[str, str]) -> set[str]:
    """What the workers that answer say they consume; empty while none answers."""
    with Celery(broker=environ["PIPELINE_BROKER_URL"]) as asking:
        answers = asking.control.inspect(timeout=1).active_queues() or {}
    return {queue["name"] for queues in answers.values() for queue in queues}
