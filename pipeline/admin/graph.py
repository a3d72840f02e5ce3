"""Show the topics, handlers and operations of a workflow as a graph."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pipeline.admin import lookup
from pipeline.store.database import Database
from pipeline.store.reads import listings, work

#: Rows of the ledger that are searched for calls.
_RECENT_MUTATIONS = 10_000


class NodeKind(StrEnum):
    """What a node of the graph is."""

    TOPIC = "topic"
    CONSUMER = "consumer"
    PRODUCER = "producer"
    OPERATION = "operation"


class EdgeKind(StrEnum):
    """What leads from one node to another."""

    SUBSCRIBES = "subscribes"  #: from a topic to a consumer
    PUBLISHES = "publishes"  #: from a handler to a topic
    CALLS = "calls"  #: from a handler to an operation, as the ledger shows


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A topic, a handler or an operation."""

    id: str  #: unique in the graph
    kind: NodeKind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """A way that events or calls take."""

    source: str  #: id of a node
    target: str
    kind: EdgeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicGraph:
    """The nodes of a workflow and the edges between them. What is no longer in the code is missing."""

    workflow: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]


def topic_graph(db: Database, workflow: str) -> TopicGraph:
    """Return the graph of a workflow: what its code declares, and which operations its newest mutations called."""
    with db.transaction() as tx:
        lookup.require_workflow(tx, workflow)
        topics = [row.name for row in work.topics(tx, workflow) if not row.retired]
        handlers = [row for row in listings.handlers(tx, workflow, limit=1) if not row.retired]
        calls = listings.called_operations(tx, workflow, recent=_RECENT_MUTATIONS)
    names = {row.name for row in handlers}
    calls = [row for row in calls if row.handler in names]

    def edges() -> Iterator[GraphEdge]:
        for row in handlers:
            for topic in row.subscribes:
                yield GraphEdge(source=_topic(topic), target=_handler(row.name), kind=EdgeKind.SUBSCRIBES)
            for topic in row.publishes:
                yield GraphEdge(source=_handler(row.name), target=_topic(topic), kind=EdgeKind.PUBLISHES)
        for call in calls:
            operation = _operation(f"{call.connector}.{call.operation}")
            yield GraphEdge(source=_handler(call.handler), target=operation, kind=EdgeKind.CALLS)

    operations = sorted({f"{call.connector}.{call.operation}" for call in calls})
    return TopicGraph(
        workflow=workflow,
        nodes=(
            *(GraphNode(id=_topic(name), kind=NodeKind.TOPIC, name=name) for name in topics),
            *(GraphNode(id=_handler(row.name), kind=NodeKind(row.kind), name=row.name) for row in handlers),
            *(GraphNode(id=_operation(name), kind=NodeKind.OPERATION, name=name) for name in operations),
        ),
        edges=tuple(edges()),
    )


def _topic(name: str) -> str:
    return f"topic:{name}"


def _handler(name: str) -> str:
    return f"handler:{name}"


def _operation(name: str) -> str:
    return f"operation:{name}"
