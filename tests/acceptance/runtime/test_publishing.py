"""Events over the broker from a foreign app, and from a shell: published once, and never dropped."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from pipeline.runtime.registry import Registry
from pipeline.runtime.sync import sync
from tests.support.cluster import PROJECT, Installation
from tests.support.wait import wait_for


@pytest.fixture
def theirs(nodes: Installation) -> Celery:
    """A Celery app that imports nothing of ours."""
    return Celery("theirs", broker=nodes.broker_url)


def order(message_id: str) -> dict[str, Any]:
    return {"topic": "orders", "message_id": message_id, "payload": {}}


def test_a_foreign_app_publishes_by_name_and_every_fact_is_one_event(nodes: Installation, theirs: Celery) -> None:
    nodes.worker(PIPELINE_TICK="1h")
    for _ in range(2):
        events = [order(f"theirs {n}") for n in range(5)]
        theirs.send_task("pipeline.publish", args=["shop", events], queue="pipeline.schedule")
    nodes.published += [f"theirs {n}" for n in range(5)]
    nodes.all_done_once()


def test_what_cannot_be_published_is_kept_for_a_person_and_what_can_is_published(
    nodes: Installation, theirs: Celery
) -> None:
    nodes.worker(PIPELINE_TICK="1h")
    theirs.send_task(
        "pipeline.publish", args=["shop", [{"topic": "orderz", "message_id": "x"}]], queue="pipeline.schedule"
    )
    theirs.send_task("pipeline.publish", args=["shop", "nonsense"], queue="pipeline.schedule")
    theirs.send_task("pipeline.publish", args=["shop", [order("fine")]], queue="pipeline.schedule")
    nodes.published.append("fine")
    nodes.all_done_once()
    with redis.Redis.from_url(nodes.broker_url) as client:
        wait_for(lambda: client.llen("pipeline.refused") == 2, why="both refused ones kept")
        kept = [json.loads(entry) for entry in client.lrange("pipeline.refused", 0, -1)]
    assert any("orderz" in entry["headers"]["refused"] for entry in kept)


def test_a_shell_publishes_one_event_or_a_file_of_them(nodes: Installation, tmp_path: Path) -> None:
    nodes.worker()
    nodes.beat()
    one = pipeline(nodes, "publish", "shop", "orders", "{}", "--message-id", "typed")
    assert (one.returncode, one.stdout) == (0, "1 new, 0 repeated, 0 replaced\n"), one.stderr
    lines = "\n".join(json.dumps({"message_id": f"line {n}", "payload": {}}) for n in range(10))
    (tmp_path / "orders.jsonl").write_text(lines)
    many = pipeline(nodes, "publish", "shop", "orders", "--file", str(tmp_path / "orders.jsonl"))
    assert many.stdout == "10 new, 0 repeated, 0 replaced\n", many.stderr
    again = pipeline(nodes, "publish", "shop", "orders", "--file", "-", stdin=lines)
    assert again.stdout == "0 new, 10 repeated, 0 replaced\n", again.stderr
    nodes.published += ["typed", *(f"line {n}" for n in range(10))]
    nodes.all_done_once()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shop", "orders"], "Give either one payload or --file"),
        (["shop", "orders", "{}"], "A payload needs --message-id"),
        (["shop", "orders", "{", "--message-id", "x"], "The payload is no JSON"),
        (["shop", "orderz", "{}", "--message-id", "x"], "There is no topic of workflow 'shop' named 'orderz'"),
        (["shop", "orders", "--file", "-"], "Line 1 is a list; expected an object with message_id"),
    ],
)
def test_a_shell_that_publishes_nonsense_is_told_what_was_expected(
    nodes: Installation, arguments: list[str], words: str
) -> None:
    sync(nodes.db, Registry.load(["tests.support.shop"]))
    done = pipeline(nodes, "publish", *arguments, stdin="[1]\n")
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def pipeline(nodes: Installation, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).parent / "pipeline"), *arguments],
        env={**os.environ, "PIPELINE_DATABASE_URL": nodes.database_url},
        cwd=PROJECT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
