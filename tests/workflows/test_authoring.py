"""What a user may declare, and what is kept of it."""

# ruff: noqa: ARG002 - the host decides which arguments a handler takes

import importlib
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pipeline import Connector, DeclarationError, PrepareResult, Topic, Workflow
from pipeline.domain.errors import InvalidInputError, NotFoundError
from pipeline.domain.policies import FailurePolicy, WakePolicy
from pipeline.domain.states import EventId
from pipeline.domain.workflows import AfterFailedMutation, StartAt
from pipeline.workflows.authoring import deserialize_event, parse_payload, serialize_event, workflows_of
from pipeline.workflows.handler_types import Event, MutationResult, RequestedMutation, ResultStatus
from pipeline.workflows.registry import Registry, fingerprint, spec_of

NOW = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


class Order(BaseModel):
    """A payload."""

    number: int


class Consumer:
    """All three phases, doing nothing."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        return PrepareResult.nothing()

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        return None

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        return None


def a_workflow(**options: Any) -> tuple[Workflow, Topic]:
    workflow = Workflow("shop", **options)
    return workflow, workflow.topic("orders", schema=Order)


def test_a_consumer_is_known_by_its_class_or_by_the_name_it_is_given() -> None:
    workflow, orders = a_workflow()
    workflow.consumer(subscribes=[orders])(Consumer)
    workflow.consumer(subscribes=[orders], name="other")(Consumer)
    assert list(workflow.consumers) == ["Consumer", "other"]


def test_a_decorator_returns_the_decorated_object_unchanged() -> None:
    workflow, orders = a_workflow()

    def act(ctx: Any, order: Any) -> Any: ...

    def poll(ctx: Any, state: Any) -> Any: ...

    assert workflow.consumer(subscribes=[orders])(Consumer) is Consumer
    assert workflow.effect(orders)(act) is act
    assert workflow.producer(every=timedelta(minutes=1))(poll) is poll


def test_the_same_declaration_can_be_used_for_two_consumers() -> None:
    workflow, orders = a_workflow()
    declare = workflow.consumer(subscribes=[orders], batch=3)
    declare(Consumer)
    declare(type("Second", (Consumer,), {}))
    assert [consumer.batch for consumer in workflow.consumers.values()] == [3, 3]


def test_options_are_kept_and_texts_become_enum_members() -> None:
    workflow, orders = a_workflow()
    failures, wake = FailurePolicy(max_failures=2), WakePolicy(soonest=timedelta(seconds=1))
    workflow.consumer(
        subscribes=[orders],
        batch=5,
        ordered=True,
        requires_approval=True,
        after_failed_mutation="mutate",
        start_at="earliest",
        failures=failures,
        wake=wake,
    )(Consumer)
    kept = workflow.consumers["Consumer"]
    assert (kept.batch, kept.ordered, kept.requires_approval) == (5, True, True)
    assert (kept.after_failed_mutation, kept.start_at) == (AfterFailedMutation.MUTATE, StartAt.EARLIEST)
    assert (kept.failures, kept.wake) == (failures, wake)


def test_an_event_survives_being_kept_in_a_plan() -> None:
    _, orders = a_workflow()
    said: dict[str, Any] = {
        "message_id": "m1",
        "payload": Order(number=7),
        "raw_payload": {"number": 7},
        "key": "k",
        "title": "t",
    }
    event = Event(id=EventId(1), topic="orders", created_at=NOW, **said)
    kept = json.loads(json.dumps(serialize_event(event)))
    assert deserialize_event(orders, kept) == event
    del kept["created_at"]  # as earlier code kept it
    assert deserialize_event(orders, kept) == replace(event, created_at=None)


def test_a_topic_without_a_model_shows_payloads_as_they_are() -> None:
    workflow = Workflow("shop")
    assert parse_payload(workflow.topic("plain"), {"any": ["thing"]}) == {"any": ["thing"]}


def test_a_result_has_the_status_of_the_mutation() -> None:
    assert MutationResult(status=ResultStatus.APPLIED).applied
    assert MutationResult(status=ResultStatus.SKIPPED).skipped
    nothing = MutationResult(status=ResultStatus.NONE)
    assert not nothing.applied
    assert not nothing.skipped


def test_awaiting_a_request_gives_the_request() -> None:
    asked = RequestedMutation(connector="mail", operation="send")
    with pytest.raises(StopIteration) as stopped:
        next(asked.__await__())
    assert stopped.value.value is asked


def test_a_module_s_workflows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("a_module_with_workflows")
    module.one, module.two, module.three = Workflow("one"), Workflow("two"), "not a workflow"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert [workflow.name for workflow in workflows_of(module.__name__)] == ["one", "two"]


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(InvalidInputError, match="no_such_module"):
        Registry.load(["no_such_module"])


FAULTS = {
    "name": ("import shop_parts_{n}.mail", "x = 1\nundefined_name\n", "NameError", 2),
    "syntax": ("from shop_parts_{n} import mail", "x = 1\n\ny = (\n", "SyntaxError", 3),
    "module": ("import json\nimport shop_parts_{n}.mail", "import not_installed_here\n", "ModuleNotFoundError", 1),
    "library": ("import shop_parts_{n}.mail", "import json\njson.loads('{')\n", "JSONDecodeError", 2),
    "own": ("import shop_parts_{n}.mail", "from pipeline import mutation\n\nmutation(timeout=3)(print)\n", "", 3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_import_error_names_file_and_line_of_the_fault_in_an_imported_module(place: Path, fault: str) -> None:
    imports, text, kind, line = FAULTS[fault]
    package = place / f"shop_parts_{fault}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mail.py").write_text(text)
    (place / f"shop_{fault}.py").write_text(imports.format(n=fault))
    importlib.invalidate_caches()
    with pytest.raises(InvalidInputError) as refusal:
        Registry.load([f"shop_{fault}"])
    said = str(refusal.value)
    assert said.startswith(f"PIPELINE_WORKFLOWS names 'shop_{fault}', which cannot be imported: {kind}")
    assert said.endswith(f" The fault is at shop_parts_{fault}/mail.py:{line}; correct it, and start again.")


def test_two_workflows_of_one_name_are_refused_with_both_locations() -> None:
    registry = Registry()
    first, second = Workflow("shop"), Workflow("shop")
    for workflow in (first, second):
        workflow.consumer(subscribes=[workflow.topic("orders")])(Consumer)
    registry.add(first)
    registry.add(first)
    with pytest.raises(DeclarationError) as refused:
        registry.add(second)
    assert first.where in str(refused.value)
    assert second.where in str(refused.value)


def test_a_workflow_without_handlers_is_refused() -> None:
    with pytest.raises(DeclarationError, match="has no handler"):
        Registry().add(Workflow("empty"))


def test_a_connector_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="has no name"):
        Registry().add_connector(Connector())


@pytest.mark.parametrize("kind", ["consumer", "producer"])
def test_an_undeclared_handler_is_refused_with_the_known_handlers(kind: str) -> None:
    workflow, orders = a_workflow()
    workflow.consumer(subscribes=[orders])(Consumer)
    registry = Registry()
    registry.add(workflow)
    with pytest.raises(NotFoundError, match="nobody"):
        getattr(registry, kind)("shop", "nobody")
    with pytest.raises(NotFoundError, match="elsewhere"):
        getattr(registry, kind)("elsewhere", "Consumer")


def test_a_producer_on_an_interval_is_due_at_once_and_one_on_cron_at_its_first_slot() -> None:
    workflow, _ = a_workflow()

    @workflow.producer(every=timedelta(hours=1))
    def often(ctx: Any, state: Any) -> Any: ...

    @workflow.producer(cron="30 6 * * *")
    def daily(ctx: Any, state: Any) -> Any: ...

    first = {handler.name: handler.first_run_at for handler in spec_of(workflow, NOW).handlers}
    assert first == {"often": NOW, "daily": datetime(2030, 1, 2, 6, 30, tzinfo=UTC)}


def test_the_fingerprint_changes_with_the_code_and_with_the_version_and_with_nothing_else() -> None:
    def marked(version: int, act: Any) -> str:
        workflow, orders = a_workflow(version=version)
        workflow.effect(orders, name="act")(act)
        return fingerprint(workflow)

    def act(ctx: Any, order: Any) -> Any:
        return ctx.mail.send(n=1)

    def mended(ctx: Any, order: Any) -> Any:
        return ctx.mail.send(n=2)

    assert marked(1, act) == marked(1, act)
    assert len({marked(1, act), marked(2, act), marked(1, mended)}) == 3


def test_a_topic_that_no_handler_reads_or_feeds_is_refused_with_its_name() -> None:
    workflow = Workflow("shop")
    orders = workflow.topic("orders")
    workflow.topic("oders")
    workflow.effect(orders)(lambda ctx, event: None)
    with pytest.raises(DeclarationError, match="topic 'oders' of workflow 'shop' is neither subscribed to"):
        Registry().add(workflow)


def test_a_handler_can_be_annotated_with_the_public_types() -> None:
    import pipeline

    names = ["PrepareContext", "MutateContext", "NextContext", "ProducerContext", "Event", "Prepared", "MutationResult"]
    assert [
        name for name in names if name not in pipeline.__all__ or not isinstance(getattr(pipeline, name), type)
    ] == []
