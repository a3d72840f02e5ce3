"""Acts on many items over HTTP: previews, commits and imports."""

import tracemalloc
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from starlette.testclient import TestClient

from pipeline.api import Person, Role
from pipeline.store.database import Database
from tests.api.conftest import ClientOf
from tests.cli import scenarios
from tests.factories import a_workflow
from tests.support.table_reads import rows


@pytest.fixture
def questions(db: Database) -> list[Any]:
    """Unknown outcomes whose requests can no longer arrive."""
    a_workflow(db, concurrency=8, on_uncertain="contain")
    made = [scenarios.an_indeterminate_mutation(db, f"order-{n}") for n in range(3)]
    db.advance_clock(timedelta(minutes=5))
    return made


def statuses(db: Database) -> list[str]:
    return sorted(row.status for row in rows(db, "SELECT status FROM pipeline.mutations"))


def preview(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/bulk/previews", json={"act": "skip", **body})


def commit(client: TestClient, made: Any, **body: Any) -> Any:
    given = {"count": made["count"], "reason": "the outage is over", **body}
    return client.post(f"/v1/bulk/previews/{made['id']}/commit", json=given)


def test_a_preview_is_committed_once_and_its_result_can_be_read(
    client: TestClient, db: Database, questions: list[Any]
) -> None:
    made = preview(client, mutations={"workflow": "billing"})
    assert (made.status_code, made.json()["count"], made.json()["status"]) == (201, 3, "open")
    assert commit(client, made.json(), count=2).status_code == 409
    assert statuses(db) == ["indeterminate"] * 3
    assert commit(client, made.json()).status_code == 202
    result = client.get(f"/v1/bulk/previews/{made.json()['id']}").json()
    assert (result["status"], result["done"], result["committed_by"]) == ("finished", 3, "ada")
    assert statuses(db) == ["failed"] * 3
    again = commit(client, made.json())
    assert (again.status_code, again.json()["type"]) == (409, "urn:pipeline:problem:illegal-transition")


def test_a_discarded_preview_changes_nothing(client: TestClient, db: Database, questions: list[Any]) -> None:
    made = preview(client, ids=[str(questions[0].id)]).json()
    assert client.post(f"/v1/bulk/previews/{made['id']}/discard").json()["status"] == "discarded"
    assert commit(client, made).status_code == 409
    assert statuses(db) == ["indeterminate"] * 3


def test_an_incident_is_resolved_as_one(client: TestClient, db: Database, questions: list[Any]) -> None:
    (incident,) = client.get("/v1/incidents").json()["items"]
    assert incident["count"] == 3
    made = preview(client, incident=incident["id"]).json()
    assert (made["count"], commit(client, made).status_code) == (3, 202)
    assert client.get("/v1/incidents").json()["items"] == []


def test_a_selection_is_one_kind_and_a_viewer_makes_none(client_of: ClientOf, questions: list[Any]) -> None:
    client = client_of()
    assert preview(client).status_code == 422
    assert preview(client, mutations={}, incident="x").status_code == 422
    assert preview(client, mutations={"workflow": "nowhere"}).status_code in (404, 422)
    viewer = client_of(Person(name="vic", is_ambient=False))
    assert preview(viewer, mutations={}).status_code == 403
    stranger = client_of(Person(name="eve", role=Role.OPERATOR, workflows=frozenset({"mail"}), is_ambient=False))
    assert preview(stranger, mutations={}).status_code == 422
    made = preview(client, mutations={}).json()
    assert stranger.get(f"/v1/bulk/previews/{made['id']}").status_code == 404


def test_quarantined_events_are_released_by_a_preview(client: TestClient, db: Database) -> None:
    a_workflow(db)
    event = scenarios.a_quarantined_event(db)
    made = preview(client, act="release_event", events={"event_ids": [str(event)]}).json()
    assert commit(client, made).status_code == 202
    assert client.get("/v1/quarantine").json()["items"] == []


def test_an_export_is_imported_after_a_preview(client: TestClient, db: Database, questions: list[Any]) -> None:
    text = f"reference,amount\n{questions[0].idempotency_key},1\nother,2\n"
    form = {"column": "reference", "no_result": "true", "unchecked": "true"}
    made = client.post("/v1/imports", files={"file": ("export.CSV", text)}, data=form)
    assert made.status_code == 201, made.text
    assert (made.json()["count"], made.json()["left_out"]) == (1, {"not_in_export": 2, "unmatched_rows": 1})
    given = {"count": 1, "reason": "the provider's export"}
    assert client.post(f"/v1/imports/{made.json()['id']}/commit", json=given).status_code == 202
    assert statuses(db) == ["applied", "indeterminate", "indeterminate"]
    bad = client.post("/v1/imports", files={"file": ("export.xls", text)}, data=form)
    assert (bad.status_code, "neither .csv nor .jsonl" in bad.json()["detail"]) == (422, True)


_FORM = {"column": "reference", "no_result": "true"}
_ROW = b"reference\nabc\n"


@pytest.mark.parametrize(
    ("file", "form", "refusal"),
    [
        (("a.xls", _ROW), {}, (422, "neither .csv nor .jsonl")),
        (("a.csv", "reference\nabc\n".encode("utf-16")), {}, (422, "not in UTF-8")),
        (("a.csv", b"\x1f\x8b\x08" + b"\xff" * 50), {}, (422, "not in UTF-8")),
        (("a.csv", b"id\nabc\n"), {}, (422, "reference")),
        (("a.csv", b"reference\n" + b"x" * 1_100_000), {}, (422, "longer than 1048576")),
        (("a.csv", b"reference" + b",c" * 2_000 + b"\n"), {}, (422, "columns")),
        (("a.jsonl", b'{"reference": 1}\n[[['), {}, (422, "a.jsonl")),
        (("a.jsonl", b"[" * 100_000), {}, (422, "a.jsonl")),
        (("a.csv", _ROW), {"match_by": "amount"}, (422, "amount")),
        (("a.csv", _ROW), {"external_id": "id"}, (422, "Expected one of")),
        (("a.csv", _ROW), {"result_column": "id"}, (422, "Expected one of")),
        (("a.csv", _ROW), {"workflow": "nowhere"}, (404, "nowhere")),
        (("a.csv", _ROW), {"column": "x" * 300}, (422, "column")),
        (("\u202e\x1b[31m.csv", b"id\nabc\n"), {}, (422, "reference")),
    ],
)
def test_an_export_that_cannot_be_used_is_refused_and_freezes_nothing(
    client: TestClient,
    db: Database,
    questions: list[Any],
    file: tuple[str, bytes],
    form: dict[str, str],
    refusal: tuple[int, str],
) -> None:
    """Over HTTP and on the page of the console, which has other names for the fields."""
    answer = client.post("/v1/imports", files={"file": file}, data=_FORM | form)
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    assert (answer.status_code, refusal[1] in answer.json()["detail"]) == (refusal[0], True), answer.text
    typed = {"column": "reference", "result_kind": "none", "match_by": "", "workflow": ""} | form
    if not {"external_id", "result_column", "no_result"} & set(form):
        shown = client.post("/import", files={"export": file}, data=typed, headers={"Accept": "text/html"})
        assert shown.status_code == refusal[0], shown.text
        assert "\u202e" not in shown.text
        assert "\x1b" not in shown.text
        assert f'value="{typed["column"]}"' in shown.text, "what was typed stays"
    assert rows(db, "SELECT * FROM pipeline.bulk_previews") == []
    assert statuses(db) == ["indeterminate"] * 3


@pytest.mark.parametrize(("path", "part"), [("/v1/imports", "file"), ("/import", "export")])
def test_a_large_export_is_read_row_by_row(client: TestClient, questions: list[Any], path: str, part: str) -> None:
    """A row of a thousand cells takes twenty times its size in memory, and an export may have 32 MiB of them."""
    names = ",".join(["reference", *(f"c{n}" for n in range(999))])
    content = "\n".join([names, *[",".join(["a"] * 1000)] * 1500])
    tracemalloc.start()
    try:
        answer = client.post(path, files={part: ("export.csv", content)}, data=_FORM | {"result_kind": "none"})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code in (201, 303)
    assert peak < 10 * len(content)


def test_an_import_needs_a_file_a_reason_the_count_and_an_operator_of_the_workflow(
    client_of: ClientOf, db: Database, questions: list[Any]
) -> None:
    client, files = client_of(), {"file": ("export.csv", f"reference\n{questions[0].idempotency_key}\n")}
    assert client.post("/v1/imports", data=_FORM).status_code == 422
    assert client.post("/v1/imports", json=_FORM).status_code == 422
    viewer = client_of(Person(name="vic", is_ambient=False))
    assert viewer.post("/v1/imports", files=files, data=_FORM).status_code == 403
    stranger = client_of(Person(name="eve", role=Role.OPERATOR, workflows=frozenset({"mail"}), is_ambient=False))
    made = stranger.post("/v1/imports", files=files, data=_FORM)
    assert (made.status_code, made.json().get("count", 0)) in ((422, 0), (201, 0)), "billing is out of its scope"
    made = client.post("/v1/imports", files=files, data=_FORM | {"unchecked": "true"}).json()
    path = f"/v1/imports/{made['id']}/commit"
    given = {"count": 1, "reason": "the provider's export"}
    refused = [
        (client.post(path, json={**given, "count": 2}), 409),
        (client.post(path, json={**given, "reason": ""}), 422),
        (client.post(path, json={**given, "by": "root"}), 422),
        (viewer.post(path, json=given), 403),
        (stranger.post(path, json=given), 404),
        (client.post(f"/v1/imports/{UUID(int=7)}/commit", json=given), 404),
    ]
    assert [(answer.status_code, status) for answer, status in refused if answer.status_code != status] == []
    assert statuses(db) == ["indeterminate"] * 3
    assert client.post(path, json=given).status_code == 202
    assert client.post(path, json=given).status_code == 409, "only once"
    assert statuses(db) == ["applied", "indeterminate", "indeterminate"]
