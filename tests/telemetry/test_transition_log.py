"""The transition log: only known transitions, as structured lines."""

import logging
import re

import pytest

from pipeline.telemetry import transition_log
from pipeline.telemetry.transition_log import TRANSITIONS

#: What a log record is made of; a field of the same name is refused by the logging module.
RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def test_a_transition_is_one_line_with_its_fields_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pipeline"):
        transition_log.write("run.started", {"run_id": 7, "workflow": "billing"})
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == (
        "pipeline",
        "INFO",
        "run.started run_id=7 workflow=billing",
    )
    fields = {key: value for key, value in vars(record).items() if key not in RESERVED}
    assert fields == {"transition": "run.started", "run_id": 7, "workflow": "billing"}


def test_an_unknown_transition_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(LookupError, match=r"'run\.exploded' is not a transition"):
        transition_log.write("run.exploded", {})
    assert caplog.records == []


def test_a_line_below_the_log_level_is_not_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        transition_log.write("run.started", {"run_id": 7})
    assert caplog.records == []


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition_is_named_by_its_noun_and_a_verb_in_the_past(name: str) -> None:
    assert re.fullmatch(r"(event|run|mutation|operation|workflow|session|breaker|token|login)\.[a-z]+(_[a-z]+)?", name)
    verb = name.split(".")[1].removesuffix("_late").removesuffix("_back").split("_")[-1]
    assert verb.endswith("ed") or verb in {"mutating", "sent", "found"}


@pytest.mark.parametrize(("name", "meaning"), TRANSITIONS.items())
def test_a_transition_has_a_meaning_for_the_operator(name: str, meaning: str) -> None:
    assert len(meaning.split()) >= 3
    assert not meaning.endswith(".")
    assert name not in meaning
