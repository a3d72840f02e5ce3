"""Workflows, events, runs and records over HTTP: what is shown, switches, scope."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.api import Person, Role
from pipeline.store.database import Database
from tests.api.conftest import ClientOf
from tests.cli import scenarios
from tests.factories import IN, a_workflow, event_status
from tests.support.table_reads import one, rows

JSON = {"content-type": "application/json"}


@pytest.fixture
def order(db: Database) -> Any:
    """A committed run of an order."""
    a_workflow(db)
    return scenarios.a_done_order(db, "order-1")


def test_a_workflow_is_shown_with_its_handlers_topics_graph_and_history(client: TestClient, order: Any) -> None:
    (listed,) = client.get("/v1/workflows").json()["items"]
    assert (listed["name"], listed["status"]) == ("billing", "active")
    detail = client.get("/v1/workflows/billing").json()
    assert {handler["name"] for handler in detail["handlers"]} == {"send", "poll"}
    assert client.get("/v1/workflows/billing/handlers/send").json()["kind"] == "consumer"
    assert client.get("/v1/workflows/billing/handlers/none").status_code == 404
    assert IN in {topic["name"] for topic in client.get("/v1/workflows/billing/topics").json()["items"]}
    assert client.get(f"/v1/workflows/billing/topics/{IN}/schema").json()["payload_schema"] is None
    assert client.get("/v1/workflows/billing/graph").json()["nodes"]
    assert client.get("/v1/workflows/billing/history", params={"span": 600}).json()["points"] is not None
    unplanned = client.get("/v1/workflows/billing/plan")
    assert (unplanned.status_code, unplanned.json()["type"]) == (409, "urn:pipeline:problem:not-here")


def test_an_operator_switches_a_workflow_and_the_audit_names_the_caller(client: TestClient, db: Database) -> None:
    a_workflow(db)
    for path in ("pause", "resume", "maintenance", "maintenance/exit"):
        done = client.post(f"/v1/workflows/billing/{path}", json={"reason": "a test"})
        assert (done.status_code, done.json()["is_changed"]) == (200, True), path
    assert client.post("/v1/workflows/billing/maintenance", json={}).status_code == 422
    assert client.post("/v1/workflows/billing/handlers/poll/run", json={}).status_code == 200
    assert client.post("/v1/workflows/billing/handlers/send/run", json={}).status_code == 404
    assert {row.actor for row in rows(db, "SELECT actor FROM pipeline.audit")} == {"ada"}


def test_a_caller_sees_only_the_workflows_in_scope(client_of: ClientOf, db: Database, order: Any) -> None:
    a_workflow(db, "mail")
    scoped = client_of(Person(name="eve", role=Role.ADMIN, workflows=frozenset({"mail"}), is_ambient=False))
    assert [each["name"] for each in scoped.get("/v1/workflows").json()["items"]] == ["mail"]
    for path in ("workflows/billing", "workflows/billing/graph", f"runs/{order.id}", "events/1", "search?q=order-1"):
        answer = scoped.get(f"/v1/{path}")
        assert answer.status_code == 404 or answer.json().get("hits") == [], path
    assert scoped.post("/v1/workflows/billing/pause", json={}).status_code == 404
    assert scoped.get("/v1/doctor").status_code == 403, "it checks every workflow, and must not say that all is well"
    for path in ("runs", "events", "sessions", "mutations", "attention", "incidents", "audit"):
        assert scoped.get(f"/v1/{path}").json()["items"] == [], path
    assert one(db, "SELECT desired FROM pipeline.workflows WHERE name = 'billing'").desired == "active"


def test_events_and_runs_are_shown_with_text_ids_and_payloads_only_with_the_right(
    client_of: ClientOf, order: Any
) -> None:
    client, viewer = client_of(), client_of(Person(name="vic", is_ambient=False))
    newest, oldest = client.get("/v1/events").json()["items"]
    assert isinstance(oldest["id"], str)
    assert oldest["created_at"].endswith("Z")
    shown = client.get(f"/v1/events/{oldest['id']}", params={"fields": "payload"}).json()
    assert (shown["payload"], shown["deliveries"][0]["status"]) == ({"n": 0}, "consumed")
    assert viewer.get(f"/v1/events/{oldest['id']}").json()["payload"] is None
    assert viewer.get(f"/v1/events/{oldest['id']}", params={"fields": "payload"}).status_code == 403
    (root,) = client.get(f"/v1/events/{newest['id']}/trace").json()["roots"]
    assert root["id"] == oldest["id"]
    run = client.get(f"/v1/runs/{order.id}").json()
    assert [event["id"] for event in run["inputs"]] == [oldest["id"]]
    assert client.get(f"/v1/runs/{order.id}/timeline").json()
    assert client.get(f"/v1/runs/{order.id}/trace").json()["roots"]
    session = client.get(f"/v1/sessions/{run['session']['id']}").json()
    assert session["workflow"] == "billing"
    (hit,) = client.get("/v1/search", params={"q": "order-1"}).json()["hits"]
    assert (hit["noun"], hit["id"]) == ("event", oldest["id"])


def test_a_delivery_is_quarantined_released_and_skipped(client: TestClient, db: Database) -> None:
    a_workflow(db)
    event = scenarios.a_quarantined_event(db)
    path = f"/v1/workflows/billing/deliveries/{event}/send"
    assert [each["event_id"] for each in client.get("/v1/quarantine").json()["items"]] == [str(event)]
    assert client.post(f"{path}/release", json={}).status_code == 200
    assert event_status(db, event) == "pending"
    assert client.post(f"{path}/release", json={}).status_code == 422
    assert client.post(f"{path}/quarantine", json={"reason": "again"}).status_code == 200
    assert client.post(f"{path}/skip", json={"reason": "a test order"}).status_code == 200
    assert event_status(db, event) == "skipped"


def test_breakers_views_doctor_and_system(client: TestClient, db: Database) -> None:
    a_workflow(db)
    assert client.post("/v1/breakers/mail.send/open", json={"reason": "outage"}).status_code == 200
    (breaker,) = client.get("/v1/breakers").json()["items"]
    assert (breaker["connector"], breaker["opened_by"]) == ("mail", "ada")
    assert client.post("/v1/breakers/mail.send/close", json={}).json()["act"] == "close"
    saved = client.put("/v1/views/mine", json={"page": "inbox", "query": "kind=approval"})
    assert saved.json()["name"] == "mine"
    assert [view["query"] for view in client.get("/v1/views").json()["items"]] == ["kind=approval"]
    assert [client.delete("/v1/views/mine").status_code for _ in range(2)] == [204, 404]
    assert client.get("/v1/doctor").json()["findings"] == []
    system = client.get("/v1/system")
    assert (system.status_code, system.json()["queues"]) == (200, None)
    assert client.get("/v1/refused").json()["type"] == "urn:pipeline:problem:not-here"
    assert client.get("/v1/connectors").json()["items"] == []


@pytest.mark.parametrize(
    ("method", "path", "how", "status"),
    [
        ("get", "/v1/events/12x", {}, 422),
        ("get", "/v1/events/99999999999999999999", {}, 422),
        ("get", "/v1/events?key=%00", {}, 422),
        ("get", "/v1/events?after=nonsense", {}, 422),
        ("get", "/v1/events?limit=100000", {}, 422),
        ("get", "/v1/runs/not-a-uuid", {}, 422),
        ("get", "/v1/runs?since=yesterday", {}, 422),
        (
            "post",
            "/v1/workflows/billing/pause",
            {"content": b"{", "headers": JSON},
            422,
        ),
        ("post", "/v1/workflows/billing/pause", {"content": b"reason=x"}, 422),
        ("post", "/v1/workflows/billing/pause", {"json": {"reason": "\x00"}}, 422),
        ("post", "/v1/workflows/billing/pause", {"json": {"reason": "x" * 2_000_000}}, 413),
        ("post", "/v1/workflows/billing/pause", {"json": {}, "headers": {"Idempotency-Key": "k" * 300}}, 422),
        ("post", "/v1/workflows/billing/pause", {"json": {"by": "root"}}, 422),
    ],
)
def test_a_request_that_is_not_as_documented_is_a_problem_and_changes_nothing(
    client: TestClient, db: Database, method: str, path: str, how: dict[str, Any], status: int
) -> None:
    a_workflow(db)
    answer = client.request(method, path, **how)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert {"type", "title", "status", "detail"} <= set(answer.json())
    assert one(db, "SELECT desired FROM pipeline.workflows").desired == "active"
    assert rows(db, "SELECT * FROM pipeline.audit") == []
