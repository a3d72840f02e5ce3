"""The OpenAPI document: every generated request gets a documented answer, and none fails the server."""

from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pipeline.api import create
from pipeline.config import Settings
from pipeline.store.database import Database
from tests.api.conftest import ADA
from tests.cli import scenarios
from tests.factories import IN, a_workflow
from tests.support.table_reads import one

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6


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
