"""Events over the broker from a foreign app, and from a shell: published once, and never dropped."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.cli.main import main
from pipeline.store.database import Statement
from tests.support import dead_letter_scenario, forked_python
from tests.support.installation import PROJECT, RARE, Installation
from tests.support.wait import wait_for


def begin(shop: Installation) -> None:
    """Start a worker that stays from test to test and receives only what a test sends: every sweep is an hour away."""
    shop.sweep_nothing()
    shop.worker(**RARE)


@pytest.fixture
def theirs(shop: Installation) -> Celery:
    """A Celery app that imports nothing of ours."""
    return Celery("theirs", broker=shop.broker_url)


@pytest.fixture
def broker(shop: Installation) -> Iterator[redis.Redis]:
    """The broker, with nothing kept as refused by a test before."""
    with redis.Redis.from_url(shop.broker_url) as client:
        client.delete("pipeline.dead_letters")
        yield client


_WAITING = Statement[Any]("SELECT FROM pg_locks WHERE NOT granted AND relation = 'pipeline.topics'::regclass")


def order(message_id: str) -> dict[str, Any]:
    return {"topic": "orders", "message_id": message_id, "payload": {}}


def test_a_foreign_app_publishes_by_name_and_every_fact_is_one_event(shop: Installation, theirs: Celery) -> None:
    for _ in range(2):
        events = [order(f"theirs {n}") for n in range(5)]
        theirs.send_task("pipeline.publish", args=["shop", events], queue="pipeline.publish")
    shop.published += [f"theirs {n}" for n in range(5)]
    shop.all_done_once()


def test_events_in_the_broker_survive_celery_purge(shop: Installation, theirs: Celery, broker: redis.Redis) -> None:
    names = [f"purged or not {n}" for n in range(4)]
    shop.nodes[0].freeze()
    try:
        for name in names:
            theirs.send_task("pipeline.publish", args=["shop", [order(name)]], queue="pipeline.publish")
            theirs.send_task("pipeline.schedule", args=["shop"], queue="pipeline.schedule")
        done = forked_python.run("-A", "pipeline", "purge", "--force", module="celery", environ=shop.environ)
        assert done.returncode == 0, done.stderr
        assert (broker.llen("pipeline.schedule"), broker.llen("pipeline.publish") > 0) == (0, True)
    finally:
        shop.nodes[0].thaw()
    shop.published += names
    shop.all_done_once()


def test_events_that_cannot_be_published_are_kept_for_an_operator_and_the_others_are_published(
    shop: Installation, theirs: Celery, broker: redis.Redis
) -> None:
    theirs.send_task(
        "pipeline.publish", args=["shop", [{"topic": "orderz", "message_id": "x"}]], queue="pipeline.schedule"
    )
    theirs.send_task("pipeline.publish", args=["shop", "nonsense"], queue="pipeline.schedule")
    theirs.send_task("pipeline.publish", args=["shop", [order("fine")]], queue="pipeline.schedule")
    shop.published.append("fine")
    shop.all_done_once()
    wait_for(lambda: broker.llen("pipeline.dead_letters") == 2, within=60, why="both refused ones kept")
    kept = [json.loads(entry) for entry in broker.lrange("pipeline.dead_letters", 0, -1)]
    assert any("orderz" in entry["headers"]["dead-letter-reason"] for entry in kept)


#: Calls that nobody could carry out, and a word that the reason of each must have.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"kwargs": {"workflow": "shop", "event": [order("w1")]}}, "event"),
    "too much": ({"kwargs": {"workflow": "shop", "events": [order("w2")], "topic": "orders"}}, "topic"),
    "too little": ({"args": ["shop"]}, "events"),
    "number": ({"args": [5, [order("w3")]]}, "workflow name"),
    "NUL": ({"args": ["shop\0", [order("w4")]]}, "workflow name"),
}


def test_every_kind_of_wrong_call_is_kept_with_its_reason(
    shop: Installation, theirs: Celery, broker: redis.Redis
) -> None:
    for given, _ in WRONG.values():
        theirs.send_task("pipeline.publish", queue="pipeline.schedule", **given)
    wait_for(lambda: broker.llen("pipeline.dead_letters") == len(WRONG), within=60, why="all of them kept")
    reasons = [
        json.loads(entry)["headers"]["dead-letter-reason"] for entry in broker.lrange("pipeline.dead_letters", 0, -1)
    ]
    for name, (_, word) in WRONG.items():
        assert any(word in reason for reason in reasons), name


@pytest.mark.parametrize(
    ("harm", "cure"),
    [
        ("ALTER DATABASE {name} SET default_transaction_read_only = on", "ALTER DATABASE {name} RESET ALL"),
        ("ALTER TABLE pipeline.topics RENAME TO gone", "ALTER TABLE pipeline.gone RENAME TO topics"),
    ],
    ids=["read-only", "a table is away"],
)
def test_events_sent_while_the_database_cannot_be_used_are_published_once_it_can(
    shop: Installation, theirs: Celery, harm: str, cure: str
) -> None:
    worker = shop.nodes[0]
    changed(shop, harm)
    try:
        said = len(worker.log.read_text())
        fact = f"meanwhile {len(shop.published)}"
        theirs.send_task("pipeline.publish", args=["shop", [order(fact)]], queue="pipeline.schedule")
        wait_for(lambda: "they are sent again" in worker.log.read_text()[said:], within=60)
    finally:
        changed(shop, cure)
    shop.published.append(fact)
    shop.all_done_once()


_CHANGED = """
DO $$ BEGIN
  {statement};
  COMMIT;
  PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
  WHERE datname = current_database() AND pid <> pg_backend_pid();
