"""What a publish costs: one statement once the topics were read, and as much per event in a large batch as in a small.

The topics are read once per process. Whatever a deploy does to them afterwards must still be noticed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from pipeline.client import DatabaseClient
from pipeline.client import publish as publish_in_own_transaction
from pipeline.domain.errors import InvalidInputError, PayloadError, StaleWriteError
from pipeline.domain.values import DEFAULT_LIMITS, HandlerSpec, NewEvent, TopicSpec, WorkflowSpec
from pipeline.store import functions
from pipeline.store.database import Database, Statement, Transaction, encode_rows
from pipeline.store.writes import events as event_store
from pipeline.transitions import events, registration
from tests.factories import IN, OUT, a_workflow
from tests.support.table_reads import one, rows

NUMBERS = {"properties": {"n": {"type": "integer"}}}
TEXTS = {"properties": {"n": {"type": "string"}}}
NUMBER, TEXT = {"n": 1}, {"n": "one"}


def an_event(message_id: str = "m-1", payload: Any = None, topic: str = IN) -> NewEvent:
    return NewEvent(topic=topic, message_id=message_id, payload=payload)


def publish(db: Database, *new: NewEvent, workflow: str = "billing") -> list[tuple[str, str]]:
    with db.transaction() as tx:
        return list(events.publish(tx, workflow, new).new)


def deploy(db: Database, *topics: TopicSpec, workflow: str = "billing", renamed_from: str = "") -> None:
    """Register a version of the workflow whose one consumer reads the first topic."""
    spec = WorkflowSpec(
        name=workflow,
        renamed_from=renamed_from,
        fingerprint=repr(topics),
        topics=topics,
        handlers=(HandlerSpec(name="send", subscribes=(topics[0].name,)),),
    )
    with db.transaction() as tx:
        registration.register(tx, spec)


def published(db: Database) -> list[tuple[str, str, str]]:
    return [
        (row.workflow, row.topic, row.message_id)
        for row in rows(
            db,
            "SELECT e.* FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id ORDER BY e.id",
        )
    ]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[Statement[Any]]:
    """Collect the statements that this process sends."""
    sent: list[Statement[Any]] = []
    plain = Transaction.all

    def recorded(self: Transaction, statement: Statement[Any], /, **params: Any) -> Any:
        sent.append(statement)
        return plain(self, statement, **params)

    monkeypatch.setattr(Transaction, "all", recorded)
    return sent


def by_database_client(db: Database, message_id: str) -> None:
    client = DatabaseClient(db.engine.url.render_as_string(hide_password=False))
    client.publish("billing", [{"topic": IN, "message_id": message_id}])
    client.close()


def by_connection_of_the_caller(db: Database, message_id: str) -> None:
    with db.engine.begin() as connection:
        publish_in_own_transaction(connection, "billing", [{"topic": IN, "message_id": message_id}])


@pytest.mark.parametrize("way", [by_database_client, by_connection_of_the_caller])
def test_a_publish_is_one_statement_once_the_topics_were_read(
    db: Database, statements: list[Statement[Any]], way: Callable[[Database, str], None]
) -> None:
    a_workflow(db)
    way(db, "m-1")
    for message_id in ("m-2", "m-1"):  # a new event, and a repeat
        statements.clear()
        way(db, message_id)
        assert statements == [event_store.PUBLISH]
    assert one(db, "SELECT count(*) AS number FROM pipeline.events").number == 2


def test_a_payload_that_fits_only_a_former_schema_is_refused(db: Database) -> None:
    deploy(db, TopicSpec(name=IN, schema=NUMBERS))
    publish(db, an_event("m-1", NUMBER))
    deploy(db, TopicSpec(name=IN, schema=TEXTS))
    with pytest.raises(PayloadError, match="string"):
        publish(db, an_event("m-2", NUMBER))
    assert [name for _, _, name in published(db)] == ["m-1"]


@pytest.mark.parametrize("schema", [None, TEXTS])
def test_a_payload_that_fits_only_the_present_schema_is_published(db: Database, schema: Any) -> None:
    deploy(db, TopicSpec(name=IN, schema=NUMBERS))
    publish(db, an_event("m-1", NUMBER))
    deploy(db, TopicSpec(name=IN, schema=schema))
    assert publish(db, an_event("m-2", TEXT)) == [(IN, "m-2")]


def test_a_topic_that_is_gone_since_it_was_read_refuses_the_whole_batch(db: Database) -> None:
    deploy(db, TopicSpec(name=OUT), TopicSpec(name=IN))
    publish(db, an_event("m-1", topic=OUT), an_event("m-1"))
    deploy(db, TopicSpec(name=OUT))
    with pytest.raises(InvalidInputError, match="gone from the code"):
        publish(db, an_event("m-2", topic=OUT), an_event("m-2"))
    assert [name for _, _, name in published(db)] == ["m-1"]


def test_a_topic_that_came_back_since_it_was_read_takes_events(db: Database) -> None:
    deploy(db, TopicSpec(name=OUT), TopicSpec(name=IN))
    publish(db, an_event("m-1", topic=OUT))
    deploy(db, TopicSpec(name=OUT))
    with pytest.raises(InvalidInputError, match="gone from the code"):
        publish(db, an_event("m-2"))
    deploy(db, TopicSpec(name=OUT), TopicSpec(name=IN))
    assert publish(db, an_event("m-2")) == [(IN, "m-2")]


def test_a_topic_that_is_new_since_the_others_were_read_takes_events(db: Database) -> None:
    deploy(db, TopicSpec(name=OUT))
    publish(db, an_event("m-1", topic=OUT))
    deploy(db, TopicSpec(name=OUT), TopicSpec(name=IN))
    assert publish(db, an_event("m-2")) == [(IN, "m-2")]


def test_a_rename_since_the_topics_were_read_takes_events_under_both_names(db: Database) -> None:
    deploy(db, TopicSpec(name=IN))
    publish(db, an_event("m-1"))
    deploy(db, TopicSpec(name="orders", renamed_from=IN), workflow="invoices", renamed_from="billing")
    both = [an_event("m-2"), an_event("m-2", topic="orders"), an_event("m-3", topic="orders")]
    assert publish(db, *both) == [(IN, "m-2"), ("orders", "m-2"), ("orders", "m-3")]
    assert published(db) == [("invoices", "orders", f"m-{n}") for n in (1, 2, 3)]


def test_a_rename_that_is_taken_back_since_the_topics_were_read_takes_events(db: Database) -> None:
    deploy(db, TopicSpec(name=IN))
    deploy(db, TopicSpec(name="orders", renamed_from=IN), workflow="invoices", renamed_from="billing")
    publish(db, an_event("m-1"))
    deploy(db, TopicSpec(name=IN, renamed_from="orders"), workflow="billing", renamed_from="invoices")
    assert publish(db, an_event("m-2")) == [(IN, "m-2")]
    assert published(db) == [("billing", IN, "m-1"), ("billing", IN, "m-2")]


def test_a_consumer_that_joined_since_the_topics_were_read_gets_the_event(db: Database) -> None:
    a_workflow(db)
    publish(db, an_event("m-1"))
    a_workflow(db, consumers=("send", "audit"))
    publish(db, an_event("m-2"))
    assert [name for _, _, name in published(db)] == ["m-1", "m-2", "m-2"]


def test_another_database_with_other_topics_of_the_same_name_is_told_apart(db: Database) -> None:
    deploy(db, TopicSpec(name=IN, schema=NUMBERS))
    publish(db, an_event("m-1", NUMBER))
    events._REMEMBERED["billing"] = {  # as if this process had last published to another database
        IN: one(
            db,
            "SELECT 'billing' AS workflow, :topic AS name, NULL AS schema, '' AS schema_digest, false AS retired, "
            "false AS is_encrypted",
            topic=IN,
        )
    }
    with pytest.raises(PayloadError, match="integer"):
        publish(db, an_event("m-2", TEXT))


def test_a_stricter_transaction_is_refused_although_the_topics_are_known(db: Database) -> None:
    a_workflow(db)
    publish(db, an_event("m-1"))
    with db.transaction() as tx:
        tx.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        with pytest.raises(InvalidInputError, match="REPEATABLE READ"):
            events.publish(tx, "billing", [an_event("m-2")])
    assert [name for _, _, name in published(db)] == ["m-1"]


def test_names_that_contradict_each_other_end_in_an_error(db: Database) -> None:
    a_workflow(db)
    contradiction = "INSERT INTO pipeline.renames (kind, workflow, former, name) VALUES ('topic', 'billing', :a, :b)"
    with db.engine.connect() as connection:
        connection.execute(
            text(contradiction), {"a": IN, "b": OUT}
        )  # a former name that is in use: no deploy leaves it
        with pytest.raises(StaleWriteError, match="topics as they were just read"):
            publish_in_own_transaction(connection, "billing", [{"topic": IN, "message_id": "m-1"}])
        connection.rollback()
    assert published(db) == []


#: Statistics of a table that had many deliveries of one event. They are rolled back.
MANY_ROWS = (
    "ALTER TABLE pipeline.deliveries ALTER event_id SET (n_distinct = 1)",
    "ANALYZE pipeline.deliveries",
    "UPDATE pg_class SET reltuples = 1e6, relpages = 10 WHERE oid = 'pipeline.deliveries'::regclass",
)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def handled_rows(plan: dict[str, Any]) -> float:
    """How many rows all steps of a plan produced, compared or dropped."""
    counted = ("Actual Rows", "Rows Removed by Join Filter", "Rows Removed by Filter")
    return sum(float(node.get(name, 0) * node["Actual Loops"]) for node in nodes(plan) for name in counted)


@pytest.mark.parametrize("statement", [functions.INSERT_NEW, functions.REPLACE_UNSEEN], ids=["publish", "replace"])
@pytest.mark.parametrize("expects", ["what there is", "few rows", "many rows"])
def test_an_event_costs_as_much_among_20_000_as_among_1_000(db: Database, statement: str, expects: str) -> None:
    """Counted in rows that the steps of the plan handle: time is too uneven on a busy machine.

    A planner that expects few rows joins by nested loops. One that expects many does not keep them in a hash.
    """
    a_workflow(db)
    given = {"workflow": "billing", "topics": encode_rows([{"name": IN, "schema_digest": ""}]), "fresh": []}
    cost: dict[int, float] = {}
    for number in (1_000, 20_000):
        batch = [an_event(f"m-{number}-{n}", NUMBER) for n in range(number)]
        params = given | {"rows": encode_rows(events.event_rows(batch, DEFAULT_LIMITS))}
        if statement is functions.REPLACE_UNSEEN:
            publish(db, *batch)
        with db.engine.connect() as connection:
            for way in ("seqscan", "hashjoin", "mergejoin") if expects == "few rows" else ("seqscan",):
                connection.execute(text(f"SET LOCAL enable_{way} = off"))
            if expects == "many rows":
                for sql in MANY_ROWS:
                    connection.execute(text(sql))
            plan = connection.scalar(text(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"), params)
        cost[number] = handled_rows(plan[0]["Plan"]) / number
    assert cost[20_000] <= 1.5 * cost[1_000]
