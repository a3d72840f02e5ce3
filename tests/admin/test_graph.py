"""The graph of a workflow shows what its code declares and what its mutations called."""

import pytest

from pipeline import Workflow
from pipeline.admin.workflows import topic_graph
from pipeline.domain.errors import NotFoundError
from pipeline.domain.states import Phase
from pipeline.domain.values import HandlerSpec, TopicSpec, WorkflowSpec
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database
from pipeline.transitions import registration
from pipeline.workflows.registry import spec_of
from tests.factories import IN, OUT, a_run, committed, some_events
from tests.support.scripted_consumers import Shop


def a_spec(version: int, *handlers: HandlerSpec) -> WorkflowSpec:
    return WorkflowSpec(
        name="billing", version=version, topics=(TopicSpec(name=IN), TopicSpec(name=OUT)), handlers=handlers
    )


SEND = HandlerSpec(name="send", subscribes=(IN,), publishes=(OUT,))
POLL = HandlerSpec(name="poll", kind=HandlerKind.PRODUCER, publishes=(IN,))


def register(db: Database, spec: WorkflowSpec) -> None:
    with db.transaction() as tx:
        registration.register(tx, spec)


def edges(db: Database) -> set[tuple[str, str, str]]:
    return {(each.source, str(each.kind), each.target) for each in topic_graph(db, "billing").edges}


def test_the_graph_has_topics_handlers_and_called_operations(db: Database) -> None:
    register(db, a_spec(1, SEND, POLL))
    some_events(db, "a")
    a_run(db, Phase.MUTATING)
    found = topic_graph(db, "billing")
    assert [(str(node.kind), node.name) for node in found.nodes] == [
        ("topic", IN),
        ("topic", OUT),
        ("producer", "poll"),
        ("consumer", "send"),
        ("operation", "mail.send"),
    ]
    assert edges(db) == {
        (f"topic:{IN}", "subscribes", "handler:send"),
        ("handler:send", "publishes", f"topic:{OUT}"),
        ("handler:poll", "publishes", f"topic:{IN}"),
        ("handler:send", "calls", "operation:mail.send"),
    }
    assert {node.id for node in found.nodes} >= {end for edge in found.edges for end in (edge.source, edge.target)}


def test_what_newer_code_no_longer_has_is_not_in_the_graph(db: Database) -> None:
    register(db, a_spec(1, SEND, POLL))
    some_events(db, "a")
    committed(db, a_run(db, Phase.MUTATED))
    register(db, a_spec(2, HandlerSpec(name="note", subscribes=(IN,))))
    assert edges(db) == {(f"topic:{IN}", "subscribes", "handler:note")}


def test_the_topics_that_code_publishes_to_are_registered(db: Database) -> None:
    spec = _spec(Shop().workflow, db)
    declared = {handler.name: handler.publishes for handler in spec.handlers}
    assert any(declared.values())
    register(db, spec)
    found = {(edge.source, edge.target) for edge in topic_graph(db, spec.name).edges if edge.kind == "publishes"}
    assert found == {(f"handler:{name}", f"topic:{topic}") for name, topics in declared.items() for topic in topics}


def _spec(workflow: Workflow, db: Database) -> WorkflowSpec:
    with db.transaction() as tx:
        return spec_of(workflow, tx.clock())


def test_an_unknown_workflow_is_refused(db: Database) -> None:
    with pytest.raises(NotFoundError):
        topic_graph(db, "bills")
