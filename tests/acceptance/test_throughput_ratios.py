"""How much faster many are than one: ratios of one machine in one run, so they hold on any."""

import pytest

from pipeline.domain.values import NewEvent
from pipeline.transitions import events
from tests.support.installation import UNHURRIED, Installation
from tests.support.wait import wait_for

#: Nothing runs out of time: nobody could say of a stone's work whether it was done.
MILL = UNHURRIED | {
    "PIPELINE_WORKFLOWS": "tests.support.load_workflow",
    "PIPELINE_TICK": "200ms",
    "PIPELINE_POOL_SIZE": "10",
}
_SPAN = """
SELECT count(*) AS runs, extract(epoch FROM max(finished_at) - min(started_at)) AS seconds
FROM pipeline.runs WHERE workflow = :workflow AND status = 'committed' AND id > :after
"""
_LATEST = "SELECT coalesce(max(id::text), '00000000-0000-0000-0000-000000000000')::uuid AS id FROM pipeline.runs"


def throughput(nodes: Installation, workflow: str, count: int) -> float:
    """Runs per second for a backlog of so many events, from the first claim to the last commit."""
    (latest,) = nodes.ask(_LATEST)
    new = [NewEvent(topic="orders", message_id=f"{latest.id} {n}", payload={}) for n in range(count)]
    with nodes.db.transaction() as tx:
        events.publish(tx, workflow, new)

    def done() -> bool:
        return bool(nodes.ask(_SPAN, workflow=workflow, after=latest.id)[0].runs == count)

    wait_for(done, within=120, every=0.1, why=f"{count} runs of {workflow}")
    return count / float(nodes.ask(_SPAN, workflow=workflow, after=latest.id)[0].seconds)


@pytest.fixture
def installation_under_load(installation: Installation, request: pytest.FixtureRequest) -> Installation:
    """A worker and a beat that stay from test to test."""
    installation.stand(begin, failed=request.session.testsfailed)
    return installation


def begin(installation_under_load: Installation) -> None:
    installation_under_load.worker(PIPELINE_MAX_COHORT_SIZE="50", **MILL)
    installation_under_load.beat()


def test_with_a_mutation_of_20_ms_concurrency_64_does_at_least_15_times_the_work_of_one(
    installation_under_load: Installation,
) -> None:
    """Measured up to three times: a neighbour on the machine slows the many more than the one."""
    seen: list[str] = []
    for _ in range(3):
        one, many = throughput(installation_under_load, "narrow", 30), throughput(installation_under_load, "wide", 1500)
        seen.append(f"{many:.0f}/s is {many / one:.1f} times {one:.0f}/s")
        if many >= 15 * one:
            return
    raise AssertionError("; ".join(seen))


def test_with_a_backlog_cohorts_of_50_do_at_least_5_times_the_work_of_cohorts_of_one(
    installation_under_load: Installation,
) -> None:
    """Measured up to three times, as above. Each time one worker takes the place of the other."""
    seen: list[str] = []
    for _ in range(3):
        many = throughput(installation_under_load, "light", 2000)
        replace_worker(installation_under_load, cohort=1)
        one = throughput(installation_under_load, "light", 100)
        replace_worker(installation_under_load, cohort=50)
        seen.append(f"{many:.0f}/s is {many / one:.1f} times {one:.0f}/s")
        if many >= 5 * one:
            return
    raise AssertionError("; ".join(seen))


def replace_worker(installation_under_load: Installation, *, cohort: int) -> None:
    assert installation_under_load.nodes[0].stop() == 0
    installation_under_load.worker(PIPELINE_MAX_COHORT_SIZE=str(cohort), **MILL)
    installation_under_load.nodes[0] = installation_under_load.nodes.pop()
