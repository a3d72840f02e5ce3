"""Ways in, used oddly: by other kinds of rows, without a transaction, with what cannot be stored, and too slowly."""

import multiprocessing
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import psycopg2  # type: ignore[import-untyped]
import pytest
from celery import Celery
from psycopg2 import extras
from pydantic import BaseModel, Field
from sqlalchemy import create_engine

from pipeline import DeclarationError, Workflow
from pipeline.client.publishing import (
    BrokerClient,
    DatabaseClient,
    Receipt,
    WakeUpSender,
    publish,
)
from pipeline.domain.errors import InvalidInputError, NotFoundError, PayloadError, RefusedError, UnavailableError
from pipeline.domain.values import Limits
from pipeline.embedded import servers
from pipeline.store import database as store
from pipeline.store.database import Database, Statement
from pipeline.testing import Inline
from pipeline.testing.inline import TESTER
from pipeline.transitions import workflows
from tests.support.table_reads import one
from tests.support.wait import wait_for

SHORT = timedelta(milliseconds=300)


class Order(BaseModel):
    """What the topic carries."""

    id: int
    lines: list[str] = []


def order(number: int = 1, **payload: Any) -> dict[str, Any]:
    return {"topic": "orders", "message_id": f"order:{number}", "payload": {"id": number, **payload}}


def note(message_id: str, payload: Any = None) -> dict[str, Any]:
    return {"topic": "notes", "message_id": message_id, "payload": payload}


@pytest.fixture(autouse=True)
def shop(db: Database) -> Inline:
    """A workflow with a topic that has a model and one that has none."""
    workflow = Workflow("shop")
    workflow.effect(workflow.topic("orders", schema=Order))(lambda ctx, event: None)
    workflow.effect(workflow.topic("notes"), name="note")(lambda ctx, event: None)
    return Inline(db, [workflow])


@pytest.fixture
def plain_url(database_url: str) -> str:
    return database_url.replace("postgresql+psycopg2://", "postgresql://")


def count(db: Database) -> int:
    return int(one(db, "SELECT count(*) AS n FROM pipeline.events").n)


@pytest.mark.parametrize("kind", [extras.RealDictCursor, extras.DictCursor, extras.NamedTupleCursor])
def test_publishing_works_with_every_row_type_of_the_callers_connection(
    db: Database, plain_url: str, kind: Any
) -> None:
    with closing(psycopg2.connect(plain_url, cursor_factory=kind)) as connection:
        assert publish(connection, "shop", [order()]) == Receipt(new=("order:1",))
        assert publish(connection, "shop", [order()], replace=True) == Receipt(replaced=("order:1",))
        with pytest.raises(PayloadError, match=r"\$\.id does not fit"):
            publish(connection, "shop", [order(id="one")])
        with pytest.raises(NotFoundError, match="orderz"):
            publish(connection, "shop", [{**order(), "topic": "orderz"}])
        connection.commit()
    assert count(db) == 1


def test_payloads_are_checked_on_a_connection_with_its_own_json_reader(plain_url: str) -> None:
    with closing(psycopg2.connect(plain_url)) as connection:
        extras.register_default_jsonb(connection, loads=str)
        with pytest.raises(PayloadError, match=r"\$\.id does not fit"):
            publish(connection, "shop", [order(id="one")])


def in_autocommit(url: str) -> Iterator[Any]:
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        yield connection
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg2://"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def test_a_connection_without_a_transaction_is_refused(db: Database, plain_url: str) -> None:
    for connection in in_autocommit(plain_url):
        with pytest.raises(InvalidInputError, match="autocommit"):
            publish(connection, "shop", [order()])
    assert count(db) == 0


def test_a_receipt_names_each_fact_once_and_a_repeat_under_another_topic_too(db: Database) -> None:
    with db.transaction() as tx:
        publish(tx, "shop", [note("x")])
        both = [note("x"), {**order(), "message_id": "x"}, note("x")]
        assert publish(tx, "shop", both) == Receipt(new=("x",), repeated=("x",))


