"""Pages learn cheaply what changed since they last asked."""

from collections import Counter
from typing import Any

import pytest

from pipeline.admin import attention
from pipeline.admin.changes import Changes, Mark, changes_since
from pipeline.admin.resolutions import Resolutions
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import MutationId, Phase
from pipeline.domain.workflows import OnUncertain
from pipeline.store.database import Database
from pipeline.transitions import breakers, events, resolution, workflows
from tests.factories import SOMEBODY, a_run, a_workflow, some_events, stopped
from tests.support.counted_statements import counted_statements


@pytest.fixture
def mark(db: Database) -> Mark:
    a_workflow(db, concurrency=20, on_uncertain=OnUncertain.CONTAIN)
    first = changes_since(db)
    assert (first.is_empty, first.waiting, first.oldest_at) == (True, 0, None)
    return first.mark


def an_unknown_outcome(db: Database, name: str) -> Any:
    some_events(db, name)
    return stopped(db, a_run(db, Phase.MUTATING, reconcilable=False), FailureKind.TRANSIENT)


def assert_counts_are_those_of_the_items(db: Database) -> None:
    """What waits is counted without being read; both must agree, also about handlers that no worker knows."""
    listed = attention.items(Resolutions(db), recent=None)
    assert attention.counts(db) == Counter((each.kind, each.workflow) for each in listed)


def seen(changes: Changes) -> list[tuple[str, str, str]]:
    return [(each.kind, each.id, each.what) for each in changes.items]


def test_a_question_opens_and_closes(db: Database, mark: Mark) -> None:
    run = an_unknown_outcome(db, "a")
    opened = changes_since(db, mark)
    assert seen(opened) == [("mutation", str(run.mutation_id), "opened")]
    assert (opened.waiting, opened.items[0].workflow) == (1, "billing")
    assert_counts_are_those_of_the_items(db)
    assert opened.oldest_at is not None
    with db.transaction() as tx:
        resolution.skip(tx, MutationId(run.mutation_id), SOMEBODY)
    closed = changes_since(db, opened.mark)
    assert seen(closed) == [("mutation", str(run.mutation_id), "closed")]
    assert [(act.act, act.mutation_id) for act in closed.acts] == [("mutation.skip", run.mutation_id)]
    assert (closed.waiting, closed.mark.token == opened.mark.token) == (0, False)


def test_everything_that_waits_for_an_operator_is_watched(db: Database, mark: Mark) -> None:
    some_events(db, "a")
    asked = a_run(db, Phase.MUTATING, needs_approval=True)
    (event,) = some_events(db, "b")
    with db.transaction() as tx:
        events.quarantine(tx, "billing", "send", event, SOMEBODY)
        breakers.open_by_operator(tx, ("mail", "send"), SOMEBODY)
        workflows.enter_maintenance(tx, "billing", "the schema changed")
    found = changes_since(db, mark)
    assert seen(found) == [
        ("approval", str(asked.mutation_id), "opened"),
        ("breaker", "mail.send", "opened"),
        ("quarantine", "send", "opened"),
        ("workflow", "billing", "changed"),
    ]
    assert found.waiting == 4
    assert_counts_are_those_of_the_items(db)
    with db.transaction() as tx:
        workflows.pause(tx, "billing", SOMEBODY)
    assert seen(changes_since(db, found.mark)) == [("workflow", "billing", "changed")]


def test_a_block_is_watched(db: Database) -> None:
    a_workflow(db)
    mark = changes_since(db).mark
    some_events(db, "a")
    run = stopped(db, a_run(db, Phase.PREPARED), FailureKind.AUTH)
    found = changes_since(db, mark)
    assert (seen(found), found.waiting) == ([("block", str(run.id), "opened")], 1)
    assert_counts_are_those_of_the_items(db)


def test_while_nothing_changes_a_call_is_one_statement(db: Database, mark: Mark) -> None:
    an_unknown_outcome(db, "a")
    mark = changes_since(db, mark).mark
    with counted_statements(db) as sent:
        found = changes_since(db, mark)
    assert [len(statements) for statements in sent] == [1]
    assert (found.is_empty, found.waiting, found.mark) == (True, 1, mark)
