"""What concerns other workflows is neither shown to a caller of some, nor changed by it; refused messages."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from starlette.testclient import TestClient

from pipeline.api import Person, Role, create
from pipeline.api.context import Services
from pipeline.cli.dead_letters import BrokerDeadLetters
from pipeline.config import Settings
from pipeline.embedded import servers
from pipeline.store.database import Database
from pipeline.tasks import dead_letter
from tests.api.conftest import ORIGIN, ClientOf
from tests.factories import a_workflow
from tests.support.table_reads import rows

SCOPED = Person(name="eve", role=Role.ADMIN, workflows=frozenset({"mail"}), is_ambient=False)
ADMIN = Person(name="ada", role=Role.ADMIN, is_ambient=False)
WHY = {"reason": "the outage is over"}


@pytest.fixture
def broker(embedded: servers.Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """A broker in which a message of each of two workflows was refused."""
    url = embedded.broker_url.rpartition("/")[0] + "/10"  # no other test uses this number
    with Celery(broker=url) as app, redis.Redis.from_url(url) as store:
        monkeypatch.setattr("pipeline.celery.app", app)
        with app.producer_or_acquire() as producer:
            for workflow in ("billing", "mail"):
                producer.publish(
                    [[workflow, [{"message_id": f"{workflow}-1"}]], {}, {}],
                    headers={"id": f"letter-{workflow}", "task": "pipeline.publish"},
                    routing_key=dead_letter.dead_letter_queue().name,
                    declare=[dead_letter.dead_letter_queue()],
                    serializer="json",
                )
        yield app
        store.flushdb()


def client_for(db: Database, url: str, person: Person) -> TestClient:
    """A client of an app that has a broker."""
    found = Services.connect(Settings(database_url=url), db, dead_letters=BrokerDeadLetters())
    return TestClient(create(services=found, identify=lambda _: person), base_url=ORIGIN, follow_redirects=False)


def letters(client: TestClient) -> set[str]:
    return {each["id"] for each in client.get("/v1/refused").json()["items"]}


def form(**fields: str) -> dict[str, Any]:
    return {"data": fields, "headers": {"Accept": "text/html"}}


def test_a_refused_message_of_another_workflow_is_out_of_reach(db: Database, database_url: str, broker: Celery) -> None:
    a_workflow(db, "mail")
    a_workflow(db, "billing")
    scoped, full = (client_for(db, database_url, person) for person in (SCOPED, ADMIN))
    assert letters(scoped) == {"letter-mail"}
    for act in ("send-back", "drop"):
        assert scoped.post(f"/v1/refused/letter-billing/{act}", json=WHY).status_code == 404
        assert scoped.post(f"/dead-letters/{act}", **form(id="letter-billing", reason="why")).status_code == 404
    assert letters(full) == {"letter-billing", "letter-mail"}
    assert scoped.post("/v1/refused/letter-mail/drop", json=WHY).status_code == 200
    assert letters(full) == {"letter-billing"}
    assert [row.act for row in rows(db, "SELECT act FROM pipeline.audit")] == ["dead_letter.drop"]


def test_a_refused_message_is_acted_on_with_the_role_a_reason_and_its_id(
    db: Database, database_url: str, broker: Celery
) -> None:
    a_workflow(db, "mail")
    viewer, operator, admin = (
        client_for(db, database_url, Person(name=role, role=role, is_ambient=False))
        for role in (Role.VIEWER, Role.OPERATOR, Role.ADMIN)
    )
    assert "mail-1" in viewer.get("/dead-letters", headers={"Accept": "text/html"}).text, "a viewer reads them"
    path = "/v1/refused/letter-mail"
    refused = [
        (viewer.post(f"{path}/send-back", json=WHY), 403),
        (operator.post(f"{path}/drop", json=WHY), 403),
        (operator.post("/dead-letters/drop", **form(id="letter-mail", reason="why")), 403),
        (admin.post(f"{path}/drop", json={}), 422),
        (admin.post("/v1/refused/letter-nobody/drop", json=WHY), 404),
        (admin.post("/v1/refused/letter-nobody/send-back", json=WHY), 404),
    ]
    assert [(answer.status_code, status) for answer, status in refused if answer.status_code != status] == []
    assert letters(viewer) == {"letter-billing", "letter-mail"}
    assert rows(db, "SELECT * FROM pipeline.audit") == []


def test_refused_messages_of_a_broker_that_is_away_are_a_problem(
    db: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Celery(broker="redis://127.0.0.1:1/0") as app:
        monkeypatch.setattr("pipeline.celery.app", app)
        client = client_for(db, database_url, ADMIN)
        for answer in (client.get("/v1/refused"), client.post("/v1/refused/letter-1/send-back", json={})):
            assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
            assert "broker" in answer.json()["detail"]


def test_what_every_workflow_has_in_common_is_left_to_callers_of_all(client_of: ClientOf, db: Database) -> None:
    a_workflow(db, "mail")
    scoped, full = client_of(SCOPED), client_of(ADMIN)
    assert full.post("/v1/breakers/mail.send/open", json=WHY).status_code == 200
    refused = [
        scoped.post("/v1/breakers/mail.send/close", json=WHY),
        scoped.post("/v1/breakers/mail.other/open", json=WHY),
        scoped.post("/connectors/breaker", **form(action="close", operation="mail.send", reason="why")),
        scoped.post("/system/doctor", **form()),
        scoped.get("/v1/doctor"),
    ]
    assert [answer.status_code for answer in refused] == [403] * 5
    assert len(full.get("/v1/breakers").json()["items"]) == 1
    assert scoped.get("/v1/system").json()["settings"] == []
    assert client_of(Person(name="vic", is_ambient=False)).get("/v1/system").json()["settings"] == []
    assert full.get("/v1/system").json()["settings"]