@pytest.mark.parametrize(("replace", "stays"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "there before"])
def test_of_one_fact_twice_in_a_call_the_first_counts_and_with_replace_the_last(
    db: Database, replace: bool, stays: int, is_there: bool
) -> None:
    with db.transaction() as tx:
        if is_there:
            publish(tx, "shop", [note("x", 0)])
        publish(tx, "shop", [note("x", 1), note("y"), note("x", 2)], replace=replace)
    kept = one(db, "SELECT payload FROM pipeline.events WHERE message_id = 'x'").payload
    assert kept == (0 if is_there and not replace else stays)


def test_more_events_than_one_statement_holds_are_published_in_order(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MAX_PART_LENGTH", 1000)
    many = [note(f"n{n}", "x" * 100) for n in range(50)]
    with db.transaction() as tx:
        assert len(publish(tx, "shop", many).new) == 50
        assert len(publish(tx, "shop", many, replace=True).replaced) == 50
        ids = [row.message_id for row in tx.all(Statement[Any]("SELECT message_id FROM pipeline.events ORDER BY id"))]
    assert ids == [event["message_id"] for event in many]


def test_the_largest_payload_is_the_callers_choice(db: Database, database_url: str) -> None:
    large = [note("large", "x" * 2000)]
    client = DatabaseClient(database_url, limits=Limits(payload=1000))
    with pytest.raises(PayloadError, match="at most 1000 bytes"):
        client.publish("shop", large)
    client.close()
    with db.transaction() as tx:
        assert publish(tx, "shop", [note("huge", "x" * 400_000)], limits=Limits(payload=500_000)).new == ("huge",)


@pytest.mark.parametrize("workflow", [5, None, "shop\0", "\ud800", ""])
def test_a_workflow_that_is_no_name_is_refused(db: Database, workflow: Any) -> None:
    with db.transaction() as tx, pytest.raises(PayloadError, match="workflow name"):
        publish(tx, workflow, [note("x")])


def test_a_tuple_is_an_array_for_a_schema_too(db: Database) -> None:
    with db.transaction() as tx:
        assert publish(tx, "shop", [order(lines=("a", "b"))]).new == ("order:1",)


class Named(BaseModel):
    """A pattern that pydantic's engine knows and Python's does not."""

    name: str = Field(pattern=r"^\p{Lu}+$")


def test_a_schema_that_cannot_be_checked_is_refused_where_it_is_declared() -> None:
    with pytest.raises(DeclarationError, match=r"'orders' has a pattern that Python's `re` does not know") as refusal:
        Workflow("shop").topic("orders", schema=Named)
    assert __file__ in str(refusal.value)


class Sent:
    """A service's own app that remembers what it was asked to send."""

    def __init__(self) -> None:
        self.tasks: list[str] = []

    def send_task(self, name: str, *_: Any, **__: Any) -> None:
        self.tasks.append(name)


@pytest.mark.parametrize(
    "payload", [float("nan"), b"\xff", object(), {1, 2}, "\ud800", {"a\0": 1}], ids=lambda value: type(value).__name__
)
def test_the_broker_client_refuses_the_same_input_as_the_database_client(database_url: str, payload: Any) -> None:
    app = Sent()
    clients = BrokerClient(app), DatabaseClient(database_url)
    for client in clients:
        with pytest.raises(PayloadError):
            client.publish("shop", [note("x", payload)])
        client.close()
    assert app.tasks == []


def test_the_database_client_notifies_of_replaced_events_too(database_url: str) -> None:
    app = Sent()
    client = DatabaseClient(database_url, app)
    client.publish("shop", [note("x", 1)])
    client.publish("shop", [note("x", 2)], replace=True)
    client.close()
    assert app.tasks == ["pipeline.schedule"] * 2


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://u:hunter2@h/db", "postgresql://u:hunter2@[h/db", None])
def test_a_client_of_no_postgres_is_refused_where_it_is_made(url: Any) -> None:
    with pytest.raises(
        InvalidInputError, match="The URL of the database cannot be used: expected postgresql://"
    ) as caught:
        DatabaseClient(url)
    assert "hunter2" not in str(caught.value)


def test_a_connection_to_another_kind_of_database_is_refused_in_a_sentence() -> None:
    refused = pytest.raises(InvalidInputError, match="a database of kind sqlite; expected the Postgres")
    with create_engine("sqlite://").begin() as connection, refused:
        publish(connection, "shop", [note("x")])


def test_a_database_that_refuses_is_not_one_that_is_away(embedded: servers.Servers) -> None:
    client = DatabaseClient(embedded.database_url)  # it has none of our tables
    with pytest.raises(RefusedError, match="The database refused the events"):
        client.publish("shop", [note("x")])
    client.close()


def test_a_read_only_database_is_an_error_that_may_be_retried(db: Database, database_url: str) -> None:
    client = DatabaseClient(database_url + "?options=-c%20default_transaction_read_only%3Don")
    with pytest.raises(UnavailableError, match="read-only"):
        client.publish("shop", [note("x")])
    client.close()
    assert count(db) == 0


def test_a_client_waits_no_longer_than_its_timeout(db: Database, database_url: str) -> None:
    client = DatabaseClient(database_url, timeout=SHORT)
    with db.transaction() as tx:
        publish(tx, "shop", [note("x")])
        with pytest.raises(UnavailableError, match="did not answer in time"):
            client.publish("shop", [note("x")])

    def again() -> bool:
        """A machine that stands still may take the client's time once more, and not every time."""
        with suppress(UnavailableError):
            receipt = client.publish("shop", [note("y")])
            return (*receipt.new, *receipt.repeated) == ("y",)
        return False

    wait_for(again, why="the client can still be used")
    wait_for(lambda: count(db) == 2)
    client.close()


def test_a_client_that_was_used_before_a_fork_works_in_the_child_over_a_connection_of_its_own(
    db: Database, database_url: str
) -> None:
    client = DatabaseClient(database_url)

    def session() -> int:
        with client._db.transaction() as tx:
            return int(tx.all(Statement[Any]("SELECT pg_backend_pid()"))[0][0])

    def child() -> None:
        assert client.publish("shop", [note("child")]).new == ("child",)
        assert session() != parents
        client.close()

    assert client.publish("shop", [note("parent")]).new == ("parent",)
    parents = session()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert session() == parents
    client.close()
    assert count(db) == 2


def test_a_broker_that_does_not_answer_costs_no_more_than_the_timeout(db: Database, database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app = Celery("theirs", broker=f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        with pytest.raises(UnavailableError, match="The broker did not take the events"):
            BrokerClient(app, timeout=SHORT).publish("shop", [note("x")])
        client = DatabaseClient(database_url, app)
        client._wake_ups = WakeUpSender(app, timeout=SHORT)  # the database may take its time
        assert client.publish("shop", [note("x")]).new == ("x",)
        client.close()
    assert count(db) == 1


def test_a_replacement_waits_for_a_transaction_that_may_start_a_run(db: Database) -> None:
    with db.transaction() as tx:
        publish(tx, "shop", [note("x", 1)])
    rewritten = threading.Event()

    def rewrite() -> None:
        with db.transaction() as tx:
            publish(tx, "shop", [note("x", 2)], replace=True)
        rewritten.set()

    thread = threading.Thread(target=rewrite)
    with db.transaction() as tx:
        workflows.pause(tx, "shop", TESTER)  # as a start does, it holds the workflow
        thread.start()
        assert not rewritten.wait(0.3)
    assert rewritten.wait(60)
    thread.join()
