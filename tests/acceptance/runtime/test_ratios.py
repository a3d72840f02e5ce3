"""How much faster many are than one: ratios of one machine in one run, so they hold on any."""

from pipeline.domain.values import NewEvent
from pipeline.execution import events
from tests.support.cluster import Installation
from tests.support.wait import wait_for

MILL = {"PIPELINE_WORKFLOWS": "tests.support.mill", "PIPELINE_TICK": "200ms", "PIPELINE_POOL_SIZE": "10"}
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

    wait_for(done, within=60, every=0.1, why=f"{count} runs of {workflow}")
    return count / float(nodes.ask(_SPAN, workflow=workflow, after=latest.id)[0].seconds)


def test_with_a_mutation_of_20_ms_64_places_do_at_least_15_times_the_work_of_one(nodes: Installation) -> None:
    """Measured up to three times: a neighbour on the machine slows the many more than the one."""
    nodes.worker("--pool=prefork", "--concurrency=2", **MILL)
    nodes.beat()
    seen: list[str] = []
    for _ in range(3):
        one, many = throughput(nodes, "narrow", 30), throughput(nodes, "wide", 1500)
        seen.append(f"{many:.0f}/s is {many / one:.1f} times {one:.0f}/s")
        if many >= 15 * one:
            return
    raise AssertionError("; ".join(seen))


def test_with_a_backlog_cohorts_of_50_do_at_least_5_times_the_work_of_cohorts_of_one(nodes: Installation) -> None:
    nodes.beat()
    alone = nodes.worker("--pool=prefork", "--concurrency=2", PIPELINE_COHORT="1", **MILL)
    one = throughput(nodes, "light", 100)
    assert alone.stop() == 0
    nodes.worker("--pool=prefork", "--concurrency=2", PIPELINE_COHORT="50", **MILL)
    many = throughput(nodes, "light", 2000)
    assert many >= 5 * one, f"{many:.0f}/s is {many / one:.1f} times {one:.0f}/s"
