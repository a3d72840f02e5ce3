"""The metrics of a real worker equal the database, however its processes start and end."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from tests.support.installation import Installation
from tests.support.otlp_collector import collecting
from tests.support.prometheus_scrapes import Scraped, answering, free_port, scrape
from tests.support.wait import wait_for
from tests.telemetry.metrics.conftest import PATIENT, publish, wait_until_done

pytestmark = pytest.mark.timeout(300)


def expected_counts(installation: Installation) -> dict[str, int]:
    """Return from the database what workers count."""
    (row,) = installation.ask("""
        SELECT count(*) FILTER (WHERE status = 'committed') AS committed,
               count(*) FILTER (WHERE status = 'committed' AND event_ids <> '{}') AS with_inputs,
               count(*) FILTER (WHERE status NOT IN ('committed', 'active')) AS stopped,
               count(*) FILTER (WHERE status = 'crashed') AS crashed, sum(fence) AS claimed, count(*) AS started,
               (SELECT count(*) FROM pipeline.mutations WHERE status = 'applied') AS applied,
               (SELECT count(*) FROM pipeline.mutations WHERE status = 'applied' AND resolved_by = 'call') AS by_call
        FROM pipeline.runs""")
    return {name: int(value or 0) for name, value in row._asdict().items()}


def counted(seen: Scraped) -> dict[str, int]:
    """Return the same from an endpoint."""

    def transition(name: str) -> float:
        return seen.sum("pipeline_transitions_total", transition=name, workflow="shop")

    found = {
        "committed": transition("run.committed"),
        "with_inputs": seen.sum("pipeline_run_latency_seconds_count", workflow="shop", handler="Fulfil"),
        "stopped": seen.sum("pipeline_runs_stopped_total", workflow="shop", handler="Fulfil"),
        "crashed": seen.sum("pipeline_rescues_total", workflow="shop"),
        "claimed": transition("run.claimed"),
        "started": transition("run.started") + transition("run.retried"),
        "applied": transition("mutation.applied"),
        "by_call": seen.sum("pipeline_mutation_duration_seconds_count", connector="world", outcome="applied"),
    }
    return {name: int(value) for name, value in found.items()}


@contextmanager
def watched(port: int) -> Iterator[list[str]]:
    """Scrape continuously, and record each counter that decreased."""
    ending, fell, best = threading.Event(), list[str](), dict[object, float]()

    def scrape_forever() -> None:
        while not ending.wait(0.1):
            for series, value in scrape(port).growing():
                if value < best.get(series, 0.0):
                    fell.append(f"{series}: {best[series]} then {value}")
                best[series] = value

    thread = threading.Thread(target=scrape_forever)
    thread.start()
    try:
        yield fell
    finally:
        ending.set()
        thread.join()


def test_the_sums_of_recycled_and_killed_children_equal_the_database(installation: Installation) -> None:
    port, before = free_port(), expected_counts(installation)
    options = ("--pool=prefork", "--concurrency=2", "--max-tasks-per-child=3")
    node = installation.worker(*options, PIPELINE_METRICS_PORT=str(port), **PATIENT)
    answering(port, within=60)
    wait_for(lambda: starts_at_zero(scrape(port)))
    with watched(port) as fell:
        first = set(node.children())
        publish(installation, 12)
        wait_until_done(installation)
        agree(installation, port, before)
        wait_for(lambda: set(node.children()) - first, why="a child was recycled")
        installation.recorder.shut("next")
        publish(installation, 1)
        installation.recorder.wait_at("next")
        wait_for(lambda: counted(scrape(port))["claimed"] == since(installation, before)["claimed"])
        (holder,) = {int(run.worker.rpartition(":")[2]) for run in held(installation)}
        os.kill(holder, signal.SIGKILL)
        wait_for(lambda: since(installation, before)["crashed"] == 1)
        installation.recorder.open("next")
        publish(installation, 7)
        wait_until_done(installation)
        agree(installation, port, before)
    assert fell == []
    wait_for(lambda: phases_and_gauges_agree(port, since(installation, before)))
    assert node.stop() == 0


def starts_at_zero(seen: Scraped) -> bool:
    """Return whether alerted counters start at 0: Prometheus sees no increase in a first value."""
    assert seen.by("pipeline_transitions_total", "transition", "workflow").get(("mutation.escalated", "shop")) == 0
    assert seen.by("pipeline_rescues_total", "workflow").get("shop") == 0
    return True


def held(installation: Installation) -> list[Any]:
    """Return the runs that a worker holds."""
    return [run for run in installation.runs() if run.lease_expires_at and run.event_ids]


def phases_and_gauges_agree(port: int, known: dict[str, int]) -> bool:
    """Compare; a phase is counted shortly after its commit, and gauges of a busy database are late."""
    seen = scrape(port)
    assert known["crashed"] == 1
    assert seen.sum("pipeline_phase_duration_seconds_count", phase="next", result="done") == known["committed"]
    assert seen.sum("pipeline_phase_duration_seconds_count", phase="mutate", result="done") == known["by_call"]
    assert seen.sum("pipeline_database_up") == 1
    assert seen.sum("pipeline_workflows", workflow="shop", status="active") == 1
    return True


def test_an_endpoint_answers_while_its_database_is_down(installation: Installation) -> None:
    port, before = free_port(), expected_counts(installation)
    installation.worker("--pool=threads", "--concurrency=4", PIPELINE_METRICS_PORT=str(port), **PATIENT)
    publish(installation, 3)
    wait_until_done(installation)
    agree(installation, port, before)
    known = counted(scrape(port))
    with away(installation):
        wait_for(lambda: scrape(port).sum("pipeline_database_up") == 0, every=0.2)
        seen = scrape(port)
        assert counted(seen) == known
        assert "pipeline_workflows" not in seen.samples
    wait_for(lambda: scrape(port).sum("pipeline_database_up") == 1, every=0.2)


def test_a_worker_works_although_its_port_is_taken(installation: Installation) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = installation.worker("--pool=solo", PIPELINE_METRICS_PORT=str(port), **PATIENT)
        publish(installation, 1)
        wait_until_done(installation)
        warning = f"metrics cannot be served on port {port} of 127.0.0.1: another process has it"
        wait_for(lambda: warning in node.log.read_text())


def test_without_a_port_every_process_pushes_its_metrics_to_the_collector(installation: Installation) -> None:
    before = expected_counts(installation)
    with collecting() as collector:
        node = installation.worker(
            "--pool=prefork",
            "--concurrency=2",
            "--max-tasks-per-child=2",
            PIPELINE_OTLP_ENDPOINT=collector.endpoint,
            OTEL_METRIC_EXPORT_INTERVAL="600000",  # nothing goes out but when a process ends
            **PATIENT,
        )
        publish(installation, 4)
        wait_until_done(installation)
        assert node.stop() == 0
        known = since(installation, before)
        for transition, many in (("run.committed", "committed"), ("mutation.applied", "applied")):
            assert collector.number("pipeline.transitions", transition=transition) == known[many]
        assert {name for _, name in collector.numbers} >= {"pipeline.workflows", "pipeline.phase.duration"}


def test_without_a_port_or_an_endpoint_the_sdk_is_not_imported() -> None:
    wanted = "pipeline.tasks.signals, pipeline.tasks.phases, pipeline.cli.metrics, pipeline.background.sweeps"
    names = "opentelemetry.sdk, opentelemetry.instrumentation, opentelemetry.exporter, prometheus_client, flower, "
    names += "pipeline.telemetry.metrics_collector, pipeline.telemetry.metrics_endpoint"
    start = "pipeline.tasks.signals.start_child()"  # as in every child of a worker
    code = f"import sys, {wanted}; {start}; print([n for n in {names.split(', ')!r} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def since(installation: Installation, before: dict[str, int]) -> dict[str, int]:
    """Return what the database has counted since."""
    return {name: value - before[name] for name, value in expected_counts(installation).items()}


def agree(installation: Installation, port: int, before: dict[str, int]) -> None:
    """Wait for the last second of every child, and compare."""

    def same() -> bool:
        assert counted(scrape(port)) == since(installation, before)
        return True

    wait_for(same, every=0.2, why="endpoint and database agree")


@contextmanager
def away(installation: Installation) -> Iterator[None]:
    """Make the database unreachable."""
    installation.db.dispose()
    url = make_url(installation.database_url)
    engine = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS false"))
        try:
            ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
            connection.execute(text(ends), {"name": url.database})
            yield
        finally:
            connection.execute(text(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS true"))
    engine.dispose()
