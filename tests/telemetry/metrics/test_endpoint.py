"""Metrics from child to parent process, and from there to a scrape."""

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config import Settings, SettingsError
from pipeline.telemetry import metrics_collector, metrics_endpoint, metrics_export
from pipeline.telemetry.metrics import COUNTER, HISTOGRAM, METRICS, UP_DOWN
from pipeline.telemetry.metrics_collector import MetricChannel, MetricTotals, Series, Value
from pipeline.telemetry.metrics_endpoint import MetricsEndpoint
from pipeline.telemetry.metrics_export import MetricsExport, is_pushed
from tests.deploy.known_names import OURS
from tests.support.prometheus_scrapes import Scraped, answering, free_port, scrape
from tests.support.recorded_metrics import Counted

BOUNDS = (1.0, 2.0)


def a_sum(name: str = "things", value: float = 1, **labels: str) -> Value:
    return Series(name, COUNTER, "{thing}", "things", (), tuple(sorted(labels.items()))), (value,)


def a_histogram(*buckets: float) -> Value:
    return Series("waits", HISTOGRAM, "s", "waits", BOUNDS, ()), (*buckets, 1.5)


def a_level(name: str, value: float, pid: int) -> Value:
    return Series(name, UP_DOWN, "{thing}", "things", (), (), pid), (value,)


def shown(*values: Value) -> Scraped:
    return Scraped(metrics_endpoint.exposition(values))


def test_sums_and_buckets_are_added_up_and_never_decrease() -> None:
    added = MetricTotals()
    added.add([a_sum(kind="a"), a_sum(kind="b", value=2), a_histogram(1, 0, 2)])
    added.add([a_sum(kind="a", value=3), a_histogram(0, 1, 1)])
    seen = shown(*added.values())
    assert seen.by("things_total", "kind") == {"a": 4, "b": 2}
    assert seen.by("waits_seconds_bucket", "le") == {"1.0": 1, "2.0": 2, "+Inf": 5}
    assert (seen.sum("waits_seconds_count"), seen.sum("waits_seconds_sum")) == (5, 3)
    assert seen.kinds == {"things": "counter", "waits_seconds": "histogram"}


def test_an_up_down_counter_ends_with_its_process() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    added = MetricTotals()
    added.add([a_level("in_flight", 1, os.getpid()), a_level("in_flight", 1, os.getppid())])
    added.add([a_level("in_flight", 2, ended.pid)])
    assert shown(*added.values()).sum("in_flight") == 2


def test_series_beyond_the_limit_are_dropped_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_collector, "MAX_SERIES", 3)
    added = MetricTotals()
    for _ in range(2):
        added.add(a_sum(of=str(n)) for n in range(10))
    assert len(added.values()) == 3
    assert shown(*added.values()).sum("things_total") == 6
    assert len([line for line in caplog.records if line.name == metrics_collector.log.name]) == 1


@pytest.fixture
def channel() -> Iterator[MetricChannel]:
    found = MetricChannel()
    yield found
    found.close()


def test_values_too_large_for_one_datagram_are_sent_in_parts(
    channel: MetricChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_collector, "MAX_DATAGRAM_BYTES", 2_000)
    sent = [a_sum(of=f"number {n}", value=n) for n in range(60)]
    assert channel.send(sent) == []
    assert drained(channel) == {series.labels: numbers[0] for series, numbers in sent}


def test_a_full_channel_refuses_and_nothing_is_lost_or_sent_twice(channel: MetricChannel) -> None:
    sent, left = 0, list[Value]()
    while not left:
        sent += 1
        left = [*channel.send([a_sum()])]
    before = drained(channel)
    assert channel.send(left) == []
    after = drained(channel)
    assert sum(before.values()) + sum(after.values()) == sent
    assert sum(after.values()) == 1


