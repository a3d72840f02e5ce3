"""Publishing over HTTP, and POST requests that are executed once."""

from threading import Thread
from typing import Any

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from pipeline.admin import access
from pipeline.api import Person, Role
from pipeline.store.database import Database
from tests.api.conftest import ClientOf
from tests.factories import IN, a_workflow
from tests.support.table_reads import one

EVENTS = f"/v1/workflows/billing/topics/{IN}/events"
_AS_RUNNING = text("UPDATE pipeline.api_requests SET status = NULL, answer = NULL")
PUBLISHER = Person(name="shop", role=Role.PUBLISHER, is_ambient=False)


def event(message_id: str = "m1", **more: Any) -> dict[str, Any]:
    return {"message_id": message_id, "payload": {"n": 1}, **more}


def outcomes(answer: Any) -> dict[str, str]:
    assert answer.status_code == 201, answer.text
    return {each["message_id"]: each["outcome"] for each in answer.json()["events"]}


def published(db: Database) -> int:
    return int(one(db, "SELECT count(*) AS n FROM pipeline.events").n)


@pytest.fixture(autouse=True)
def _workflow(db: Database) -> None:
    a_workflow(db)


def test_an_event_is_published_once_by_its_message_id(client_of: ClientOf, db: Database) -> None:
    client = client_of(PUBLISHER)
    assert outcomes(client.post(EVENTS, json=event())) == {"m1": "new"}
    assert outcomes(client.post(EVENTS, json=event())) == {"m1": "repeated"}
    assert published(db) == 1


def test_a_batch_is_all_or_none_and_says_what_became_of_each(client_of: ClientOf, db: Database) -> None:
    client = client_of(PUBLISHER)
    client.post(EVENTS, json=event("m1"))
    given = {"events": [event("m1", title="corrected"), event("m2")], "replace": True}
    assert outcomes(client.post(f"{EVENTS}:batch", json=given)) == {"m1": "replaced", "m2": "new"}
    bad = {"events": [event("m3"), event("m4", payload={"text": "\x00"})]}
    assert client.post(f"{EVENTS}:batch", json=bad).status_code == 422
    assert published(db) == 2
    many = {"events": [event(f"x{n}") for n in range(1_001)]}
    assert client.post(f"{EVENTS}:batch", json=many).status_code == 422
    most = {"events": [event(f"x{n}") for n in range(1_000)]}
    assert len(outcomes(client.post(f"{EVENTS}:batch", json=most))) == 1_000


def test_a_publisher_reads_nothing_and_a_viewer_publishes_nothing(client_of: ClientOf, db: Database) -> None:
    publisher = client_of(PUBLISHER)
    assert [publisher.get(path).status_code for path in ("/v1/workflows", "/v1/events", "/v1/audit")] == [403] * 3
    viewer = client_of(Person(name="vic", is_ambient=False))
    assert viewer.post(EVENTS, json=event()).status_code == 403
    scoped = client_of(Person(name="mail", role=Role.PUBLISHER, workflows=frozenset({"mail"}), is_ambient=False))
    assert scoped.post(EVENTS, json=event()).status_code == 404
    assert published(db) == 0


def test_an_unknown_topic_is_not_found(client: TestClient) -> None:
    answer = client.post("/v1/workflows/billing/topics/nothing/events", json=event())
    assert answer.status_code == 404
    assert "nothing" in answer.json()["detail"]


def test_a_repeated_request_gets_the_same_answer_marked_as_a_replay(client: TestClient, db: Database) -> None:
    key = {"Idempotency-Key": "k1"}
    first, again = client.post(EVENTS, json=event(), headers=key), client.post(EVENTS, json=event(), headers=key)
    assert outcomes(first) == outcomes(again) == {"m1": "new"}
    assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
    other = client.post(EVENTS, json=event("m2"), headers=key)
    assert (other.status_code, other.json()["type"]) == (422, "urn:pipeline:problem:idempotency-key-reused")
    assert published(db) == 1


def test_a_key_belongs_to_its_caller(client_of: ClientOf, db: Database) -> None:
    key = {"Idempotency-Key": "k1"}
    client_of().post(EVENTS, json=event(), headers=key)
    assert outcomes(client_of(PUBLISHER).post(EVENTS, json=event("m2"), headers=key)) == {"m2": "new"}


def test_a_refused_request_frees_its_key(client: TestClient, db: Database) -> None:
    key = {"Idempotency-Key": "k1"}
    assert client.post(EVENTS, json={"message_id": ""}, headers=key).status_code == 422
    assert outcomes(client.post(EVENTS, json=event(), headers=key)) == {"m1": "new"}


def test_the_same_key_at_the_same_time_is_refused(client: TestClient, db: Database) -> None:
    key = {"Idempotency-Key": "k1"}
    client.post(EVENTS, json=event(), headers=key)
    with db.transaction() as tx:
        tx.execute(_AS_RUNNING)
    busy = client.post(EVENTS, json=event(), headers=key)
    assert (busy.status_code, busy.json()["type"]) == (409, "urn:pipeline:problem:request-in-progress")
    assert busy.headers["retry-after"] == "1"
    answers: list[Any] = []
    both = [Thread(target=lambda: answers.append(access.begin_request(db, "ada", "k2", "h"))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(answer is None for answer in answers) == [False, True], "one of them executes the request"
