"""Policies, items, sources and errors: frozen, checked, and the same after a trip through JSON."""

import copy
import json
import pickle
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from pipeline.consumer_engine import policies
from pipeline.consumer_engine.consumer import AcknowledgingSource
from pipeline.consumer_engine.errors import (
    ConsumerLoopTimeoutException,
    ExceptionType,
    FetchException,
    FetchTimeoutException,
    TransactionException,
    as_transaction_exception,
)
from pipeline.consumer_engine.policies import (
    BatchPolicy,
    ConcurrencyPolicy,
    ConsumerLoopPolicy,
    ConsumerPolicy,
    ConsumerSteps,
    EmptyQueuePolicy,
    FetchPolicy,
    ProcessPolicy,
    RetryPolicy,
)
from pipeline.consumer_engine.transactions import Transaction
from pipeline.domain.errors import PipelineError
from pipeline.domain.policies import Policy
from tests.consumer_engine.scripted_tasks import (
    NOON,
    Batches,
    Cut,
    Does,
    Script,
    check,
    item,
    items,
    policy,
    run_script,
)
from tests.support.rule import rule

MODELS = [
    value
    for value in vars(policies).values()
    if isinstance(value, type) and issubclass(value, Policy) and value not in (Policy, policies.EnginePolicy)
]


@rule("E-33", "E-36")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"E1-{model.__name__}")
def test_a_policy_has_defaults_that_pass_its_own_bounds_and_survives_json_unchanged(
    model: type[BaseModel],
) -> None:
    made = model()
    again = model.model_validate(made.model_dump())
    assert made == again == model.model_validate_json(made.model_dump_json())
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, next(iter(model.model_fields)), 7)


def test_the_specification_has_eleven_policies_and_all_are_here() -> None:
    assert len(MODELS) == 11


@rule("E-2")
@pytest.mark.parametrize(
    "build",
    [
        lambda: RetryPolicy(max_attempts=0),
        lambda: RetryPolicy(backoff=-1),
        lambda: RetryPolicy(backoff_multiplier=0.5),
        lambda: RetryPolicy(backoff_cap=-1),
        lambda: RetryPolicy(timeout=0),
        lambda: RetryPolicy(timeout=float("nan")),
        lambda: RetryPolicy(backoff=float("inf")),
        lambda: RetryPolicy(timeout=1e12),
        lambda: RetryPolicy(backoff=1e200),
        lambda: RetryPolicy(backoff_cap=1e300),
        lambda: RetryPolicy(max_attempts=True),
        lambda: ConcurrencyPolicy(value=-1),
        lambda: ConcurrencyPolicy(value=5, max=4),
        lambda: ConcurrencyPolicy(value=5, min=6),
        lambda: BatchPolicy(size=0),
        lambda: BatchPolicy(size=9, max_size=3),
        lambda: EmptyQueuePolicy(backoff_multiplier=0),
        lambda: ConsumerLoopPolicy(limit=-1),
        lambda: ConsumerLoopPolicy(timeout=0),
        lambda: ConsumerLoopPolicy(transaction_timeout=-0.1),
        lambda: ConsumerPolicy.model_validate({"lop": {}}),
    ],
)
def test_a_policy_out_of_bounds_cannot_be_built(build: Callable[[], BaseModel]) -> None:
    with pytest.raises(ValidationError):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: ConsumerPolicy(loop=ConsumerLoopPolicy(concurrency=ConcurrencyPolicy(value=10))),
        lambda: ConsumerPolicy(loop=ConsumerLoopPolicy(batch=BatchPolicy(size=100), streaming=True)),
        lambda: ConsumerPolicy(
            steps=ConsumerSteps(
                process=ProcessPolicy(
                    retry=RetryPolicy(max_attempts=5, timeout=30, backoff=1, backoff_multiplier=2, backoff_cap=60)
                )
            )
        ),
    ],
)
def test_e1_the_examples_of_the_specification_build(build: Callable[[], ConsumerPolicy]) -> None:
    assert ConsumerPolicy.model_validate_json(build().model_dump_json()) == build()


