"""The shipped connector http says the truth whatever breaks between it and a real server."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from pipeline.connectors import Grade
from pipeline.connectors.http import Http, get, post, put
from pipeline.testing import FaultyProxy, Subject, is_complete_http_request
from tests.connectors.http_server import World, world
from tests.support.conformance_retries import patient


class Crm(Http):
    """An operation of each grade; the server honours every key."""

    name = "crm"
    charge = post(
        "/charges",
        lookup=get("/charges", query={"key": "{key}"}),
        found=lambda body: body["items"][0] if body["items"] else None,
        keyed=True,
        settle=timedelta(0),
    )
    upsert = put("/customers/{id}", lookup=get("/customers/{id}"), settle=timedelta(milliseconds=200))
    order = post("/charges", keyed=True, settle=timedelta(0))
    note = post("/charges", settle=timedelta(0))


DECLARED = {"charge": Grade.A, "upsert": Grade.B, "order": Grade.C, "note": Grade.D}


@pytest.fixture
def outside() -> Iterator[World]:
    with world() as it:
        yield it


@pytest.fixture
def subject(outside: World) -> Iterator[Subject]:
    place = urlsplit(outside.url)
    with FaultyProxy(place.hostname or "", place.port or 0, is_complete=is_complete_http_request) as proxy:
        crm = Crm(proxy.url, token=SecretStr("sk-very-secret-token"))
        yield Subject(
            connector=crm,
            operation="charge",
            params={"json": {"cents": 5}},
            effects=outside.times,
            proxy=proxy,
            timeout=timedelta(milliseconds=300),
            result_parts=["body.id", "body.key"],
        )
        crm.close_connections()


@pytest.mark.parametrize("operation", DECLARED)
def test_every_operation_conforms_to_its_declared_grade(subject: Subject, operation: str) -> None:
    if operation == "upsert":
        subject = replace(
            subject, operation=operation, params=lambda key: {"id": key, "json": {"a": 1}}, result_parts=[]
        )
    report = patient(replace(subject, operation=operation))
    report.require()
    assert report.declared_grade is DECLARED[operation]
