"""The OpenAPI document: it has each answer that an endpoint can give and no other; no request fails the server."""

import json
from hashlib import sha256
from itertools import count
from typing import Any
from uuid import UUID

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from pipeline.admin import access as admin_access
from pipeline.admin.access import Access
from pipeline.api import Role, create
from pipeline.api.preconditions import KEY_HEADER
from pipeline.config import Settings
from pipeline.domain.access import Rights
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from tests.api.conftest import ADA, ORIGIN
from tests.cli import scenarios
from tests.factories import IN, a_workflow
from tests.support.table_reads import one

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6
EVE = Actor(name="eve")


@pytest.fixture
def schema(db: Database, database_url: str) -> Any:
    """The document of an app on a database with one thing of each kind."""
    a_workflow(db, concurrency=8, on_uncertain="contain")
    scenarios.an_indeterminate_mutation(db, "order-1")
    scenarios.a_pending_approval(db, "order-2")
    scenarios.a_done_order(db, "order-3")
    scenarios.a_quarantined_event(db, "order-4")
    app = create(Settings(database_url=database_url), database=db, identify=lambda _: ADA)
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.broken_on_purpose  # generated requests may leave work that no worker does
def test_no_generated_request_fails_the_server_or_gets_an_undocumented_answer(db: Database, schema: Any) -> None:
    wrong: list[str] = []
    known = _known_names(db)
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.startswith("/v1/") and not operation.path.endswith("/stream"):
            wrong += problems_of(operation, known)
    assert wrong == []


def test_every_endpoint_refuses_as_documented_and_documents_no_fault(db: Database, database_url: str) -> None:
    a_workflow(db)
    roles = (Role.VIEWER, Role.PUBLISHER)
    little = {role: Access(db).create_token(role, Rights(role=role), EVE).secret for role in roles}
    settings = Settings(database_url=database_url, api_max_body_bytes=100)
    app, nobody = create(settings, database=db), dict[str, str]()
    away = create(settings, database=Database.connect_unpooled("postgresql+psycopg2://a@127.0.0.1:1/b"))
    wrong, without = list[str](), list[str]()
    with TestClient(app, base_url=ORIGIN) as client, TestClient(away, base_url=ORIGIN) as broken:
        for path, methods in app.openapi()["paths"].items():
            for method, operation in methods.items():
                documented = {int(status) for status in operation["responses"]}
                least = Role.VIEWER if "/topics/{topic}/events" in path else Role.PUBLISHER
                url = path.replace("{topic}", IN).replace("{workflow}", "billing").format_map(Named())
                asked = {
                    401: (client, nobody, b"{}"),
                    403: (client, {"Authorization": f"Bearer {little[least]}"}, b"{}"),
                    413: (client, {"Authorization": f"Bearer {little[Role.VIEWER]}", KEY_HEADER: path}, b" " * 200),
                    503: (broken, {"Authorization": f"Bearer {little[Role.VIEWER]}"}, b"{}"),
                }
                if path == "/v1/me":
                    del asked[403]  # only a caller that a proxy names can be refused there
                if path.endswith("/stream"):
                    del asked[413]  # an answer that has begun cannot change its status; the connection is cut
                for status, (one_of, headers, body) in asked.items():
                    answer = one_of.request(method, url, headers=headers, content=body)
                    if (answer.status_code == status) is not (status in documented):
                        wrong.append(f"{method} {path}: {answer.status_code}, documented {sorted(documented)}")
                if 500 in documented or ({502} & documented and not path.endswith(("/resolve", "/fetch"))):
                    without.append(path)
    assert (wrong, without) == ([], [])


#: A body that each act accepts, by the end of its path.
_BODIES: dict[str, dict[str, Any]] = {
    "/resolve": {"answer": "skip", "reason": "why"},
    "/approve": {"request_hash": "abc"},
    "/fetch": {"external_id": "ch_1"},
    "/notes": {"text": "seen"},
    "/commit": {"count": 1, "reason": "why"},
    "/events": {"message_id": "m"},
    "/events:batch": {"events": [{"message_id": "m"}]},
    "/bulk/previews": {"act": "skip", "incident": "inc-00000000-1"},
    "/tokens": {"name": "bot"},
}


def test_each_refusal_of_an_act_is_reached_and_documented(client: TestClient, db: Database) -> None:
    """404: of what is missing; 409: while a repeat is executed; 412: of a changed mutation; 428: without If-Match."""
    a_workflow(db)
    question = str(scenarios.an_indeterminate_mutation(db, "order-1").id)
    wrong, reached = list[str](), set[int]()
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            if method == "get" or path == "/v1/imports" or path.startswith("/v1/refused"):
                continue  # lists are asked by generated requests; these two need a file and a broker
            documented = {int(status) for status in operation["responses"]}
            body = next((_BODIES[end] for end in _BODIES if path.endswith(end)), {"reason": "why"})
            gone, there = path.format_map(Named()), path.format_map(Named(mutation_id=question))
            content, seen = (
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "If-Match": '"indeterminate.9.0.1f0e2d3c"'},
            )
            digest = sha256(f"{method.upper()}\n{there}\n\n{seen['If-Match']}".encode() + content).hexdigest()
            admin_access.begin_request(db, ADA.name, there, digest)
            asked = {404: (gone, seen), 409: (there, {**seen, KEY_HEADER: there}), 412: (there, seen), 428: (there, {})}
            if path.endswith("/open"):
                del asked[404]  # no worker has registered operations here, so any may be opened
            for status in documented & set(asked):
                url, headers = asked[status]
                answer = client.request(method, url, headers=headers, content=content)
                reached.add(answer.status_code)
                if answer.status_code != status:
                    wrong.append(f"{method} {path}: {answer.status_code} instead of {status}: {answer.text[:200]}")
    assert "\n".join(wrong) == ""
    assert reached == {404, 409, 412, 428}


class Named(dict[str, str]):
    """A value for each path parameter."""

    def __missing__(self, name: str) -> str:
        return {"event_id": "1", "name": "one", "operation": "no.such"}.get(name, str(UUID(int=7)))


def _known_names(db: Database) -> dict[str, str]:
    """Values of path parameters that name something."""
    row = one(
        db,
        """SELECT m.id AS mutation_id, m.run_id, r.session_id, (SELECT min(id) FROM pipeline.events) AS event_id
        FROM pipeline.mutations m JOIN pipeline.runs r ON r.id = m.run_id ORDER BY m.id LIMIT 1""",
    )
    names = {"workflow": "billing", "handler": "send", "topic": IN, "operation": "mail.send"}
    return names | {name: str(value) for name, value in row._asdict().items()}


def problems_of(operation: Any, known: dict[str, str]) -> list[str]:
    """Send generated requests to one endpoint, half of them to what exists. Return what is wrong with the answers."""
    wrong: list[str] = []
    sent = count()

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.generate],
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        if next(sent) % 2 == 0:
            case.path_parameters.update({name: known[name] for name in case.path_parameters if name in known})
        try:
            case.call_and_validate(checks=CHECKS)
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - all of them are reported at once
            wrong.append(f"{operation.label}: {_described(error)}")

    given(case=operation.as_strategy())(send)()
    return wrong[:2]


def _described(error: BaseException) -> str:
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    return "; ".join(str(part)[:600] for part in parts)
