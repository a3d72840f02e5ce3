"""Guards of real workers, each with everything else that could do its work switched off or far too slow."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from tests.support.installation import PROJECT, UNHURRIED, Installation, Node
from tests.support.relays import relayed
from tests.support.wait import wait_for

#: A lease that nobody waits for: what is recovered within a minute was not recovered because it lapsed.
LONG = {"PIPELINE_LEASE": "10m"}
#: The lines about what failed for the lack of a database, which are dropped otherwise.
EVERY_LINE = {"PIPELINE_LOG_LEVEL": "debug"}
_LEASED = "SELECT * FROM pipeline.runs WHERE status = 'active' AND lease_expires_at IS NOT NULL"


def begin(shop: Installation) -> None:
    """A worker with a long lease, and a beat; they stay from test to test."""
    shop.worker(**LONG, **EVERY_LINE)
    shop.beat()


@contextmanager
def away(nodes: Installation, *, by_its_clock: timedelta = timedelta(0)) -> Iterator[None]:
    """The database is away: every connection to it is ended, and no other is let in. Its clock may be moved forward."""
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
            if by_its_clock:
                nodes.ahead += by_its_clock
                offset = f"'{nodes.ahead.total_seconds()} seconds'"
                connection.execute(text(f'ALTER DATABASE "{url.database}" SET pipeline.clock_offset = {offset}'))
        finally:
            connection.execute(text(f"{lets_in} true"))


def wait_for_text(node: Node, words: str, *, after: int = 0) -> None:
    wait_for(lambda: words in node.log.read_text()[after:], within=60, why=f"{words!r} in the log of {node.name}")


def test_runs_of_a_dead_process_are_recovered_before_their_lease_lapses_even_if_the_database_was_away(
    shop: Installation,
) -> None:
    worker = shop.nodes[0]
    shop.recorder.shut("next")
    shop.publish(5)
    shop.recorder.wait_at("next")
    said = len(worker.log.read_text())
    with away(shop):
        worker.kill_children()
        wait_for_text(worker, "the watchdog failed to recover_dead_children", after=said)
    shop.recorder.open("next")
    shop.all_done_once()


def test_leases_are_extended_again_when_a_database_that_was_away_is_back(shop: Installation) -> None:
    worker = shop.nodes[0]
    shop.recorder.shut("next")
    shop.publish(5)
    shop.recorder.wait_at("next")
    said = len(worker.log.read_text())
    with away(shop):
        wait_for_text(worker, "leases could not be extended", after=said)
    before = {run.id: run.lease_expires_at for run in shop.ask(_LEASED)}
    assert before
    wait_for(
        lambda: all(run.lease_expires_at > before[run.id] for run in shop.ask(_LEASED) if run.id in before),
        within=60,
        why="every lease extended",
    )
    shop.recorder.open("next")
    shop.all_done_once()
    assert {run.status for run in shop.runs() if run.id in before} == {"committed"}


def test_after_an_outage_of_ten_minutes_every_order_is_done_once(shop: Installation) -> None:
    """By the clock of the database: leases, deadlines and heartbeats of before are long over when it is back."""
    worker = shop.nodes[0]
    shop.recorder.shut("after")
    shop.publish(5)
    shop.recorder.wait_at("after")
    said = len(worker.log.read_text())
    with away(shop, by_its_clock=timedelta(minutes=10)):
        wait_for_text(worker, "leases could not be extended", after=said)
    shop.db.engine.dispose()
    shop.publish(5)
    shop.recorder.open("after")
    shop.all_done_once()
    assert all(node.process.poll() is None for node in shop.nodes), "no node ended"


def test_with_a_database_that_answers_late_every_order_is_done_once(nodes: Installation) -> None:
    """Every piece of data is late by 20 ms, in both directions."""
    url = make_url(nodes.database_url)
    with relayed(url.port or 5432, late=0.02) as port:
        slow = {"PIPELINE_DATABASE_URL": url.set(port=port).render_as_string(hide_password=False)}
        nodes.worker("--pool=threads", "--concurrency=4", **UNHURRIED, **slow)
        nodes.beat(**slow)
        nodes.publish(5)
        nodes.all_done_once()
        nodes.end_nodes()


def test_a_lost_database_is_two_lines_in_the_log_of_a_worker_and_no_traceback(nodes: Installation) -> None:
    """Lost and back, whatever fails in between: heartbeats, sweeps, tasks of two processes, outcomes of calls."""
    worker = nodes.worker(**LONG)
    nodes.beat()
    nodes.recorder.shut("after")
    nodes.publish(5)
    nodes.recorder.wait_at("after")
    with away(nodes):
        wait_for_text(worker, "the database is lost")
        nodes.recorder.open("after")
        for _ in range(4):
            nodes.ring()
        lost_at = worker.log.read_text().index("the database is lost")
        wait_for(
            lambda: len(re.findall(r"Task pipeline\.\S+ received", worker.log.read_text()[lost_at:])) >= 15,
            within=60,
            why="tasks without a database",
        )
    wait_for_text(worker, "the database is back after ")
    nodes.all_done_once()
    log = worker.log.read_text()
    assert (log.count("the database is lost"), log.count("the database is back after ")) == (1, 1), log
    assert "Traceback" not in log
    assert "trying again" not in log


RING = """
from uuid import uuid4
from pipeline.background.messages import DispatchMessage
from pipeline.domain.states import PhaseTask
from pipeline.tasks import messages

messages.dispatch(DispatchMessage(task=PhaseTask.PREPARE, run_ids=(str(uuid4()),)))
messages.wake_workflow("shop")
"""


def test_an_unreachable_broker_does_not_fail_the_transition_that_dispatches(installation: Installation) -> None:
    environ = {**installation.environ, "PIPELINE_BROKER_URL": "redis://127.0.0.1:1/0"}
    rung = subprocess.run(
        [sys.executable, "-c", RING], env=environ, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )
    assert rung.returncode == 0, rung.stderr
    assert rung.stderr.count("the broker cannot be reached") == 2
