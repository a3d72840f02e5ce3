"""Log lines as JSON and as text."""

import json
import logging
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from pipeline.telemetry import logs
from tests.support.recorded_spans import Seen

RUN = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def line(message: str = "done", *args: Any, exc_info: Any = None, **fields: Any) -> dict[str, Any]:
    record = logging.LogRecord("library", logging.INFO, __file__, 1, message, args, exc_info)
    record.__dict__.update(fields)
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_time_level_logger_and_message() -> None:
    found = line("%d runs", 3)
    assert (found["level"], found["logger"], found["message"]) == ("info", "library", "3 runs")
    assert datetime.fromisoformat(found["time"]).tzinfo == UTC


def test_ids_are_fields() -> None:
    assert line(run_id=RUN, fence=7)["run_id"] == str(RUN)
    assert line(run_id=RUN, fence=7)["fence"] == 7


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        found = line(exc_info=(type(error), error, error.__traceback__))
    assert found["error_type"] == "ValueError"
    assert "two\nlines" in found["stack"]


def test_structures_in_extra_fields_are_dropped_as_they_may_be_arguments_of_tasks() -> None:
    assert "data" not in line(data={"kwargs": "{'card': 4242}"})


def test_extra_fields_are_bounded() -> None:
    found = line("x" * 10_000, long="y" * 10_000, **{f"field{n}": n for n in range(1000)})
    assert len(found) <= logs.MAX_FIELDS + 10
    assert len(json.dumps(found)) < 8_000


def test_an_extra_field_cannot_overwrite_a_standard_field() -> None:
    assert line(level="critical", time="never", logger="root")["level"] == "info"


def test_values_that_json_lacks_are_written_as_text() -> None:
    assert line("%s", float("nan"))["message"] == "nan"
    assert line(ratio=float("inf"))["ratio"] == "inf"
    assert line("caf\u00e9 \ud800")["message"] == "caf\u00e9 ?"


def test_a_line_written_inside_a_span_names_its_trace(seen: Seen) -> None:
    with seen.tracer.start_as_current_span("work") as span:
        found = line()
        pretty = logs.PrettyFormatter(logging.Formatter("%(message)s")).format(
            logging.LogRecord("x", 20, "", 1, "first\nsecond", (), None)
        )
    trace_id = f"{span.get_span_context().trace_id:032x}"
    assert found["trace_id"] == trace_id
    assert pretty == f"first trace_id={trace_id}\n    second"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x85", "\u2028", "\f"])
def test_no_text_can_fake_a_log_line(end: str) -> None:
    text = f"LogicError: no{end}run.committed run_id=1"
    record = logging.LogRecord("x", 20, "", 1, "%s", (text,), None)
    pretty = logs.PrettyFormatter(logging.Formatter("%(message)s")).format(record)
    assert pretty == "LogicError: no\n    run.committed run_id=1"
    assert len(logs.JsonFormatter().format(record).splitlines()) == 1


def test_a_pretty_line_shows_hidden_characters_of_its_message() -> None:
    record = logging.makeLogRecord({"msg": "refused %s", "args": ("99\u202e10\x1b[2J",)})
    coloured = logging.Formatter("\x1b[31m%(message)s\x1b[0m")
    assert logs.PrettyFormatter(coloured).format(record) == "\x1b[31mrefused 99\\u202e10\\x1b[2J\x1b[0m"


def test_a_line_that_names_its_own_trace_keeps_it(seen: Seen) -> None:
    with seen.tracer.start_as_current_span("work"):
        assert line(trace_id="abc", span_id="def")["trace_id"] == "abc"


def test_without_a_trace_a_pretty_line_is_unchanged() -> None:
    usual = logging.Formatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", 20, "", 1, "done", (), None)
    assert logs.PrettyFormatter(usual).format(record) == usual.format(record)


@pytest.mark.parametrize("form", ["json", "pretty"])
def test_setting_the_format_twice_changes_nothing(form: str) -> None:
    handler = logging.StreamHandler()
    logs.set_format([handler], form)
    logs.set_format([handler], form)
    assert not isinstance(getattr(handler.formatter, "usual", None), logs.PrettyFormatter)


@pytest.mark.parametrize(("level", "effective"), [("DEBUG", "INFO"), ("INFO", "INFO"), ("ERROR", "ERROR")])
def test_celerys_loggers_of_task_arguments_never_go_below_info(
    level: str, effective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "QUIET_LOGGERS", ("asked", "asked.quiet"))
    logging.getLogger("asked").setLevel(level)
    logs.set_level(None)
    assert logging.getLevelName(logging.getLogger("asked.quiet").getEffectiveLevel()) == effective
