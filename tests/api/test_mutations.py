"""Mutations over HTTP: what is shown, and answers guarded by If-Match."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from starlette.testclient import TestClient

from pipeline.api import Person, Role
from pipeline.store.database import Database
from tests.api.conftest import ClientOf
from tests.cli import scenarios
from tests.factories import a_workflow
from tests.support.table_reads import one, rows

VIEWER = Person(name="vic", role=Role.VIEWER, is_ambient=False)
SKIP = {"answer": "skip", "reason": "the customer left"}


@pytest.fixture
def question(db: Database) -> Any:
    """A mutation whose outcome is unknown and whose request can no longer arrive."""
    a_workflow(db, concurrency=8, on_uncertain="contain")
    row = scenarios.an_indeterminate_mutation(db)
    db.advance_clock(timedelta(minutes=5))
    return row


def shown(client: TestClient, mutation: Any, **params: str) -> Any:
    return client.get(f"/v1/mutations/{mutation.id}", params=params)


def answer(
    client: TestClient, mutation: Any, body: dict[str, Any] = SKIP, *, act: str = "resolve", **headers: str
) -> Any:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post(f"/v1/mutations/{mutation.id}/{act}", json=body, headers=given)


def status(db: Database, mutation: Any) -> str:
    return str(one(db, "SELECT status FROM pipeline.mutations WHERE id = :id", id=mutation.id).status)


def test_an_answer_needs_the_state_that_was_shown(client: TestClient, db: Database, question: Any) -> None:
    missing = answer(client, question)
    assert (missing.status_code, missing.json()["type"]) == (428, "urn:pipeline:problem:precondition-required")
    wrong = answer(client, question, if_match="indeterminate")
    assert wrong.status_code == 422
    assert status(db, question) == "indeterminate"


def test_an_answer_is_recorded_under_the_authenticated_name(client: TestClient, db: Database, question: Any) -> None:
    before = shown(client, question)
    done = answer(client, question, {**SKIP, "evidence": {"ticket": 4}}, if_match=before.headers["etag"])
    assert (done.status_code, done.json()["mutation"]["status"]) == (200, "failed")
    assert done.headers["etag"] != before.headers["etag"]
    act = one(db, "SELECT * FROM pipeline.audit WHERE act = 'mutation.skip'")
    assert (act.actor, act.reason, act.evidence) == ("ada", "the customer left", {"ticket": 4})


def test_a_name_in_the_body_is_refused(client: TestClient, db: Database, question: Any) -> None:
    etag = shown(client, question).headers["etag"]
    assert answer(client, question, {**SKIP, "by": "root"}, if_match=etag).status_code == 422
    assert status(db, question) == "indeterminate"


def test_a_stale_answer_gets_the_mutation_as_it_is_now(client: TestClient, db: Database, question: Any) -> None:
    etag = shown(client, question).headers["etag"]
    answer(client, question, if_match=etag)
    late = answer(client, question, {"answer": "did_not_happen", "reason": "no such key"}, if_match=etag)
    assert (late.status_code, late.json()["type"]) == (412, "urn:pipeline:problem:state-changed")
    assert late.json()["current"]["status"] == "failed"
    assert late.headers["etag"] == f'"{late.json()["current"]["state"]}"'
    assert "status was indeterminate, is failed" in late.json()["changes"]


def test_happened_needs_one_result(client: TestClient, db: Database, question: Any) -> None:
    etag = shown(client, question).headers["etag"]
    happened = {"answer": "happened", "reason": "seen"}
    assert answer(client, question, happened, if_match=etag).status_code == 422
    twice = {**happened, "result": {"id": 1}, "no_result": True}
    assert answer(client, question, twice, if_match=etag).status_code == 422
    done = answer(client, question, {**happened, "result": {"id": "x"}, "unchecked": True}, if_match=etag)
    assert done.status_code == 200
    assert one(db, "SELECT result FROM pipeline.mutations").result == {"id": "x"}


def test_did_not_happen_is_refused_while_the_request_may_arrive(client: TestClient, db: Database) -> None:
    a_workflow(db)
    quiet = scenarios.an_indeterminate_mutation(db)
    etag = shown(client, quiet).headers["etag"]
    refused = answer(client, quiet, {"answer": "did_not_happen", "reason": "no"}, if_match=etag)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:pipeline:problem:quiet-period")


def test_a_request_is_approved_by_its_hash_and_rejected_with_a_reason(client: TestClient, db: Database) -> None:
    a_workflow(db, concurrency=8)
    first, second = (scenarios.a_pending_approval(db, f"order-{n}") for n in range(2))
    etag = shown(client, first).headers["etag"]
    other = answer(client, first, {"request_hash": "another"}, act="approve", if_match=etag)
    assert (other.status_code, status(db, first)) == (412, "pending")
    done = answer(client, first, {"request_hash": first.request_hash}, act="approve", if_match=etag)
    assert done.status_code == 200
    etag = shown(client, second).headers["etag"]
    assert answer(client, second, {"reason": ""}, act="reject", if_match=etag).status_code == 422
    assert answer(client, second, {"reason": "too dear"}, act="reject", if_match=etag).status_code == 200
    assert status(db, second) == "failed"


def test_a_late_effect_is_acknowledged(client: TestClient, db: Database) -> None:
    a_workflow(db)
    late = scenarios.a_late_effect(db)
    etag = shown(client, late).headers["etag"]
    assert answer(client, late, {"reason": "refunded"}, act="acknowledge", if_match=etag).status_code == 200
    assert one(db, "SELECT acknowledged_by FROM pipeline.mutations").acknowledged_by == "ada"


def test_a_viewer_reads_and_cannot_answer(client_of: ClientOf, db: Database, question: Any) -> None:
    viewer = client_of(VIEWER)
    found = shown(viewer, question)
    assert found.status_code == 200
    for act in ("resolve", "approve", "reject", "acknowledge", "notes", "fetch"):
        refused = answer(viewer, question, act=act, if_match=found.headers["etag"])
        assert refused.status_code == 403, act
    assert status(db, question) == "indeterminate"


def test_parameters_and_results_need_the_right_to_see_payloads(client_of: ClientOf, question: Any) -> None:
    viewer, admin = client_of(VIEWER), client_of()
    assert shown(viewer, question).json()["mutation"]["params"] is None
    assert shown(viewer, question, fields="params").status_code == 403
    assert shown(admin, question).json()["mutation"]["params"] is None
    assert shown(admin, question, fields="params").json()["mutation"]["params"] is not None


def test_a_mutation_out_of_scope_is_not_found(client_of: ClientOf, question: Any) -> None:
    stranger = client_of(Person(name="eve", role=Role.ADMIN, workflows=frozenset({"shop"}), is_ambient=False))
    assert shown(stranger, question).status_code == 404
    assert answer(stranger, question, if_match='"indeterminate"').status_code == 404
    assert stranger.get("/v1/mutations").json()["items"] == []


def test_mutations_are_listed_page_by_page(client: TestClient, db: Database) -> None:
    a_workflow(db, concurrency=8, on_uncertain="contain")
    made = [str(scenarios.an_indeterminate_mutation(db, f"order-{n}").id) for n in range(3)]
    first = client.get("/v1/mutations", params={"limit": 2, "status": "indeterminate"}).json()
    rest = client.get("/v1/mutations", params={"limit": 2, "status": "indeterminate", "after": first["next"]}).json()
    assert [each["id"] for each in [*first["items"], *rest["items"]]] == made[::-1]
    other = client.get("/v1/mutations", params={"after": first["next"]})
    assert (other.status_code, other.json()["type"]) == (422, "urn:pipeline:problem:invalid-input")


def test_a_note_is_kept_and_others_who_have_it_open_are_named(client_of: ClientOf, db: Database, question: Any) -> None:
    ada, bob = client_of(), client_of(Person(name="bob", role=Role.OPERATOR, is_ambient=False))
    assert answer(bob, question, {"text": "asked the provider"}, act="notes").status_code == 201
    detail = shown(ada, question).json()
    assert [(note["author"], note["text"]) for note in detail["notes"]] == [("bob", "asked the provider")]
    assert status(db, question) == "indeterminate"
    assert [row.actor for row in rows(db, "SELECT actor FROM pipeline.audit WHERE act = 'mutation.note'")] == ["bob"]


def test_evidence_is_shown_with_the_acts_and_its_values_need_the_right(client_of: ClientOf, question: Any) -> None:
    client, viewer = client_of(), client_of(VIEWER)
    etag = shown(client, question).headers["etag"]
    answer(client, question, {**SKIP, "evidence": {"ticket": 4}}, if_match=etag)
    path = f"/v1/mutations/{question.id}/evidence"
    found = client.get(path, params={"fields": "evidence"}).json()
    assert (found["attempts"], found["acts"][0]["evidence"]) == (1, {"ticket": 4})
    assert viewer.get(path).json()["acts"][0]["evidence"] is None
    assert viewer.get(path, params={"fields": "evidence"}).status_code == 403


def test_an_answer_about_a_high_value_waits_for_a_second_person(client_of: ClientOf, db: Database) -> None:
    a_workflow(db)
    dear = scenarios.an_indeterminate_mutation(db, four_eyes_value=Decimal(9_000))
    db.advance_clock(timedelta(minutes=5))
    ada, bob = client_of(), client_of(Person(name="bob", role=Role.OPERATOR, is_ambient=False))
    body, etag = {"answer": "did_not_happen", "reason": "no such key"}, shown(ada, dear).headers["etag"]
    first = answer(ada, dear, body, if_match=etag)
    assert (first.json()["is_proposed"], status(db, dear)) == (True, "indeterminate")
    assert shown(bob, dear).json()["proposal"]["proposed_by"] == "ada"
    assert answer(bob, dear, body, if_match=etag).json()["is_proposed"] is False
    assert status(db, dear) == "failed"


def test_a_result_cannot_be_fetched_without_the_code_of_its_operation(client: TestClient, question: Any) -> None:
    refused = answer(client, question, {"external_id": "ch_1"}, act="fetch")
    assert (refused.status_code, refused.json()["type"]) == (422, "urn:pipeline:problem:invalid-input")
    assert "its code is not here" in refused.json()["detail"]