@rule("E-7")
@pytest.mark.parametrize(
    ("backoff", "multiplier", "cap", "pauses"),
    [
        (1, 2, 5, [1, 2, 4, 5, 5]),
        (1, 10, 1000, [1, 10, 100, 1000, 1000]),
        (2, 1, 0, [2, 2, 2]),
        (1, 2, 0.5, [0.5, 0.5]),
        (0, 3, 0, [0, 0, 0]),
    ],
)
def test_pauses_follow_the_formula_and_reach_their_cap(
    backoff: float, multiplier: float, cap: float, pauses: list[float]
) -> None:
    shared = {"backoff": backoff, "backoff_multiplier": multiplier, "backoff_cap": cap}
    for each in (RetryPolicy(**shared), EmptyQueuePolicy(**shared)):
        assert [each.pause(index) for index in range(len(pauses))] == pauses
        assert each.pause(100_000) >= 0  # no number of failures is too many for a float
    assert 1e8 < RetryPolicy(backoff=1).pause(5000) < threading.TIMEOUT_MAX  # nor too many for the operating system


@rule("E-33")
def test_the_arguments_for_a_source_cannot_be_changed_after_the_policy_is_built() -> None:
    given: dict[str, Any] = {"topics": ["a"]}
    made = FetchPolicy(extra=given)
    given["topics"].append("b")
    with pytest.raises(TypeError, match="read-only"):
        made.extra["topics"].append("b")
    assert made.model_dump() == {"retry": RetryPolicy().model_dump(), "extra": {"topics": ["a"]}}


