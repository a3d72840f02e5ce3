"""Messages about failures: type, place and the end of an item, but never its payload."""

import logging
from typing import Any

import pytest
from opentelemetry.trace import StatusCode
from pydantic import BaseModel

from pipeline.consumer_engine.errors import (
    ConsumerLoopTimeoutException,
    ExceptionType,
    FetchException,
    TransactionException,
    error_message,
)
from pipeline.consumer_engine.lifecycle import Step
from pipeline.consumer_engine.policies import RetryPolicy
from pipeline.domain.errors import quantity
from tests.consumer_engine.scripted_tasks import (
    Batches,
    Cut,
    Does,
    Run,
    Script,
    ScriptRun,
    check,
    item,
    items,
    policy,
    run_script,
    with_time,
)
from tests.consumer_engine.test_telemetry import Watch, attributes, watch
from tests.support.rule import rule

__all__ = ["watch"]


class Order(BaseModel):
    cents: int


class SilentError(TransactionException):
    """Cannot say what happened."""

    def __str__(self) -> str:
        raise ValueError("no message")


@rule("E-29")
@check("E26")
def test_a_failure_is_logged_with_its_type_and_its_place_and_in_one_line(
    variant: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    script = Script().will_process("t-0", Does(raises=KeyError("customer")))
    script.will_process("t-1", Does(raises=ValueError("one\nERROR root: all is lost")))
    script.will_process("t-2", Does(raises=TransactionException("no stock", ExceptionType.BUSINESS)))
    script.will_process("a\nERROR root: all is lost", Does(raises=ValueError("no")))
    script.will(Step.EXCEPTION, "t-2", Does(raises=OSError("no disk")))
    batch = [*items(3), item("a\nERROR root: all is lost")]
    run_script(variant, script, Batches(batch), policy())
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all("\n" not in line for line in lines)
    for expected in (
        "transaction t-0 failed (system): KeyError: 'customer' (scripted_tasks.py:",
        "transaction t-1 failed (system): ValueError: one ERROR root: all is lost (scripted_tasks.py:",
        "transaction t-2 failed (business): no stock (scripted_tasks.py:",
        "the exception handler failed for transaction t-2 (system): OSError: no disk (scripted_tasks.py:",
        "transaction 'a\\nERROR root: all is lost' failed (system): ValueError: no (scripted_tasks.py:",
    ):
        assert any(expected in line for line in lines), (expected, lines)
    assert "in settle" in caplog.text  # the traceback, at level debug


@rule("E-29")
@check("E26")
@pytest.mark.parametrize("step", [Step.PROCESS, Step.SUCCESS])
def test_a_timeout_between_attempts_names_the_failure_of_the_last_attempt(
    variant: Run, step: Step, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    again = RetryPolicy(max_attempts=5, backoff=3600)

    def limited(bound: float) -> ScriptRun:
        script = Script(always={step: Does(raises=ConnectionError("db.internal:\nconnection refused"))})
        chosen = policy(process=again, success=again, transaction_timeout=bound)
        return run_script(variant, script, Cut(items(1)), chosen)

    run = with_time(limited, lambda run: "refused" in str(getattr(run.outcomes[0].error, "__cause__", "")))
    error = "ConnectionError: db.internal: connection refused (scripted_tasks.py:"
    expected = f"the timeout of a transaction; the last attempt: {error}"
    *_, warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "transaction t-0 failed (timeout): t-0 was not done within" in warned
    assert expected in warned
    assert expected in str(run.outcomes[0].error)
    assert "in settle" in caplog.text  # the traceback, at level debug


@rule("E-34")
@check("E26")
def test_the_input_of_a_pydantic_error_stays_out_of_logs_and_spans(
    variant: Run, watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    payload = {"cents": "hunter2"}
    script = Script().will_process("t-0", Does(act=lambda: Order.model_validate(payload)))
    run = run_script(variant, script, Cut(items(1)), policy(), watch.telemetry)
    assert "ValidationError: Order does not fit; cents: Input should be a valid integer" in caplog.text
    texts = [caplog.text, str(run.outcomes[0].error), *(span.to_json() for span in watch.spans)]
    assert [text for text in texts if "hunter2" in text] == []


@pytest.mark.parametrize("is_watched", [False, True])
@check("E24")
def test_an_error_without_a_readable_message_is_a_failure_like_any_other(
    variant: Run, is_watched: bool, watch: Watch
) -> None:
    script = Script(always={Step.PROCESS: Does(raises=SilentError("x"))})
    run = run_script(variant, script, Cut(items(2)), policy(), **({"telemetry": watch.telemetry} if is_watched else {}))
    assert (run.error, run.report.failed) == (None, 2)
    assert "SilentError, whose message cannot be read" in error_message(script.errors[0][1])


@rule("E-3", "E-23")
@check("E24")
def test_the_spans_of_items_and_loops_have_their_status(variant: Run) -> None:
    def limited(bound: float) -> tuple[Watch, ScriptRun]:
        script = Script().will_process("t-1", Does(raises=ValueError("x" * 900))).will_process("t-2", Does(takes=60))
        watch, chosen = Watch(), policy(process=RetryPolicy(timeout=bound))
        return watch, run_script(variant, script, Cut(items(3)), chosen, watch.telemetry)

    watch, _ = with_time(limited, lambda made: made[1].report.step_timeouts == 1)
    ended = {attributes(span)["transaction_id"]: span for span in watch.named("start_processing")}
    assert [attributes(ended[f"t-{n}"])["status"] for n in range(3)] == ["success", "exception", "exception"]
    codes = [ended[f"t-{n}"].status.status_code for n in range(3)]
    assert codes == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR]
    said_of = attributes(ended["t-1"])
    assert (said_of["exception.type"], said_of["exception.message"]) == ("ValueError", "x" * 500)
    assert attributes(ended["t-2"])["exception.category"] == "timeout"
    (loop,) = watch.named("consume_transactions")
    assert loop.status.status_code is StatusCode.UNSET


@rule("E-3")
@check("E24")
def test_a_loop_that_breaks_is_marked_on_its_span(variant: Run, watch: Watch) -> None:
    broken = run_script(variant, Script(), Batches(Does(raises=OSError("refused"))), policy(), watch.telemetry)
    slow = Script().will_process("t-0", Does(takes=20))
    late = run_script(variant, slow, Cut(items(1)), policy(timeout=0.1), watch.telemetry)
    assert (type(broken.error), type(late.error)) == (FetchException, ConsumerLoopTimeoutException)
    marked = [attributes(span) for span in watch.named("consume_transactions")]
    assert [each["exception.category"] for each in marked] == ["system", "timeout"]
    assert [each["exception.type"] for each in marked] == ["OSError", "ConsumerLoopTimeoutException"]


@check("E13")
def test_step_timeouts_are_counted_among_the_failed(variant: Run) -> None:
    def limited(bound: float) -> ScriptRun:
        script = Script().will_process("t-0", Does(takes=60)).will_process("t-1", Does(raises=ValueError("no")))
        return run_script(variant, script, Cut(items(2)), policy(process=RetryPolicy(timeout=bound)))

    run = with_time(limited, lambda run: run.report.step_timeouts == 1)
    assert (run.report.failed, run.report.step_timeouts, run.report.timed_out) == (2, 1, 0)


def test_one_item_is_written_in_the_singular() -> None:
    said_so: Any = [quantity(number, noun) for number, noun in ((1, "item"), (2, "item"), (1, "batch"), (0, "batch"))]
    assert said_so == ["1 item", "2 items", "1 batch", "0 batches"]
