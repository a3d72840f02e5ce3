"""Guards of real workers, each with everything else that could do its work switched off or far too slow."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import pytest
from celery import Celery, chain
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from tests.support.cluster import PROJECT, Installation, Node
from tests.support.recorder import GATES
from tests.support.wait import wait_for

#: A lease that nobody waits for: what is recovered within a minute was not recovered because it lapsed.
LONG = {"PIPELINE_LEASE": "10m"}
_TICKED = "SELECT FROM pipeline.sweeps WHERE name = 'tick' AND last_run_at > pipeline.clock() - interval '5 min'"
_LEASED = "SELECT * FROM pipeline.runs WHERE status = 'active' AND lease_expires_at IS NOT NULL"


@pytest.fixture
def shop(nodes: Installation) -> Iterator[Installation]:
    """An installation without nodes, whose gates are open again after the test, however it ends."""
    yield nodes
    for gate in GATES:
        nodes.recorder.open(gate)


@contextmanager
def away(nodes: Installation) -> Iterator[None]:
    """The database is away: every connection to it is ended, and no other is let in."""
    url = make_url(nodes.database_url)
    server = create_engine(url.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT")
    lets_in = f'ALTER DATABASE "{url.database}" WITH ALLOW_CONNECTIONS'
    with server.connect() as connection:
        connection.execute(text(f"{lets_in} false"))
        try:
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
                {"name": url.database},
            )
            yield
        finally:
            connection.execute(text(f"{lets_in} true"))


def wait_for_words(node: Node, words: str) -> None:
    wait_for(lambda: words in node.log.read_text(), within=60, why=f"{words!r} in the log of {node.name}")


def poke(nodes: Installation, workflow: str) -> None:
    """Ring as a service does that has just published."""
    Celery(broker=nodes.broker_url).send_task("pipeline.schedule", args=(workflow,), queue="pipeline.schedule")


def test_what_a_dead_process_held_is_recovered_before_its_lease_lapses_even_if_the_database_was_away(
    shop: Installation,
) -> None:
    worker = shop.worker(**LONG)
    shop.beat()
    shop.recorder.shut("next")
    shop.publish(5)
    shop.recorder.wait_at("next")
    with away(shop):
        worker.kill_children()
        wait_for_words(worker, "the guardian failed to see_children")
    shop.recorder.open("next")
    shop.all_done_once(within=60)


def test_leases_are_extended_again_when_a_database_that_was_away_is_back(shop: Installation) -> None:
    worker = shop.worker(PIPELINE_LEASE="20s")
    shop.beat()
    shop.recorder.shut("next")
    shop.publish(5)
    shop.recorder.wait_at("next")
    with away(shop):
        wait_for_words(worker, "leases could not be extended")
    before = {run.id: run.lease_expires_at for run in shop.ask(_LEASED)}
    assert before
    wait_for(
        lambda: all(run.lease_expires_at > before[run.id] for run in shop.ask(_LEASED) if run.id in before),
        within=15,
        why="every lease extended",
    )
    shop.recorder.open("next")
    shop.all_done_once(within=60)
    assert {run.status for run in shop.runs() if run.id in before} == {"committed"}


def test_what_waits_for_a_place_is_started_by_the_end_of_a_run_however_rare_the_tick(shop: Installation) -> None:
    shop.worker(PIPELINE_TICK="1h")
    wait_for(lambda: shop.ask(_TICKED), within=60, why="the one tick of this hour is over")
    shop.publish(150)  # more than the workflow has places
    poke(shop, "shop")
    shop.all_done_once(within=60)


def test_a_chain_ends_with_the_last_run_that_had_something_to_do(shop: Installation) -> None:
    worker = shop.worker("--pool=solo", PIPELINE_SILENCE="10m")  # nothing is rung for twice
    shop.beat()
    app, nobody = Celery(broker=shop.broker_url), [str(uuid4())]
    phases = ("pipeline.prepare", "pipeline.mutate", "pipeline.next")
    chain(*(app.signature(name, args=(nobody,), immutable=True, queue=name) for name in phases)).apply_async()
    wait_for_words(worker, "Task pipeline.prepare")
    shop.publish(1)
    shop.all_done_once(within=60)
    assert worker.log.read_text().count("Task pipeline.prepare") >= 2
    mutates = [line for line in worker.log.read_text().splitlines() if "Task pipeline.mutate" in line]
    assert len([line for line in mutates if "received" in line]) == 1


RING = """
from uuid import uuid4
from pipeline.schedules.report import Message
from pipeline.tasks import chains

chains.send(Message(task="pipeline.prepare", ids=(str(uuid4()),)))
chains.poke("shop")
"""


def test_a_broker_that_cannot_be_reached_is_no_error_of_the_work_that_rings(shop: Installation) -> None:
    environ = {**shop.environ, "PIPELINE_BROKER_URL": "redis://127.0.0.1:1/0"}
    rung = subprocess.run(
        [sys.executable, "-c", RING], env=environ, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )
    assert rung.returncode == 0, rung.stderr
    assert rung.stderr.count("the broker cannot be reached") == 2
