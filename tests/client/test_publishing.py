"""How other services put events in: in their own transaction, or through a client. Always once, always checked."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from pipeline import InvalidInputError, NotFoundError, PayloadError, Workflow
from pipeline.client import BrokerClient, DatabaseClient, EventInput, Receipt, UnavailableError, publish
from pipeline.store.database import Database
from pipeline.testing import Inline
from tests.support.table_reads import one


class Order(BaseModel):
    """What the topic carries."""

    id: int
    email: str


@pytest.fixture
def shop(db: Database) -> Inline:
    """A workflow with a topic that has a model and one that has none."""
    workflow = Workflow("shop")
    workflow.effect(workflow.topic("orders", schema=Order))(lambda ctx, event: None)
    workflow.effect(workflow.topic("notes"), name="note")(lambda ctx, event: None)
    return Inline(db, [workflow])


ORDER: dict[str, Any] = {"topic": "orders", "message_id": "order:1", "payload": {"id": 1, "email": "ada@example.org"}}
Opened = Callable[[str], Any]


@contextmanager
def by_connection(url: str) -> Iterator[Any]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg2://"))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextmanager
def by_session(url: str) -> Iterator[Any]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg2://"))
    with Session(engine) as session:
        yield session
    engine.dispose()


@contextmanager
def by_psycopg2(url: str) -> Iterator[Any]:
    connection = psycopg2.connect(url.replace("postgresql+psycopg2://", "postgresql://"))
    yield connection
    connection.close()


WAYS = pytest.mark.parametrize("opened", [by_connection, by_session, by_psycopg2])


def count(db: Database) -> int:
    return int(one(db, "SELECT count(*) AS n FROM pipeline.events").n)


@WAYS
def test_an_event_is_there_if_and_only_if_the_callers_commit_is(
    shop: Inline, db: Database, database_url: str, opened: Opened
) -> None:
    del shop
    with opened(database_url) as connection:
        assert publish(connection, "shop", [ORDER]) == Receipt(new=("order:1",))
        connection.rollback()
        assert count(db) == 0
        publish(connection, "shop", [ORDER])
        assert count(db) == 0, "nobody else sees it before the commit"
        connection.commit()
    assert count(db) == 1
    assert one(db, "SELECT payload FROM pipeline.events").payload == ORDER["payload"]


@WAYS
def test_a_receipt_lists_new_repeated_and_replaced_events(
    shop: Inline, db: Database, database_url: str, opened: Opened
) -> None:
    del shop, db
    second = {**ORDER, "message_id": "order:2"}
    with opened(database_url) as connection:
        publish(connection, "shop", [ORDER])
        assert publish(connection, "shop", [ORDER, second]) == Receipt(new=("order:2",), repeated=("order:1",))
        assert publish(connection, "shop", [ORDER], replace=True) == Receipt(replaced=("order:1",))
        connection.commit()


@WAYS
def test_a_thousand_events_are_published_at_once(shop: Inline, db: Database, database_url: str, opened: Opened) -> None:
    many = [
        EventInput(topic="notes", message_id=f"n{n}", payload=n, key=f"k{n % 7}", title=f"note {n}")
        for n in range(1000)
    ]
    with opened(database_url) as connection:
        assert len(publish(connection, "shop", many).new) == 1000
        connection.commit()
    assert count(db) == 1000
    del shop


@WAYS
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({**ORDER, "payload": {"id": "one", "email": "a"}}, r"\$\.id does not fit; expected type \"integer\""),
        ({**ORDER, "payload": {"id": 1}}, r"\$\.email is missing; expected it, as topic 'orders' declares"),
        ({**ORDER, "topic": "orderz"}, "There is no topic of workflow 'shop' named 'orderz'"),
        (
            {"topic": "orders"},
            "Event 2: message_id: Field required; an event has: topic, message_id, key, title, payload",
        ),
        ({**ORDER, "colour": "red"}, "Event 2: colour: Unexpected keyword argument; an event has: topic"),
        ("nonsense", "Event 2: it is a str"),
        ({"topic": "notes", "message_id": "", "payload": 1}, "message id"),
        ({"topic": "notes", "message_id": "n", "payload": {"x": {1, 2}}}, r"\$\.x is a set"),
    ],
)
def test_one_event_that_cannot_be_published_keeps_all_of_them_out(
    shop: Inline, db: Database, database_url: str, opened: Opened, wrong: Any, words: str
) -> None:
    del shop
    with opened(database_url) as connection:
        with pytest.raises((InvalidInputError, PayloadError, NotFoundError), match=words):
            publish(connection, "shop", [{**ORDER, "message_id": "good"}, wrong])
        connection.commit()
    assert count(db) == 0


def test_a_refusal_does_not_repeat_the_payload(shop: Inline, database_url: str) -> None:
    del shop
    secret = {**ORDER, "payload": {"id": "4111 1111 1111 1111", "email": "a"}}
    with by_connection(database_url) as connection, pytest.raises(PayloadError) as caught:
        publish(connection, "shop", [secret])
    assert "4111" not in str(caught.value)


@pytest.mark.parametrize("given", [ORDER, EventInput(**ORDER), "orders", b"orders", None, 7])
def test_something_that_is_no_list_of_events_is_refused(db: Database, given: Any) -> None:
    with db.transaction() as tx, pytest.raises(InvalidInputError, match="where a list of events is expected"):
        publish(tx, "shop", given)


def test_an_argument_that_is_no_connection_is_refused_with_the_expected_types() -> None:
    with pytest.raises(InvalidInputError, match=r"through a builtins\.str; expected a Connection or Session"):
        publish("postgresql://somewhere", "shop", [ORDER])


def test_a_model_is_published_as_its_json(shop: Inline, db: Database, database_url: str) -> None:
    del shop
    with by_connection(database_url) as connection:
        publish(connection, "shop", [EventInput(topic="orders", message_id="o", payload=Order(id=1, email="a"))])
        connection.commit()
    assert one(db, "SELECT payload FROM pipeline.events").payload == {"id": 1, "email": "a"}


class Celery:
    """A service's own app, as far as a client needs it; it stands in for a broker that is away, too."""

    def __init__(self, *, is_away: bool = False) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.is_away = is_away

    def send_task(self, name: str, *_: Any, **kwargs: Any) -> None:
        if self.is_away:
            raise ConnectionError("no broker")
        self.sent.append((name, kwargs))