def drained(channel: MetricChannel) -> dict[Any, Any]:
    """Read everything from a channel."""
    added = MetricTotals()
    channel.receiver.setblocking(False)
    channel.receive(added)
    return {series.labels: numbers[0] for series, numbers in added.values()}


def test_metrics_of_handlers_are_exported_and_those_of_the_sdk_are_not() -> None:
    counted = Counted()
    counted.provider.get_meter("shop").create_counter("shop.orders").add(2, {"kind": "large"})
    counted.provider.get_meter("opentelemetry.instrumentation.celery").create_counter("runtime").add(1)
    assert [(row.name, row.value) for row in counted.rows()] == [("shop.orders", 2)]


def test_a_label_that_cannot_be_encoded_does_not_fail_the_scrape() -> None:
    assert shown(a_sum(odd="\udce9"), a_sum("others")).samples == {
        "things_total": [({"odd": "?"}, 1)],
        "others_total": [({}, 1)],
    }


def test_of_two_metrics_with_one_name_the_first_is_shown() -> None:
    assert shown(a_sum(), a_level("things", 7, 0)).samples == {"things_total": [({}, 1)]}


@pytest.fixture
def settings() -> Settings:
    return Settings(metrics_port=free_port(), metrics_host="127.0.0.1")


@pytest.fixture
def served(settings: Settings) -> Iterator[MetricsExport]:
    """Serve as a forking process does, which sets no process-wide provider."""
    found = MetricsExport(settings, is_forking=True)
    found.open_channel()
    found.begin()
    yield found
    found.end()


def test_an_endpoint_answers_in_the_requested_format_and_only_at_its_path(served: MetricsExport) -> None:
    port = served.settings.metrics_port
    assert port is not None
    assert served.channel is not None
    served.channel.send([a_sum(kind="a")])
    assert answering(port).kinds.keys() <= {"things"}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        scrape(port, "/")
    refused.value.close()


def test_a_port_that_becomes_free_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(metrics_endpoint, "BIND_RETRY_SECONDS", 0.05)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        endpoint = MetricsEndpoint("127.0.0.1", port, lambda: [a_sum()])
        endpoint.start()
    assert answering(port).sum("things_total") == 1
    endpoint.close()
    warned = [line for line in caplog.records if line.levelname == "WARNING" and line.name == metrics_endpoint.log.name]
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("port", "asked", "pushed"),
    [(None, "", True), (9464, "", False), (9464, "otlp", True), (None, "none", False)],
)
def test_metrics_are_pushed_if_nothing_is_scraped_or_if_requested(
    monkeypatch: pytest.MonkeyPatch, port: int | None, asked: str, pushed: bool
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", asked)
    assert is_pushed(Settings(metrics_port=port, otlp_endpoint="http://collector:4318")) is pushed
    assert not is_pushed(Settings(metrics_port=port))


def test_a_port_without_the_exporter_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_export, "find_spec", lambda name: None if name == "prometheus_client" else object())
    metrics_export.require_exporter(Settings())
    with pytest.raises(SettingsError, match=r"PIPELINE_METRICS_PORT: .*pip install 'celery-durable-effects\[otel\]'"):
        metrics_export.require_exporter(Settings(metrics_port=1))


def test_the_copy_of_a_reader_in_a_fork_hands_nothing_over(channel: MetricChannel) -> None:
    """The SDK restarts its thread in a fork; then counts from before the fork would be sent twice."""
    provider = metrics_collector.meter_provider([metrics_collector.handover_reader(channel)])
    provider.get_meter("shop").create_counter("shop.orders").add(2)
    pid = os.fork()
    if pid == 0:
        os._exit(threading.active_count())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "only the thread that forked"
    provider.shutdown()
    assert drained(channel) == {(): 2}


def test_rules_and_dashboards_are_written_against_metrics_of_the_table() -> None:
    known = {about.prometheus: set(about.labels) for about in METRICS.values()}
    assert {name: labels for name, labels in OURS.items() if known.get(name) != labels} == {}
