"""The shipped connector sql says the truth whatever breaks between it and a real Postgres."""

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from pipeline.connectors import Call, Grade
from pipeline.connectors.sql import Sql, transaction
from pipeline.embedded.servers import Servers
from pipeline.testing import CASES, Case, CaseResult, FaultyProxy, Subject, is_complete_postgres_messages
from pipeline.testing.conformance_suite import run_case
from tests.support import databases
from tests.support.conformance_retries import MORE, patient, patiently


class Shop(Sql):
    """A database of orders."""

    name = "shop"

    @transaction()
    def book(self, connection: Connection, call: Call, *, cents: int) -> dict[str, Any]:
        values = {"key": call.idempotency_key, "cents": cents}
        made = connection.execute(text("INSERT INTO booked (key, cents) VALUES (:key, :cents) RETURNING id"), values)
        return {"id": made.scalar_one()}


@pytest.fixture
def subject(embedded: Servers) -> Iterator[Subject]:
    with databases.empty(embedded.database_url, f"conformance_{os.getpid()}") as url:
        own = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with own.connect() as connection:
            connection.execute(text("CREATE TABLE booked (id serial PRIMARY KEY, key text, cents int)"))

        def effects(key: str) -> int:
            with own.connect() as connection:
                counted = connection.execute(text("SELECT count(*) FROM booked WHERE key = :key"), {"key": key})
                return int(counted.scalar_one())

        Shop(url).create_table()
        place = make_url(url)
        with FaultyProxy(
            place.host or "",
            place.port or 5432,
            is_complete=is_complete_postgres_messages,
            has_effect=lambda data: b"COMMIT\0" in data,
        ) as proxy:
            shop = Shop(place.set(host=proxy.host, port=proxy.port).render_as_string(hide_password=False))
            yield Subject(
                connector=shop,
                operation="book",
                params={"cents": 5},
                effects=effects,
                proxy=proxy,
                is_http=False,
                timeout=timedelta(milliseconds=500),
                result_parts=["id"],
            )
            shop.engine.dispose()


#: The driver waits for the answer to COMMIT without a limit of its own, so a server that falls silent there keeps the
#: call past its deadline. A worker abandons such a call and reconciles it; the verdict must be true.
SILENT = {Case.TIMEOUT_BEFORE_SEND, Case.TIMEOUT_AFTER_SEND, Case.DRIPPING_ANSWER, Case.SLOW_COMMIT}


@pytest.mark.parametrize("case", [case for case in CASES if case not in SILENT])
def test_a_booking_conforms(subject: Subject, case: Case) -> None:
    if case is Case.RECONCILE_CUT_OFF:
        subject = replace(subject, timeout=timedelta(seconds=1))  # the driver counts a connection's time in whole ones
    finding = patiently(subject, case)
    assert finding.status != "fail", finding.notes


@pytest.mark.parametrize("case", sorted(SILENT))
def test_a_booking_conforms_when_the_server_stops_responding_at_commit(subject: Subject, case: Case) -> None:
    finding = run_case(subject, case)
    if beside_the_deadline(finding):  # it may have had too little time to get as far as COMMIT
        finding = run_case(replace(subject, timeout=MORE * subject.timeout), case)
    assert beside_the_deadline(finding) == []
    assert not finding.has_lied


def beside_the_deadline(finding: CaseResult) -> list[str]:
    return [note for note in finding.notes if "past its deadline" not in note]


def test_a_booking_has_the_grade_it_declares(subject: Subject) -> None:
    report = patient(subject, [Case.APPLIED, Case.DUPLICATE, Case.RECONCILE_BEFORE, Case.RECONCILE_AFTER])
    report.require(Grade.A)
