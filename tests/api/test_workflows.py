"""Workflows, events, runs and records over HTTP: what is shown, switches, scope."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline import LogicError, PrepareResult
from pipeline.admin.plan import Planner
from pipeline.api import Person, Role, create
from pipeline.api.context import Services
from pipeline.config import Settings
from pipeline.store.database import Database
from pipeline.transitions import housekeeping
from tests.admin.test_system import a_worker
from tests.api.conftest import ADA, ORIGIN, ClientOf
from tests.cli import scenarios
from tests.factories import IN, a_workflow, event_status
from tests.support.scripted_consumers import Shop, take_one
from tests.support.table_reads import one, rows

JSON, HTML = {"content-type": "application/json"}, {"Accept": "text/html"}


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


def test_what_a_workflow_would_do_next_and_what_a_run_decided_are_shown(db: Database, database_url: str) -> None:
    def prepare(ctx: Any, _: Any) -> PrepareResult:
        taken = take_one(ctx, shop.orders)
        return replace(taken, ui={"title": "An order", "api_token": "PLANTED"}, wake_at=ctx.now + timedelta(hours=1))

    def mutate(ctx: Any, prepared: Any) -> Any:
        if prepared.data["n"] == 1:
            raise LogicError("the order 1 has no address")
        return ctx.mail.send(n=prepared.data["n"])

    shop = Shop(prepare=prepare, mutate=mutate, concurrency=4, on_logic_error="quarantine")
    run = shop.started(db, 2)
    settings, planner = Settings(database_url=database_url), Planner(db, run.registry, step_limit=timedelta(seconds=30))
    services = Services.connect(settings, db, plan=lambda name, limit: planner.plan(name, limit=limit))
    with TestClient(create(services=services, identify=lambda _: ADA), base_url=ORIGIN) as client:
        planned = client.get("/v1/workflows/shop/plan").json()["runs"]
        assert [(each["message_ids"], each["operation"], each["problem"]) for each in planned] == [
            (["m1"], "send", ""),
            (["m2"], "", "the order 1 has no address"),
        ]
        page = client.get("/w/shop/plan", headers=HTML)
        assert (page.status_code, planned[0]["headline"] in page.text) == (200, True)
        run.run()
        done, *_ = (row.id for row in rows(db, "SELECT id FROM pipeline.runs WHERE status = 'committed'"))
        failed, *_ = (row.id for row in rows(db, "SELECT id FROM pipeline.runs WHERE error_type = 'LogicError'"))
        plan = client.get(f"/v1/runs/{done}").json()["plan"]
        assert (plan["reserved"], plan["data"], plan["needs_approval"]) == ({"orders": 1}, None, False)
        assert (plan["ui"]["title"], plan["wake_at"] is None) == ("An order", False)
        assert client.get(f"/v1/runs/{done}", params={"fields": "payload"}).json()["plan"]["data"] == {"n": 0}
        traceback = client.get(f"/v1/runs/{failed}").json()["traceback"]
        assert "raise LogicError(" in traceback
        assert "in mutate" in traceback
        page = client.get(f"/r/{failed}", headers=HTML)
        assert [text in page.text for text in ("Where it was raised", "in mutate", "PLANTED")] == [True, True, False]


def test_an_empty_inbox_says_since_when_and_whether_workers_beat_and_doctor_are_well(
    client: TestClient, db: Database, order: Any
) -> None:
    assert "No worker runs" in client.get("/", headers=HTML).text
    with db.transaction() as tx:
        housekeeping.record_worker(tx, a_worker("w1"))
    client.post("/v1/workflows/billing/pause", json={"reason": "an act"})
    client.post("/v1/workflows/billing/resume", json={"reason": "another"})
    page = client.get("/", headers=HTML).text
    said = (
        "Nothing waits for you",
        "since",
        "1 worker runs",
        "Beat runs every sweep",
        "The doctor has not checked yet",
    )
    assert [text for text in said if text not in page] == []


def test_the_releases_that_workers_run_are_shown(client: TestClient, db: Database, order: Any) -> None:
    for name, version, code in (("w1", 2, "9f1c"), ("w2", 2, "9f1c"), ("w3", 1, "")):
        with db.transaction() as tx:
            described = replace(a_worker(name), workflows={"billing": version}, code_version=code)
            housekeeping.record_worker(tx, described)
    new, old = client.get("/v1/workflows/billing").json()["releases"]
    assert (new["version"], new["code_version"], new["workers"]) == (2, "9f1c", ["w1", "w2"])
    assert (old["version"], old["workers"]) == (1, ["w3"])
    assert client.get("/v1/system").json()["releases"] == [new, old]
    for path in ("/w/billing", "/system"):
        page = client.get(path, headers=HTML).text
        assert "9f1c" in page, path
        assert "2: w1, w2" in page, path


def test_an_operator_switches_a_workflow_and_the_audit_names_the_caller(client: TestClient, db: Database) -> None:
    a_workflow(db)
    for path in ("pause", "resume", "maintenance", "maintenance/exit"):
        done = client.post(f"/v1/workflows/billing/{path}", json={"reason": "a test"})
        assert (done.status_code, done.json()["is_changed"]) == (200, True), path
    assert client.post("/v1/workflows/billing/maintenance", json={}).status_code == 422
    assert client.post("/v1/workflows/billing/handlers/poll/run", json={}).status_code == 200
    assert client.post("/v1/workflows/billing/handlers/send/run", json={}).status_code == 404
    acts = rows(db, "SELECT actor, claimed FROM pipeline.audit")
    assert {(act.actor, act.claimed) for act in acts} == {("ada", False)}, "the API has authenticated the caller"


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
    for path in ("runs", "events", "sessions", "mutations", "attention", "incidents", "audit", "quarantine"):
        there, typo, gone = (scoped.get(f"/v1/{path}?workflow={name}") for name in ("billing", "billin", "nowhere"))
        assert [there.status_code, typo.status_code, gone.status_code] == [404] * 3, f"{path} tells whether it exists"
        assert "billing" not in typo.text + gone.text, path
        assert there.json()["detail"].replace("billing", "nowhere") == gone.json()["detail"], path
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