END $$
"""


def changed(shop: Installation, statement: str) -> None:
    """Change the database over a connection of its own, and end all others, as a failover does.

    Both at once: work that begins in between and loses its connection would not be repeated for an hour.
    """
    name = make_url(shop.database_url).database
    engine = create_engine(shop.database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("SET default_transaction_read_only = off"))
        connection.execute(text(_CHANGED.format(statement=statement.format(name=f'"{name}"'))))


def test_a_full_broker_keeps_the_messages_it_has(shop: Installation, theirs: Celery, broker: redis.Redis) -> None:
    worker = shop.nodes[0]
    broker.config_set("maxmemory-policy", "noeviction")
    said = len(worker.log.read_text())
    with shop.db.transaction() as tx:
        tx.execute(text("LOCK TABLE pipeline.topics IN ACCESS EXCLUSIVE MODE"))
        theirs.send_task("pipeline.publish", args=["shop", [{**order("x"), "topic": "z"}]], queue="pipeline.schedule")
        wait_for(lambda: tx.all(_WAITING), within=60, why="the worker has the message and asks for the topics")
        broker.config_set("maxmemory", 1)
    try:
        wait_for(lambda: "cannot be published" in worker.log.read_text()[said:], within=60)
    finally:
        broker.config_set("maxmemory", 0)
    wait_for(lambda: broker.llen("pipeline.dead_letters") == 1, within=60, why="it is kept")


def test_dead_letters_are_listed_sent_back_and_dropped(shop: Installation, broker: redis.Redis) -> None:
    dead_letter_scenario.play(shop)
    wait_for(lambda: broker.hlen("pipeline.unacked") == 0, why="nothing is left in anybody's hands")


def test_an_unreachable_broker_is_reported_in_a_sentence(shop: Installation) -> None:
    away = shop.broker_url.rpartition("@")[0] + "@127.0.0.1:1/0"
    with dead_letter_scenario.shell(shop, PIPELINE_BROKER_URL=away) as refused:
        code, said = refused("list")
    assert (code, "The broker failed" in said, "Traceback" in said) == (75, True, False), said


Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shell(shop: Installation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """`pipeline …` in this process: its exit code, its output and its complaints."""

    def typed(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setenv("PIPELINE_DATABASE_URL", shop.database_url)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return typed


def test_a_shell_publishes_one_event_or_a_file_of_them(shop: Installation, shell: Shell, tmp_path: Path) -> None:
    one = shell("publish", "shop", "orders", "{}", "--message-id", "typed")
    assert one[:2] == (0, "1 new, 0 repeated, 0 replaced\n"), one
    lines = "\n".join(json.dumps({"message_id": f"line {n}", "payload": {}}) for n in range(10))
    (tmp_path / "orders.jsonl").write_text(lines)
    many = shell("publish", "shop", "orders", "--file", str(tmp_path / "orders.jsonl"))
    assert many[:2] == (0, "10 new, 0 repeated, 0 replaced\n"), many
    again = really_typed(shop, "publish", "shop", "orders", "--file", "-", stdin=lines)
    assert again.stdout == "0 new, 10 repeated, 0 replaced\n", again.stderr
    shop.published += ["typed", *(f"line {n}" for n in range(10))]
    shop.ring()
    shop.all_done_once()


def really_typed(shop: Installation, *arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, at the end of a pipe."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "pipeline"), *arguments],
        env={**os.environ, "PIPELINE_DATABASE_URL": shop.database_url},
        cwd=PROJECT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shop", "orders"], "Expected either one payload or --file"),
        (["shop", "orders", "{}"], "A payload needs --message-id"),
        (["shop", "orders", "{", "--message-id", "x"], "The payload is no JSON"),
        (["shop", "orderz", "{}", "--message-id", "x"], "There is no topic of workflow 'shop' named 'orderz'"),
        (["shop", "orders", "--file", "-"], "Line 1 is a list; expected an object with message_id"),
    ],
)
def test_wrong_input_from_a_shell_is_refused_with_what_was_expected(
    shell: Shell, arguments: list[str], words: str
) -> None:
    code, _, said = shell("publish", *arguments, stdin="[1]\n")
    assert (code, words in said) == (5 if "There is no" in words else 2, True), said
