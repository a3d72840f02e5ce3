"""Spans of real workers at a collector, for each pool and end of a process."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.installation import Installation
from tests.support.otlp_collector import Collector, attributes, collecting
from tests.support.wait import wait_for
from tests.telemetry.metrics.conftest import PATIENT, publish, wait_until_done

pytestmark = pytest.mark.timeout(300)
PER_RUN = ("run", "prepare", "mutate", "world.apply", "next")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def traced(collector: Collector, name: str) -> dict[str, str]:
    """Return an environment in which spans are sent only when a process ends."""
    return {
        **PATIENT,
        "PIPELINE_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "600000",
        "OTEL_SERVICE_NAME": name,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
    }


def assert_complete(collector: Collector, rows: Sequence[Any]) -> None:
    """Check that every span of every run is there, under the one root of its trace."""
    by_name = {name: {span.trace_id.hex(): span for span in collector.spans(name)} for name in PER_RUN}
    for row in rows:
        assert [name for name in PER_RUN if row.id.hex not in by_name[name]] == []
        root = by_name["run"][row.id.hex]
        assert (root.parent_span_id, root.span_id.hex()) == (b"", row.id.hex[16:])
        assert by_name["next"][row.id.hex].parent_span_id == root.span_id


def consuming(installation: Installation) -> list[Any]:
    """Return the runs that consumed events."""
    return [run for run in installation.runs() if run.event_ids]


def test_nothing_is_lost_when_children_are_recycled_after_every_task(
    installation: Installation, collector: Collector
) -> None:
    options = ("--pool=prefork", "--concurrency=2", "--max-tasks-per-child=1")
    node = installation.worker(*options, **traced(collector, "the-shop"))
    publish(installation, 5)
    wait_until_done(installation)
    assert node.stop() == 0
    rows = consuming(installation)
    assert_complete(collector, rows)
    assert len(collector.processes()) >= 3
    tasks = collector.spans("run/pipeline.prepare")
    assert {link.trace_id.hex() for task in tasks for link in task.links} >= {row.id.hex for row in rows}
    assert {of["service.name"] for of, _ in collector.received} == {"the-shop"}
    assert {headers.get("x-tenant") for headers in collector.headers} == {"blue"}


def test_a_trace_continues_across_workers_of_other_pools(installation: Installation, collector: Collector) -> None:
    first, then = "pipeline.prepare,pipeline.schedule", "pipeline.mutate,pipeline.next"
    nodes = [
        installation.worker("--pool=threads", "--concurrency=4", "-Q", first, **traced(collector, "threads")),
        installation.worker("--pool=solo", "-Q", then, **traced(collector, "solo")),
    ]
    publish(installation, 3)
    wait_until_done(installation)
    assert [node.stop() for node in nodes] == [0, 0]
    assert_complete(collector, consuming(installation))
    services = {span.name: of["service.name"] for of, span in collector.received}
    assert [services[name] for name in PER_RUN] == ["solo", "threads", "solo", "solo", "solo"]


def test_a_child_that_was_killed_is_rescued_in_the_trace_of_its_run(
    installation: Installation, collector: Collector
) -> None:
    node = installation.worker("--pool=prefork", "--concurrency=1", **traced(collector, "the-shop"))
    installation.recorder.shut("next")
    publish(installation, 1)
    installation.recorder.wait_at("next")
    node.kill_children()
    wait_for(lambda: any(run.status == "crashed" for run in installation.runs()), every=0.1)
    installation.recorder.open("next")
    wait_until_done(installation)
    assert node.stop() == 0
    (rescue,) = collector.spans("rescue")
    statuses = [
        attributes(span.attributes)["pipeline.run.status"]
        for span in collector.spans("run")
        if span.trace_id == rescue.trace_id
    ]
    assert sorted(statuses) == ["committed", "crashed"]
