"""The gauges of a stream's backlog, read over a connection of their own within a limited time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.metrics import CallbackOptions, NoOpMeter

from pipeline.ingest import lag, redis_client
from pipeline.ingest.errors import QueueError
from pipeline.ingest.lag import BacklogReader, lag_gauges, read_backlog
from pipeline.ingest.queue import BacklogStats
from tests.ingest.redis_streams import Place, in_thread
from tests.support.wait import wait_for

Scrape = Callable[[], dict[str, object]]
LAG, PENDING = "pipeline.queue.lag", "pipeline.queue.pending"
ENOUGH = 60.0  # seconds


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine stands still. A test of patience says otherwise."""
    monkeypatch.setattr(lag, "SCRAPE_TIMEOUT", ENOUGH)
    monkeypatch.setattr(redis_client, "READ_MARGIN", ENOUGH)
    monkeypatch.setattr(redis_client, "CONNECT_TIMEOUT", ENOUGH)


class Asking(NoOpMeter):
    """Collects every gauge on request; the SDK itself gives up after ten seconds."""

    def __init__(self) -> None:
        super().__init__("tests")
        self.asks: dict[str, Any] = {}

    def create_observable_gauge(self, name: str, callbacks: Any = None, *_: Any, **__: Any) -> Any:
        (self.asks[name],) = callbacks

    def __call__(self) -> dict[str, object]:
        asked = {name: list(ask(CallbackOptions())) for name, ask in self.asks.items()}
        return {name: each.value for name, found in asked.items() for each in found}


@pytest.fixture
def scrape(place: Place) -> Scrape:
    """The gauges of a stream, as one scrape after the other finds them."""
    meter = Asking()
    lag_gauges(place.url, place.queue().config)(meter)
    return meter


def gauges(place: Place, *, lag: int, pending: int) -> dict[str, object]:
    """The gauges that this server can fill: before 7.0, Redis does not say how many entries wait."""
    every: dict[str, object] = {LAG: lag, PENDING: pending}
    return every if place.version() >= 7 else {PENDING: pending}


class Scripted:
    """Backlog reads that succeed, fail or hang as a test wants, and are counted."""

    def __init__(self) -> None:
        self.count = 0
        self.fails = False
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self) -> BacklogStats:
        self.count += 1
        self.may_end.wait(ENOUGH)
        if self.fails:
            raise QueueError("Redis is away")
        return BacklogStats(
            length=9,
            lag=self.count,
            pending=0,
            by_consumer={},
            oldest_pending_id=None,
            oldest_pending_idle_ms=None,
        )


def test_each_scrape_reads_the_present_backlog(place: Place, scrape: Scrape) -> None:
    place.add({"n": 1}, {"n": 2})
    assert scrape() == gauges(place, lag=2, pending=0)
    place.queue().read()
    assert scrape() == gauges(place, lag=1, pending=1)


def test_a_missing_stream_has_no_gauges_until_it_is_back(place: Place, scrape: Scrape) -> None:
    place.raw.delete(place.stream)
    assert scrape() == {}
    place.queue()
    assert scrape() == gauges(place, lag=0, pending=0)


def test_a_scrape_does_not_wait_for_a_blocking_read(place: Place, scrape: Scrape) -> None:
    reading = in_thread(place.queue(block_ms=3_600_000).read)
    place.wait_until_blocked()
    assert scrape() == gauges(place, lag=0, pending=0)
    place.wait_until_blocked()
    place.add({"n": 1})
    assert len(reading.outcome()) == 1


def test_a_backlog_read_closes_its_connection(quiet: Place) -> None:
    config, before = quiet.queue().config, _connections(quiet)
    for _ in range(3):
        assert read_backlog(quiet.url, config).length == 0
    wait_for(lambda: _connections(quiet) <= before)


def test_a_redis_that_is_not_there_is_a_failure_of_the_queue(place: Place) -> None:
    with pytest.raises(QueueError, match="Redis cannot be reached"):
        read_backlog("redis://127.0.0.1:1/0", place.queue().config)


def test_one_backlog_read_serves_both_gauges_of_a_scrape() -> None:
    read = Scripted()
    reader = BacklogReader(read)
    assert [_waiting(reader, name) for name in (LAG, PENDING, LAG, PENDING)] == [1, 1, 2, 2]
    assert read.count == 2


def test_a_failed_backlog_read_is_not_repeated_for_the_other_gauge() -> None:
    read = Scripted()
    read.fails, reader = True, BacklogReader(read)
    assert [reader.stats_for(LAG), reader.stats_for(PENDING), read.count] == [None, None, 1]
    read.fails = False
    assert _waiting(reader, LAG) == 2


def test_a_hanging_backlog_read_is_waited_for_once_and_no_other_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Scripted()
    reader = BacklogReader(read)
    read.may_end.clear()
    monkeypatch.setattr(lag, "SCRAPE_TIMEOUT", 0.01)
    assert [reader.stats_for(name) for name in (LAG, PENDING)] == [None, None]
    wait_for(lambda: read.count == 1)
    assert [reader.stats_for(name) for name in (LAG, PENDING)] == [None, None]
    monkeypatch.setattr(lag, "SCRAPE_TIMEOUT", ENOUGH)
    read.may_end.set()
    wait_for(lambda: _waiting(reader, LAG) == 2, why="the second read")


def _connections(place: Place) -> int:
    rows: Any = place.raw.client_list()
    return len(rows)


def _waiting(reader: BacklogReader, name: str) -> int | None:
    stats = reader.stats_for(name)
    return None if stats is None else stats.lag
