"""Short lines for a developer: one per outcome, and none per task."""

import logging
from typing import Any

import pytest

from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.telemetry import logs
from pipeline.telemetry.logs import _OUTCOMES, is_shown
from pipeline.telemetry.transition_log import NEEDS_OPERATOR, TRANSITIONS
from tests.factories import a_run, a_workflow, applied, some_events, stopped


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """Return what a handler with short lines writes of everything that was logged."""
    handler = logging.StreamHandler()
    logs.set_format([handler], "short")
    caplog.set_level(logging.INFO)
    return lambda: [handler.format(record) for record in caplog.records if handler.filter(record)]


def record(name: str, level: int, message: str = "text", **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, level, __file__, 1, message, (), None)
    vars(made).update(fields)
    return made


def test_an_applied_mutation_is_one_line_with_its_input_its_operation_and_its_duration(
    db: Database, lines: Any
) -> None:
    a_workflow(db)
    some_events(db, "order-4711")
    applied(db, a_run(db, Phase.MUTATING, message_ids=("order-4711",)))
    (line,) = [line for line in lines() if "order-4711" in line]
    workflow, message, operation, outcome, duration = line.split("  ")
    assert (workflow, message, operation, outcome) == ("billing", "order-4711", "mail.send", "applied")
    assert duration.endswith(" ms")


def test_an_unknown_outcome_is_said_for_all_inputs_of_the_run(db: Database, lines: Any) -> None:
    a_workflow(db)
    some_events(db, "a")
    stopped(db, a_run(db, Phase.MUTATING, message_ids=("a", "b", "c")))
    assert any(line.startswith("billing  a and 2 more  mail.send  unknown") for line in lines())
    assert not any(word in line for line in lines() for word in ("run.started", "run.claimed", "run.prepared"))


def test_tasks_are_hidden_and_warnings_and_other_packages_are_not() -> None:
    assert not is_shown(record("celery.app.trace", logging.INFO))
    assert not is_shown(record("celery.worker.strategy", logging.INFO))
    assert is_shown(record("celery.app.trace", logging.ERROR))
    assert is_shown(record("shop.billing", logging.INFO))
    assert not is_shown(record("pipeline", logging.INFO, transition="run.claimed"))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"transition": "run.stopped", "workflow": "shop", "handler": "send", "status": "error"},
            "shop  send  stopped (error)",
        ),
        (
            {"transition": "breaker.opened", "connector": "mail", "operation": "send"},
            "mail.send  circuit breaker opened",
        ),
        ({"transition": "event.quarantined", "workflow": "shop", "event_id": 7}, "shop  event 7  quarantined"),
        (
            {
                "transition": "mutation.applied",
                "message_id": "a\x1b[2Jb\nc",
                "inputs": 1,
                "resolved_by": "reconcile",
                "duration": 1.25,
            },
            "a [2Jb c  applied (by reconcile)  1.2 s",
        ),
        ({"transition": "mutation.failed", "resolved_by": "call", "duration": 125.0}, "did not happen  2 min"),
    ],
)
def test_a_line_has_what_is_known(fields: dict[str, Any], line: str) -> None:
    handler = logging.StreamHandler()
    logs.set_format([handler], "short")
    assert handler.format(record("pipeline", logging.INFO, **fields)) == line


def test_another_line_keeps_the_format_of_its_handler() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logs.set_format([handler], "short")
    logs.set_format([handler], "short")
    assert handler.format(record("shop", logging.ERROR, "one\ntwo")) == "ERROR one\n    two"


def test_every_transition_that_waits_for_an_operator_has_words() -> None:
    assert set(_OUTCOMES) <= set(TRANSITIONS)
    assert set(_OUTCOMES) >= NEEDS_OPERATOR
