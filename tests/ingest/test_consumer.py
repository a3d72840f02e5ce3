"""The loop: one message at a time, acknowledged only by ack, stopped by stop, and every failure raised."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis

from pipeline.consumer_engine import stopped_by_signals
from pipeline.consumer_engine.consumer import Stoppable
from pipeline.embedded import servers
from pipeline.ingest import PoisonError, QueueConsumer, QueueError, RecoveryRunner
from tests.ingest.redis_streams import Ledger, Place, in_thread
from tests.support.rule import rule
from tests.support.wait import wait_for

#: What a test itself asks of Redis; older servers do not tell parts of a command apart.
QUESTIONS = {"info", "config", "config|resetstat"}
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: A program that consumes as a service would, and says what it does.
SERVICE = """
import sys
from pipeline.consumer_engine import stopped_by_signals
from pipeline.ingest import QueueConfig, QueueConsumer, RedisStreamsQueue, connect_redis
url, stream = sys.argv[1:]
config = QueueConfig(stream=stream, group="workers", consumer="service", block_ms=300)
consumer = QueueConsumer(RedisStreamsQueue(connect_redis(url), config))
with stopped_by_signals(consumer):
    for message in consumer.iter_messages():
        print(message.id, flush=True)
print("done", flush=True)
"""


@rule("Q-15", "Q-11")
def test_q6_next_returns_one_message_or_none_and_drops_nothing(place: Place) -> None:
    entries = place.add({"n": 1}, {"n": 2}, {"n": 3})
    consumer = place.consumer(block_ms=50)
    seen = []
    while (message := consumer.next()) is not None:
        seen.append(message.id)
        assert len(place.pending()) == len(seen)
    assert seen == entries


@pytest.mark.parametrize("block_ms", [0, -1, 1.0, "5", True])
def test_q6_a_block_of_0_or_less_is_refused(place: Place, block_ms: Any) -> None:
    with pytest.raises(ValueError, match="block_ms is"):
        place.consumer().next(block_ms=block_ms)


@rule("Q-7")
def test_q6_an_idle_loop_sends_only_its_blocking_reads(quiet: Place) -> None:
    consumer = quiet.consumer(block_ms=250)
    quiet.raw.config_resetstat()
    began = time.monotonic()
    loop = in_thread(lambda: list(consumer.iter_messages()))
    wait_for(lambda: quiet.calls("xreadgroup")["xreadgroup"] >= 3)
    consumer.stop()
    assert loop.outcome() == []
    took = time.monotonic() - began
    stats: Any = quiet.raw.info("commandstats")
    asked = {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}
    assert 3 <= asked.pop("xreadgroup") <= took / 0.25 + 1
    assert set(asked) <= QUESTIONS


@rule("Q-14")
def test_q6_after_stop_next_is_none_at_once_without_a_command(quiet: Place) -> None:
    quiet.add({"n": 1})
    consumer = quiet.consumer()
    consumer.stop()
    before = quiet.calls("xreadgroup")
    assert consumer.next() is None
    assert quiet.calls("xreadgroup") == before


@rule("Q-5", "Q-16", "Q-11")
def test_q7_iteration_yields_until_stop_and_holds_one_message(place: Place) -> None:
    entries = place.add(*({"n": n} for n in range(5)))
    consumer = place.consumer()
    seen = []
    for message in consumer.iter_messages():
        assert list(place.pending()) == [message.id], "nothing is read ahead"
        seen.append(message.id)
        consumer.ack(message)
        if len(seen) == 3:
            consumer.stop()
    assert seen == entries[:3]
    assert place.pending() == {}


@rule("Q-16")
def test_q7_iteration_passes_every_error_on(place: Place) -> None:
    place.add({"n": 1})
    bad = place.add_raw({b"data": b"bad"})
    messages = place.consumer().iter_messages()
    next(messages)
    with pytest.raises(PoisonError, match=bad):
        next(messages)
    messages = place.consumer().iter_messages()
    place.raw.delete(place.stream)
    with pytest.raises(QueueError, match="NOGROUP"):
        next(messages)


@rule("Q-10")
def test_q8_nothing_is_acknowledged_without_a_call_of_ack(place: Place) -> None:
    entries = place.add({"n": 1}, {"n": 2}, {"n": 3})
    consumer = place.consumer()
    first = consumer.next()
    assert first is not None
    list(islice(consumer.iter_messages(), 1))
    consumer.stop()
    assert list(place.pending()) == entries[:2]
    consumer.ack(first)
    assert list(place.pending()) == entries[1:2]


@rule("Q-6", "Q-14")
def test_q9_stop_may_be_repeated_from_any_thread_and_ends_a_waiting_loop_after_its_block(quiet: Place) -> None:
    consumer = quiet.consumer(block_ms=500)
    loop = in_thread(lambda: list(consumer.iter_messages()))
    quiet.wait_until_blocked()
    for _ in range(3):
        consumer.stop()
    before = quiet.calls("xreadgroup")["xreadgroup"]
    assert loop.outcome() == []
    assert quiet.calls("xreadgroup")["xreadgroup"] <= before + 1, "the read that was under way, and none after it"
    assert consumer.next() is None


def test_q9_a_message_that_arrives_in_the_last_block_is_delivered_since_it_is_pending_anyway(place: Place) -> None:
    consumer = place.consumer(block_ms=30_000)
    loop = in_thread(lambda: list(consumer.iter_messages()))
    place.wait_until_blocked()
    consumer.stop()
    (entry,) = place.add({"n": 1})
    assert [message.id for message in loop.outcome()] == [entry]
    assert list(place.pending()) == [entry]


def test_q9_the_first_signal_stops_and_the_rest_change_nothing(place: Place) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    place.add({"n": 1})
    consumer, recovery = place.consumer(), RecoveryRunner(place.queue())
    loops: tuple[Stoppable, ...] = (consumer, recovery)
    for loop in loops:
        with stopped_by_signals(loop):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(number)
        assert [signal.getsignal(number) for number in SIGNALS] == before
    assert consumer.next() is None
    assert recovery.run_once(lambda message, _: pytest.fail(f"{message} was claimed"), Ledger(), min_idle_ms=1) == 0
    assert place.pending() == {}


@rule("Q-6", "Q-14")
@pytest.mark.parametrize("number", SIGNALS)
def test_q9_a_real_process_ends_in_order_on_a_signal_and_its_message_stays_pending(
    place: Place, number: signal.Signals, project: Path
) -> None:
    (entry,) = place.add({"n": 1})
    command = [sys.executable, "-c", SERVICE, place.url, place.stream]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline().strip() == entry
        service.send_signal(number)
        assert service.stdout.read() == "done\n"
        assert service.wait(30) == 0
    assert place.pending() == {entry: "service"}


@rule("Q-18", "Q-8")
def test_q12_a_client_killed_in_mid_block_is_an_error_at_once_and_the_loop_ends(place: Place) -> None:
    consumer = place.consumer(block_ms=60_000)
    loop = in_thread(lambda: list(consumer.iter_messages()))
    place.wait_until_blocked()
    place.kill_client()
    with pytest.raises(QueueError, match="Redis failed to read") as caught:
        loop.outcome(within=30)
    assert isinstance(caught.value.__cause__, redis.ConnectionError)


@rule("Q-18", "Q-8")
def test_q12_a_redis_killed_in_mid_block_is_an_error_at_once(killable: tuple[Place, Path]) -> None:
    place, home = killable
    consumer = place.consumer(block_ms=60_000)
    loop = in_thread(consumer.next)
    place.wait_until_blocked()
    found = servers.status(home)
    assert found is not None
    os.kill(found.pids["redis"], signal.SIGKILL)
    with pytest.raises(QueueError):
        loop.outcome(within=30)


def connected(place: Place) -> QueueConsumer:
    """With so short a margin a slow server may already count as frozen."""
    try:
        return place.consumer(block_ms=100, late_ms=0)
    except QueueError as error:
        raise AssertionError(str(error)) from error


def test_q12_a_redis_that_freezes_is_an_error_when_the_block_is_well_over(
    killable: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, home = killable
    monkeypatch.setattr("pipeline.ingest.redis_client.READ_MARGIN", 1.0)
    consumer = wait_for(lambda: connected(place))
    found = servers.status(home)
    assert found is not None
    os.kill(found.pids["redis"], signal.SIGSTOP)
    try:
        with pytest.raises(QueueError, match=r"(?i)timeout") as caught:
            consumer.next()
        assert isinstance(caught.value, TimeoutError)  # so the engine takes it as a timeout of the fetch
    finally:
        os.kill(found.pids["redis"], signal.SIGCONT)


@rule("Q-17", "Q-18")
def test_q12_a_connection_lost_before_the_acknowledgement_is_an_error_and_nothing_reconnects(place: Place) -> None:
    (entry,) = place.add({"n": 1})
    consumer = place.consumer()
    ledger = Ledger()

    def handler(message: Any, page: Any) -> None:
        page.written.append(message.id)
        place.kill_client()

    with pytest.raises(QueueError, match="Redis failed to acknowledge"):
        consumer.run(handler, ledger)
    assert ledger.committed == [entry]
    assert list(place.pending()) == [entry]


@rule("Q-13", "Q-21")
def test_q13_the_loop_never_reads_pending_entries_nor_the_backlog(quiet: Place) -> None:
    quiet.add(*({"n": n} for n in range(10)))
    quiet.queue("dead").read()
    quiet.make_stale()
    consumer, ledger = quiet.consumer(block_ms=50), Ledger()
    quiet.raw.config_resetstat()
    loop = in_thread(lambda: consumer.run(lambda message, page: page.written.append(message.id), ledger))
    wait_for(lambda: len(ledger.committed) == 9)
    consumer.stop()
    loop.outcome()
    stats: Any = quiet.raw.info("commandstats")
    assert {name.removeprefix("cmdstat_") for name in stats} <= {"xreadgroup", "xack", *QUESTIONS}
    assert len(quiet.pending()) == 1, "the dead one's message is left for a recovery"


@rule("Q-23")
def test_q18_consumers_of_a_group_share_the_messages_and_another_group_sees_them_all(place: Place) -> None:
    consumers = [place.consumer(f"c{n}", block_ms=100) for n in range(3)]
    other = place.consumer("c", group="others", block_ms=100)
    entries = place.add(*({"n": n} for n in range(300)))
    seen: list[str] = []
    each_has_one = threading.Barrier(3)

    def work(consumer: QueueConsumer, gate: threading.Barrier | None = None) -> int:
        count = 0
        while (message := consumer.next()) is not None:
            if count == 0 and gate is not None:
                gate.wait(30)
            consumer.ack(message)
            seen.append(message.id)
            count += 1
        return count

    loops = [in_thread(partial(work, consumer, each_has_one)) for consumer in consumers]
    counts = [loop.outcome(60) for loop in loops]
    assert sorted(seen) == sorted(entries)
    assert all(counts), f"each had a share: {counts}"
    seen.clear()
    assert work(other) == 300
    assert seen == entries


@rule("Q-12", "Q-18")
def test_q12_after_a_failure_no_state_is_kept_and_a_new_call_reads_again(place: Place) -> None:
    consumer = place.consumer()
    place.kill_client()
    with pytest.raises(QueueError):
        consumer.next()
    assert set(vars(consumer)) == {"_queue", "_is_stopping"}, "no state of the connection, no clock, no health"
    (entry,) = place.add({"n": 1})
    message = consumer.next()
    assert message is not None
    assert message.id == entry


@rule("Q-12")
def test_a_handler_may_take_longer_than_an_entry_takes_to_go_stale(place: Place) -> None:
    (entry,) = place.add({"n": 1})
    consumer, ledger = place.consumer(), Ledger()

    def handler(message: Any, page: Any) -> None:
        place.make_stale()
        page.written.append(message.id)
        consumer.stop()

    consumer.run(handler, ledger)
    assert (ledger.committed, place.pending()) == ([entry], {})
