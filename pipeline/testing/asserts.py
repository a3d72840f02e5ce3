"""Assert about a workflow under test. A failure prints every run and mutation."""

from collections.abc import Sequence

from pipeline.store.rows import NamedRunRow
from pipeline.testing.inline import Inline
from pipeline.workflows.authoring import Topic


def assert_consumed(run: Inline, topic: Topic, *, by: str | None = None) -> None:
    """Assert that every event of the topic was consumed, by every consumer or by one."""
    assert_deliveries(run, topic, "consumed", by=by)


def assert_deliveries(run: Inline, topic: Topic, *statuses: str, by: str | None = None) -> None:
    """Assert the statuses of a topic's events, oldest first. One status counts for all events."""
    found = [row for row in run.deliveries(topic) if by in (None, row.handler)]
    assert found, f"topic {topic.name!r} has no event for {by or 'any consumer'}"
    expected = list(statuses) if len(statuses) > 1 else [*statuses] * len(found)
    actual = [row.status for row in found]
    assert actual == expected, f"events of {topic.name!r} are {actual}, expected {expected}\n{describe_state(run)}"


def assert_runs(run: Inline, *statuses: str, handler: str | None = None) -> Sequence[NamedRunRow]:
    """Assert the statuses of the runs, oldest first, and return the runs."""
    found = [row for row in run.runs() if handler in (None, row.handler)]
    actual = [row.status for row in found]
    assert actual == list(statuses), f"runs are {actual}, expected {list(statuses)}\n{describe_state(run)}"
    return found


def describe_state(run: Inline) -> str:
    """Describe runs and mutations, one line each."""
    lines = [
        f"run {row.id} of {row.handler}: {row.phase}, {row.status}{': ' + row.error if row.error else ''}"
        for row in run.runs()
    ]
    lines += [
        f"mutation {row.connector}.{row.operation} of run {row.run_id}: {row.status}"
        f"{': ' + row.error if row.error else ''}"
        for row in run.ledger()
    ]
    return "\n".join(lines) or "nothing has run"