@rule("E-2")
@pytest.mark.parametrize(
    "argument",
    [print, NOON, (1,), {1}, float("nan"), b"hunter2", "\ud800", {1: "hunter2"}, {"a": [b"hunter2"]}],
    ids=repr,
)
def test_e1_arguments_that_do_not_survive_json_are_refused_and_not_shown(argument: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        ConsumerPolicy.model_validate({"steps": {"fetch": {"extra": {"x": argument}}}})
    assert "hunter2" not in str(caught.value)
    fine = FetchPolicy(extra={"a": [1, 2.5, True, None, {"b": "ü"}]})
    assert FetchPolicy.model_validate_json(fine.model_dump_json()) == fine


def test_the_error_of_a_refused_policy_or_item_does_not_show_its_input() -> None:
    refused: list[Callable[[], Any]] = [
        lambda: FetchPolicy(extra="hunter2"),
        lambda: ConsumerPolicy.model_validate({"steps": {"fetch": {"extra": "hunter2"}}}),
        lambda: Transaction(transaction_id=["hunter2"], created_at=NOON, payload="hunter2"),
        lambda: Transaction(transaction_id="t-0", created_at="hunter2", payload="hunter2"),
    ]
    for build in refused:
        with pytest.raises(ValidationError) as caught:
            build()
        assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(policy(extra={"password": "hunter2"}))


@rule("E-35")
def test_e2_an_item_is_read_only_at_every_depth() -> None:
    payload = {"lines": [{"sku": "a"}], "tags": {"x"}}
    made = item("t-1", payload, metadata={"queue": {"name": "q"}}, source="shop")
    payload["lines"].append({})  # type: ignore[attr-defined]
    assert made.payload == {"lines": [{"sku": "a"}], "tags": {"x"}}
    acts: list[Callable[[], Any]] = [
        lambda: made.payload.update(a=1),
        lambda: made.payload["lines"].append(1),
        lambda: made.payload["lines"][0].pop("sku"),
        lambda: made.payload["tags"].add("y"),
        lambda: made.metadata["queue"].clear(),
        lambda: setattr(made, "payload", None),
    ]
    for act in acts:
        with pytest.raises((TypeError, ValidationError, AttributeError)):
            act()
    with pytest.raises(TypeError, match=r"this list is read-only; change a copy instead: list\(it\)"):
        made.payload["lines"] += [1]


def test_e2_an_item_survives_json_pickle_and_copies() -> None:
    made = item("t-1", {"a": [1, {"b": None}]}, metadata={"k": "v"}, correlation_id="c", parent_id="p", source="s")
    assert Transaction.model_validate_json(made.model_dump_json()) == made
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert json.loads(json.dumps(made.payload)) == made.payload
    with pytest.raises(TypeError):
        copy.deepcopy(made).payload["a"].append(2)


@pytest.mark.parametrize(
    "wrong", [{"transaction_id": ""}, {"transaction_id": " "}, {"created_at": NOON.replace(tzinfo=None)}]
)
def test_e2_an_item_without_an_id_or_a_time_zone_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Transaction(**{"transaction_id": "t-1", "created_at": NOON, **wrong})


def test_e2_the_time_of_an_item_is_kept_in_utc_and_its_payload_stays_out_of_logs() -> None:
    east = datetime(2030, 1, 1, 14, tzinfo=timezone(timedelta(hours=2)))
    made = Transaction(transaction_id="t-1", created_at=east, payload="secret")
    assert made.created_at == NOON
    assert made.created_at.tzinfo is UTC
    assert str(made) == repr(made) == "Transaction('t-1')"


@check("E3")
def test_any_object_that_gives_out_items_is_a_source_and_an_acknowledging_one_is_acknowledged(variant: Any) -> None:
    class Acked(Cut):
        def __init__(self) -> None:
            super().__init__(items(3))
            self.acked: list[str] = []

        def ack_transaction(self, transaction: Transaction, /) -> None:
            self.acked.append(transaction.transaction_id)

        def nack_transaction(self, transaction: Transaction, /, requeue: bool = True) -> None:
            raise AssertionError(f"it was not requested: {transaction} {requeue}")

    source, script = Acked(), Script()
    script.will_process("t-1", Does(raises=ValueError("no")))
    task = variant.task(script)
    mixin: Any = type(task).__mro__[1]
    task.handle_transaction_success = mixin.handle_transaction_success.__get__(task)
    task.source = source
    assert isinstance(source, AcknowledgingSource)
    assert not isinstance(Batches(), AcknowledgingSource)
    run = run_script(variant, script, source, policy(), task=task)
    assert (run.error, run.report.succeeded, run.report.failed) == (None, 2, 1)
    assert source.acked == ["t-0", "t-2"]


@rule("E-6")
def test_e4_every_error_of_the_engine_has_a_category_and_is_one_of_ours() -> None:
    assert TransactionException("x").category is ExceptionType.SYSTEM
    assert TransactionException("x", ExceptionType.BUSINESS).category is ExceptionType.BUSINESS
    assert (FetchException("x").category, FetchTimeoutException("x").category) == ("system", "timeout")
    assert ConsumerLoopTimeoutException("x").category is ExceptionType.TIMEOUT
    assert issubclass(FetchTimeoutException, FetchException)
    for kind in (TransactionException, FetchException, ConsumerLoopTimeoutException):
        assert issubclass(kind, PipelineError)


@rule("E-13")
def test_e4_a_wrapped_error_keeps_its_cause_and_names_it_if_it_has_no_message() -> None:
    cause = ValueError()
    made = as_transaction_exception(cause, "t-1")
    assert (made.category, made.transaction_id, made.__cause__, str(made)) == ("system", "t-1", cause, "ValueError()")
    assert made.to_dict() == {
        "message": "ValueError()",
        "category": "system",
        "transaction_id": "t-1",
        "cause": "ValueError()",
    }
    assert as_transaction_exception(TimeoutError("slow"), "t-1").category is ExceptionType.TIMEOUT
    assert pickle.loads(pickle.dumps(made)).to_dict()["transaction_id"] == "t-1"


@rule("E-35")
def test_e4_an_error_that_a_task_raises_for_two_items_gets_two_ids() -> None:
    class OutOfStockError(TransactionException):
        """A task's own."""

    shared = OutOfStockError("none left", ExceptionType.BUSINESS)
    first, second = as_transaction_exception(shared, "t-1"), as_transaction_exception(shared, "t-2")
    assert (first.transaction_id, second.transaction_id, shared.transaction_id) == ("t-1", "t-2", None)
    assert isinstance(first, OutOfStockError)
    assert as_transaction_exception(first, "t-1") is first


@pytest.mark.parametrize(
    "retry",
    [
        RetryPolicy(max_attempts=5, timeout=10, backoff=1, backoff_multiplier=2, backoff_cap=5),
        RetryPolicy(max_attempts=6, backoff=3),
        RetryPolicy(max_attempts=4, timeout=2),
        RetryPolicy(),
    ],
)
def test_the_longest_time_of_a_step_is_that_of_its_attempts_and_pauses(retry: RetryPolicy) -> None:
    pauses = sum(retry.pause(index) for index in range(retry.max_attempts - 1))
    assert retry.longest() == retry.max_attempts * (retry.timeout or 0) + pauses


def test_the_longest_time_of_a_step_without_end_is_known_at_once() -> None:
    assert RetryPolicy(max_attempts=10**9, backoff=1, backoff_cap=2).longest() == 1 + 2 * (10**9 - 2)
    assert RetryPolicy(max_attempts=10**9, backoff=1).longest() > 1e17