def test_the_database_client_commits_returns_what_was_new_and_then_notifies(
    shop: Inline, db: Database, database_url: str
) -> None:
    del shop
    app = Celery()
    client = DatabaseClient(database_url, app)
    assert client.publish("shop", [ORDER]).new == ("order:1",)
    assert client.publish("shop", [ORDER]).repeated == ("order:1",)
    client.close()
    assert count(db) == 1
    how = {"queue": "pipeline.publish", "serializer": "json", "ignore_result": True, "retry": False}
    assert app.sent == [("pipeline.schedule", {"args": ["shop"], **how})]


def test_a_broker_that_is_away_costs_the_database_client_a_tick_and_nothing_else(
    shop: Inline, db: Database, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    del shop
    client = DatabaseClient(database_url, Celery(is_away=True))
    assert client.publish("shop", [ORDER]).new == ("order:1",)
    client.close()
    assert count(db) == 1
    assert "the next tick finds the work of 'shop'" in caplog.text


def test_an_unreachable_database_is_an_error_with_advice() -> None:
    client = DatabaseClient("postgresql://127.0.0.1:1/none")
    with pytest.raises(UnavailableError, match="publish them again with the same message ids"):
        client.publish("shop", [ORDER])
    client.close()


def test_the_broker_client_checks_the_form_and_sends(shop: Inline) -> None:
    del shop
    app = Celery()
    client = BrokerClient(app)
    client.publish("shop", [ORDER])
    with pytest.raises(InvalidInputError, match="Event 1"):
        client.publish("shop", [{"topic": "orders"}])
    client.close()
    ((name, given),) = app.sent
    assert (name, given["queue"], given["kwargs"]["events"][0]["message_id"]) == (
        "pipeline.publish",
        "pipeline.publish",
        "order:1",
    )
    with pytest.raises(UnavailableError, match="The broker did not take the events"):
        BrokerClient(Celery(is_away=True)).publish("shop", [ORDER])


def test_two_services_that_publish_the_same_fact_make_one_event(shop: Inline, db: Database, database_url: str) -> None:
    del shop
    with by_connection(database_url) as first, by_psycopg2(database_url) as second:
        publish(first, "shop", [ORDER])
        with second.cursor() as cursor:
            cursor.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            publish(second, "shop", [ORDER])
        second.rollback()
        first.commit()
        assert publish(second, "shop", [ORDER]).repeated == ("order:1",)
        second.commit()
    assert count(db) == 1


class Receipts(BaseModel):
    """What the topic of the guide carries."""

    order: str
    email: str


def test_the_code_of_the_guide_runs_as_it_is_printed(db: Database, database_url: str, project: Path) -> None:
    workflow = Workflow("receipts")
    workflow.effect(workflow.topic("orders.paid", schema=Receipts))(lambda ctx, event: None)
    run = Inline(db, [workflow])
    with db.transaction() as tx:
        tx.execute(text("CREATE TABLE orders (id integer, paid boolean)"))
    app = Celery()
    page = (project / "docs/guides/publish-events.md").read_text(encoding="utf-8")
    url = database_url.replace("postgresql+psycopg2://", "postgresql://")  # as the settings print it
    names: dict[str, Any] = {"DATABASE_URL": url, "app": app, "order": {"order": "4712", "email": "b@example.org"}}
    try:
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(block, names)
    finally:
        with db.transaction() as tx:
            tx.execute(text("DROP TABLE orders"))
    assert names["receipt"].new == ("order:4711",)
    assert [event.message_id for event in run.events(workflow.topics["orders.paid"])] == ["order:4711"]
    assert [name for name, _ in app.sent] == ["pipeline.schedule", "pipeline.publish"]
    names["engine"].dispose()
