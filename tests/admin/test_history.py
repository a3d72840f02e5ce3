"""Samples of workflows are taken once a minute and read as points of a chart."""

from datetime import timedelta

import pytest

from pipeline.admin.throughput import all_histories, workflow_history
from pipeline.background import pruner
from pipeline.background.sweeps import sample
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import MutationId, Phase
from pipeline.domain.workflows import OnUncertain
from pipeline.store.database import Database
from pipeline.transitions import resolution
from tests.factories import SOMEBODY, a_run, a_workflow, committed, some_events, stopped, the_mutation, the_run
from tests.support.table_reads import rows

MINUTE = timedelta(minutes=1)


@pytest.fixture
def site(db: Database) -> Database:
    """A workflow that was sampled before anything happened, and an idle one."""
    for name in ("billing", "letters"):
        a_workflow(db, name, concurrency=20, on_uncertain=OnUncertain.CONTAIN)
    sample(db)
    db.advance_clock(MINUTE)
    return db


def test_what_happened_since_the_last_sample_is_counted_once(site: Database) -> None:
    some_events(site, "a", "b", "c", "d")
    committed(site, a_run(site, Phase.MUTATED))
    stopped(site, a_run(site, Phase.MUTATING, reconcilable=False), FailureKind.TRANSIENT)
    stopped(site, a_run(site, Phase.PREPARED))
    assert sample(site).counts == {"workflows": 1}
    ((row,), columns) = rows(site, "SELECT * FROM pipeline.samples"), "workflow published committed stopped mutated"
    assert [getattr(row, name) for name in columns.split()] == ["billing", 4, 1, 2, 2]
    assert (row.uncertain, row.unresolved, row.backlog, row.span >= MINUTE) == (1, 1, 2, True)
    site.advance_clock(MINUTE)
    sample(site)
    (again,) = rows(site, "SELECT * FROM pipeline.samples ORDER BY at DESC LIMIT 1")
    assert (again.published, again.committed, again.stopped, again.mutated) == (0, 0, 0, 0)
    assert (again.unresolved, again.backlog) == (1, 2)


def test_a_run_that_was_open_at_the_last_sample_is_counted_when_it_ends(site: Database) -> None:
    some_events(site, "a", "b")
    slow = a_run(site, Phase.MUTATED)
    asked = a_run(site, Phase.MUTATING, needs_approval=True)
    sample(site)
    site.advance_clock(MINUTE)
    committed(site, slow)
    with site.transaction() as tx:
        mutation = the_mutation(site, asked.mutation_id)
        resolution.approve(tx, MutationId(mutation.id), SOMEBODY, request_hash=mutation.request_hash)
    assert the_run(site, asked.id).finished_at is None
    sample(site)
    (row,) = rows(site, "SELECT * FROM pipeline.samples ORDER BY at DESC LIMIT 1")
    assert (row.committed, row.published) == (1, 0)


def test_an_idle_installation_writes_no_samples(site: Database) -> None:
    assert sample(site).counts == {}
    assert rows(site, "SELECT * FROM pipeline.samples") == []


def test_a_history_has_a_point_for_every_span(site: Database) -> None:
    some_events(site, *(f"m{n}" for n in range(60)))
    sample(site)
    site.advance_clock(MINUTE / 2)
    found = workflow_history(site, "billing", timedelta(minutes=10))
    assert (found.step, len(found.points)) == (MINUTE, 10)
    last = found.points[-1]
    assert (round(last.published, 1), last.committed, last.backlog, last.uncertain_share) == (1.0, 0.0, 60, None)
    assert [point.published for point in found.points[:-1]] == [0.0] * 9
    assert found.until - found.points[-1].at == MINUTE
    idle = all_histories(site, timedelta(days=14))
    assert [(each.workflow, each.step, len(each.points)) for each in idle] == [
        ("billing", timedelta(hours=3), 112),
        ("letters", timedelta(hours=3), 112),
    ]
    assert {point.backlog for point in idle[1].points} == {0}


def test_a_sample_after_an_outage_is_spread_over_the_time_that_it_covers(site: Database) -> None:
    some_events(site, *(f"m{n}" for n in range(60)))
    site.advance_clock(timedelta(minutes=9))
    sample(site)
    site.advance_clock(timedelta(seconds=1))
    last = workflow_history(site, "billing", timedelta(minutes=30)).points[-1]
    assert (round(last.published, 2), round(last.oldest_age / 60)) == (0.1, 9)


def test_the_share_of_unknown_outcomes_is_of_runs_with_a_mutation(site: Database) -> None:
    some_events(site, "a", "b", "c")
    committed(site, a_run(site, Phase.MUTATED))
    stopped(site, a_run(site, Phase.MUTATING, reconcilable=False), FailureKind.TRANSIENT)
    stopped(site, a_run(site, Phase.PREPARED))
    sample(site)
    site.advance_clock(timedelta(seconds=1))
    point = workflow_history(site, "billing").points[-1]
    assert (point.uncertain_share, point.unresolved) == (0.5, 1)


def test_samples_are_deleted_after_two_weeks(site: Database) -> None:
    some_events(site, "a")
    sample(site)
    site.advance_clock(timedelta(days=13))
    assert pruner.prune(site).counts == {}
    site.advance_clock(timedelta(days=2))
    assert pruner.prune(site).counts == {"samples": 1}


def test_an_impossible_span_and_an_unknown_workflow_are_refused(site: Database) -> None:
    for span in (timedelta(0), timedelta(days=15)):
        with pytest.raises(InvalidInputError, match="1 minute to 14 days"):
            workflow_history(site, "billing", span)
    with pytest.raises(NotFoundError):
        workflow_history(site, "bills")
