"""`pipeline metrics`, and the endpoints of commands that keep running."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.store.database import Database
from pipeline.telemetry.metrics import GAUGE, METRICS
from tests.cli.conftest import Pipeline, pipeline
from tests.factories import IN, a_workflow, some_events
from tests.ingest.conftest import place
from tests.ingest.ingest_processes import programs, wait_until_published
from tests.ingest.redis_streams import Place
from tests.support.prometheus_scrapes import Scraped, answering, free_port
from tests.support.wait import wait_for

__all__ = ["pipeline", "place"]
PROGRAM = Path(sys.executable).parent / "pipeline"


def test_once_prints_every_gauge_as_prometheus_reads_it(db: Database, pipeline: Pipeline) -> None:
    a_workflow(db)
    some_events(db, "one", "two")
    answer = pipeline("metrics", "--once")
    assert answer.code == 0
    seen = Scraped(answer.out)
    assert seen.by("pipeline_backlog_events", "workflow", "topic", "handler") == {("billing", IN, "send"): 2}
    assert seen.sum("pipeline_database_up") == 1
    known = {about.prometheus for about in METRICS.values() if about.kind == GAUGE}
    assert set(seen.kinds) <= known
    assert set(seen.kinds.values()) == {"gauge"}


def test_without_a_port_it_names_what_is_missing(pipeline: Pipeline) -> None:
    answer = pipeline("metrics")
    assert answer.code == 2
    assert "expected --port, PIPELINE_METRICS_PORT or --once" in answer.err


def test_it_answers_until_it_is_stopped_and_refuses_a_port_that_is_taken(db: Database, database_url: str) -> None:
    a_workflow(db)
    port = free_port()
    environ = {**os.environ, "PIPELINE_DATABASE_URL": database_url}
    command = [str(PROGRAM), "metrics", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as served:
        billing = {"workflow": "billing", "status": "active"}
        wait_for(lambda: answering(port, within=60).sum("pipeline_workflows", **billing) == 1, within=90)
        second = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 2
        assert f"Port {port} of 127.0.0.1 cannot be used; expected one that is free." in second.stderr
        assert "tries again" not in second.stderr
        served.send_signal(signal.SIGTERM)
        assert served.wait(40) == 0


def test_ingest_exports_the_lag_of_its_stream(db: Database, place: Place, database_url: str, tmp_path: Path) -> None:
    a_workflow(db)
    port = free_port()
    place.add({"n": 1}, {"n": 2})
    with programs(place, database_url, tmp_path) as started:
        program = started.ingest(PIPELINE_METRICS_PORT=str(port))
        wait_for(
            lambda: answering(port, within=60).sum("pipeline_queue_acks_total", stream=place.stream) == 2, within=90
        )
        seen, about = with_gauges(port), {"stream": place.stream, "group": "pipeline"}
        assert seen.sum("pipeline_queue_messages_read_total", stream=place.stream) == 2
        assert seen.sum("pipeline_queue_read_latency_seconds_count", stream=place.stream) >= 1
        assert seen.samples["pipeline_queue_pending"] == [(about, 0)]
        assert seen.samples["pipeline_queue_lag"] == [(about, 0)]
        assert seen.sum("pipeline_transitions_total", transition="event.published", workflow="billing") == 2
        assert program.stop() == 0


def test_an_ingest_answers_scrapes_while_its_read_blocks_for_an_hour(
    db: Database, place: Place, database_url: str, tmp_path: Path
) -> None:
    a_workflow(db)
    port = free_port()
    place.add({"n": 1})
    with programs(place, database_url, tmp_path) as started:
        program = started.ingest("--block-ms", "3600000", PIPELINE_METRICS_PORT=str(port))
        wait_until_published(db, 1)  # and from here on it waits for an entry that never comes
        for _ in range(3):
            assert with_gauges(port).samples["pipeline_queue_pending"][0][1] == 0
        assert program.process.poll() is None


def with_gauges(port: int) -> Scraped:
    """Scrape until the gauges of Redis are there; they are missing while Redis is slow."""

    def ask() -> Scraped:
        seen = answering(port, within=30)
        assert {"pipeline_queue_lag", "pipeline_queue_pending"} <= set(seen.samples)
        return seen

    return wait_for(ask, within=90)
