"""`pipeline ingest` as real processes that are stopped, killed and robbed of their servers."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import text

from pipeline.config import EXIT_RESTART
from pipeline.embedded import servers
from pipeline.store.database import Database, Statement
from tests.factories import a_workflow
from tests.ingest.held_connection import held_at
from tests.ingest.ingest_processes import Programs, programs, published, wait_until_published
from tests.ingest.redis_streams import Place
from tests.support.rule import rule
from tests.support.wait import wait_for

GROUP = "pipeline"
_WAITING = Statement[Any]("""
SELECT a.pid FROM pg_stat_activity a
WHERE a.wait_event_type = 'Lock' AND a.datname = current_database() AND a.application_name = 'pipeline'
""")
_CONNECTED = Statement[Any]("SELECT pid FROM pg_stat_activity WHERE pid = ANY(:pids)")


@pytest.fixture
def run(place: Place, db: Database, database_url: str, tmp_path: Path) -> Iterator[Programs]:
    a_workflow(db)
    with programs(place, database_url, tmp_path) as found:
        yield found


def named(place: Place, entries: list[str]) -> dict[str, int]:
    """What must be published for these entries, each once."""
    return {f"{place.stream}:{entry}": 1 for entry in entries}


def test_its_log_lines_follow_the_settings(run: Programs, place: Place, db: Database) -> None:
    place.add({"n": 1})
    place.add_raw({"data": "{"})
    program = run.ingest("--on-poison", "leave", PIPELINE_LOG_FORMAT="json", PIPELINE_LOG_LEVEL="info")
    wait_until_published(db, 1)
    wait_for(lambda: "cannot be used" in program.output)
    assert program.stop() == 0
    lines = [json.loads(line) for line in program.output.splitlines() if line.startswith("{")]
    assert [line["events"] for line in lines if line.get("transition") == "event.published"] == [1]
    assert [line["level"] for line in lines if "cannot be used" in line["message"]] == ["error"]


@rule("Q-23")
def test_q17_killed_between_commit_and_acknowledgement_it_is_recovered_with_one_effect(
    run: Programs, place: Place, db: Database
) -> None:
    entries = place.add(*({"n": n} for n in range(50)))
    with held_at(place.url, b"XACK") as line:
        first = run.ingest(url=line.url)
        assert line.is_held.wait(60), first.output
        first.kill()
    assert published(db) == named(place, entries)
    assert list(place.pending(GROUP)) == entries
    place.make_stale(group=GROUP)
    assert "0 published, 50 published before" in run.recover()
    assert published(db) == named(place, entries)
    assert place.pending(GROUP) == {}


@rule("Q-23")
def test_q17_killed_between_read_and_commit_nothing_is_published_until_a_recovery(
    run: Programs, place: Place, db: Database
) -> None:
    entries = place.add(*({"n": n} for n in range(50)))
    with db.engine.begin() as blocker:
        blocker.execute(text("LOCK TABLE pipeline.events IN SHARE ROW EXCLUSIVE MODE"))
        first = run.patient().ingest()
        pids = wait_for(lambda: held_back(db), within=60)
        first.kill()
    wait_for(lambda: not connected(db, pids), why="Postgres has noticed")
    assert published(db) == {}
    assert list(place.pending(GROUP)) == entries
    place.make_stale(group=GROUP)
    assert "50 published, 0 published before" in run.recover()
    assert published(db) == named(place, entries)
    assert place.pending(GROUP) == {}


def held_back(db: Database) -> list[int]:
    """Processes of ours that wait for a lock in Postgres."""
    with db.transaction() as tx:
        return [row.pid for row in tx.all(_WAITING)]


def connected(db: Database, pids: list[int]) -> list[int]:
    """Those of these processes of Postgres that are still there, and with them what they hold."""
    with db.transaction() as tx:
        return [row.pid for row in tx.all(_CONNECTED, pids=pids)]


def test_a_database_that_drops_the_connection_ends_it_and_the_batch_stays_pending(
    run: Programs, place: Place, db: Database
) -> None:
    entries = place.add({"n": 1}, {"n": 2})
    with db.engine.begin() as blocker:
        blocker.execute(text("LOCK TABLE pipeline.events IN SHARE ROW EXCLUSIVE MODE"))
        program = run.patient().ingest()
        pid = wait_for(lambda: held_back(db), within=60)[0]
        with db.transaction() as tx:
            tx.all(Statement[Any]("SELECT pg_terminate_backend(:pid)"), pid=pid)
        assert program.process.wait(40) == 3, program.output
    assert "Traceback" not in program.output
    assert (published(db), list(place.pending(GROUP))) == ({}, entries)


@rule("Q-6")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_work_ends_it_in_order_with_nothing_pending(
    run: Programs, place: Place, db: Database, number: int
) -> None:
    place.add(*({"n": n} for n in range(2000)))
    program = run.patient().ingest("--batch", "20")
    wait_until_published(db, 100)
    assert program.stop(number) == 0, program.output
    count = len(published(db))
    assert f"{count} published, 0 published before, 0 not usable" in program.output
    assert place.pending(GROUP) == {}
    assert max(published(db).values()) == 1


def test_an_idle_process_ends_within_its_block_and_prints_zero_counts(run: Programs) -> None:
    program = run.installed().ingest("--block-ms", "500").wait_until_reading()
    assert program.stop() == 0
    assert "0 published, 0 published before, 0 not usable" in program.output


def test_a_signal_before_the_first_read_ends_it_in_order_with_nothing_read(
    run: Programs, place: Place, db: Database
) -> None:
    place.add({"n": 1})
    with db.engine.begin() as blocker:
        blocker.execute(text("LOCK TABLE pipeline.topics IN ACCESS EXCLUSIVE MODE"))
        program = run.ingest()
        wait_for(lambda: held_back(db), within=60)
        program.process.send_signal(signal.SIGTERM)
    assert program.process.wait(40) == 0, program.output
    assert "0 published, 0 published before, 0 not usable" in program.output
    assert (published(db), place.pending(GROUP)) == ({}, {})


def test_a_deleted_stream_ends_it_with_75_and_a_new_start_continues(run: Programs, place: Place, db: Database) -> None:
    program = run.ingest().wait_until_reading()
    place.raw.delete(place.stream)
    assert program.process.wait(40) == EXIT_RESTART, program.output
    assert "Check both names" in program.output
    entries = place.add({"n": 1})
    run.ingest()
    wait_until_published(db, 1)
    assert published(db) == named(place, entries)


@rule("Q-18")
def test_q12_a_redis_killed_in_mid_block_ends_it_with_75_and_a_new_start_goes_on(
    killable: tuple[Place, Path], db: Database, database_url: str, tmp_path: Path
) -> None:
    place, home = killable
    a_workflow(db)
    with programs(place, database_url, tmp_path) as run:
        program = run.ingest("--block-ms", "60000").wait_until_reading()
        place.wait_until_blocked()
        found = servers.status(home)
        assert found is not None
        os.kill(found.pids["redis"], signal.SIGKILL)
        assert program.process.wait(30) == EXIT_RESTART, program.output  # half of its block
        assert "Redis failed to read" in program.output
        assert "Traceback" not in program.output
        wait_for(lambda: _is_back(place))
        place.add({"n": 1})
        run.ingest()
        wait_until_published(db, 1)


def _is_back(place: Place) -> bool:
    try:
        return bool(place.raw.ping())
    except redis.RedisError:
        return False


def test_poison_ends_it_with_65_and_the_next_start_goes_on_behind_it(run: Programs, place: Place, db: Database) -> None:
    good = place.add({"n": 1})
    bad = place.add_raw({b"data": b"not json"})
    first = run.ingest()
    assert first.process.wait(60) == 65, first.output
    assert bad in first.output
    assert "pipeline ingest park" in first.output
    good += place.add({"n": 2})
    second = run.ingest()
    wait_until_published(db, 2)
    assert second.stop() == 0
    assert published(db) == named(place, good)
    assert list(place.pending(GROUP)) == [bad]


def test_two_services_that_race_with_the_same_message_ids_make_one_event_each(
    run: Programs, place: Place, db: Database
) -> None:
    other = Place(place.url, f"{place.stream}-other", place.raw)
    ids = [f"order:{n}" for n in range(1000)]
    both = [
        run.patient().ingest("--message-id-field", "id", "--batch", "20"),
        run.patient().ingest("--message-id-field", "id", "--batch", "20", "--stream", other.stream),
    ]
    for program in both:
        program.wait_until_reading()
    for each in (place, other):
        each.add(*({"id": id_, "from": each.stream} for id_ in ids))
    wait_until_published(db, 1000)
    wait_for(lambda: place.is_done(GROUP) and other.is_done(GROUP), within=30)
    assert [program.stop() for program in both] == [0, 0]
    assert published(db) == dict.fromkeys(ids, 1)
    assert sum(int(program.output.splitlines()[-1].split()[0]) for program in both) == 1000
    other.close()


@pytest.mark.timeout(600)
def test_q18_three_processes_share_thousands_of_messages_and_each_event_is_there_once(
    run: Programs, place: Place, db: Database
) -> None:
    count = int(os.environ.get("TEST_INGEST_MESSAGES", "8000"))
    url = f"{place.url}?client_name={place.stream}"
    options = ("--batch", "100", "--block-ms", "3000")
    three = [run.patient().ingest(*options, "--consumer", f"c{n}", url=url) for n in range(3)]
    for program in three:
        program.wait_until_reading()
    wait_for(lambda: blocked(place) == 3, within=60)  # each waiting process gets one of the first entries
    fill(place, count)
    wait_until_published(db, count, within=90 + count / 500)
    wait_for(lambda: place.is_done(GROUP), within=30)
    for program in three:
        program.process.terminate()
    assert [program.process.wait(40) for program in three] == [0, 0, 0]
    found = published(db)
    assert (len(found), set(found.values())) == (count, {1})
    shares = [int(program.output.splitlines()[-1].split()[0]) for program in three]
    assert sum(shares) == count
    assert all(shares), f"each had a share: {shares}"


def blocked(place: Place) -> int:
    """How many clients with the name of this stream wait in a read."""
    rows: Any = place.raw.client_list()
    return sum("b" in row["flags"] and row["name"] == place.stream for row in rows)


def fill(place: Place, count: int) -> None:
    """So many entries, as fast as Redis takes them."""
    for start in range(0, count, 1000):
        with place.raw.pipeline(transaction=False) as many:
            for n in range(start, start + 1000):
                many.xadd(place.stream, {"data": f'{{"n": {n}}}'})
            many.execute()
