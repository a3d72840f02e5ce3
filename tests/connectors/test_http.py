"""The connector http against a real server: what it sends, what it makes of answers, and that it is never late."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, SecretStr

from pipeline.connectors import Call, Grade
from pipeline.connectors.http import Http, UnclearResponseError, delete, get, patch, post, put
from pipeline.connectors.sdk import Operation
from pipeline.domain.errors import AuthError, LogicError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, Retry
from tests.connectors import http_server as server
from tests.connectors.http_server import World, ask, call, do, with_time, world

TOKEN = "sk-very-secret-token"


class Order(BaseModel):
    order: str
    cents: int = 100


class Crm(Http):
    """Everything that can be declared."""

    name = "crm"
    upsert = put(
        "/customers/{id}",
        lookup=get("/customers/{id}"),
        found=lambda body, sent: body if body == sent["json"] else None,
        settle=timedelta(seconds=5),
    )
    charge = post(
        "/charges",
        lookup=get("/charges", query={"key": "{key}"}),
        found=lambda body: body["items"][0] if body["items"] else None,
        keyed=True,
    )
    replace = put("/customers/{id}", lookup=get("/customers/{id}"))
    order = post("/charges", body=Order, redact=["json"], key_field="reference")
    note = patch("/customers/{id:int}", statuses={409: "applied", 422: "unknown", 503: "not now", 500: "refused"})
    remove = delete("/customers/{id:uuid}")
    send = post("/charges", query={"source": "pipeline"}, lookup=get("/customers/{json.customer}"))
    find = get("/customers/{id}", timeout=timedelta(seconds=30))


@pytest.fixture
def outside() -> Iterator[World]:
    with world() as it:
        yield it


@pytest.fixture
def crm(outside: World) -> Iterator[Crm]:
    made = Crm(outside.url, token=SecretStr(TOKEN))
    yield made
    made.close_connections()


def reading(crm: Http, operation: str, to: Call | None = None, **params: Any) -> ErrorReading:
    """What the error of this call says."""
    with pytest.raises((LogicError, TransientError, AuthError, UnclearResponseError)) as caught:
        do(crm, operation, to, **params)
    assert TOKEN not in str(caught.value)
    return type(crm).operations()[operation].reading(caught.value)


def test_operations_are_ordinary_ones_with_their_grades() -> None:
    found = Crm.operations()
    assert {name: operation.grade for name, operation in found.items() if operation.is_mutation} == {
        "upsert": Grade.B, "charge": Grade.A, "replace": Grade.B, "order": Grade.D, "note": Grade.D,
        "remove": Grade.D, "send": Grade.B,
    }  # fmt: skip
    assert all(isinstance(operation, Operation) for operation in found.values())
    assert found["upsert"].parameters == ("id", "json", "query")
    assert found["upsert"].settle == timedelta(seconds=5)
    assert not found["find"].is_mutation


def test_a_mutation_is_sent_with_its_key_and_its_credentials(crm: Crm, outside: World) -> None:
    result = do(crm, "charge", json={"cents": 5}, query={"dry": "no", "none": None})
    assert result == {
        "status": 201,
        "body": {"id": 1, "key": "billing:1", "sent": {"cents": 5}},
        "headers": {"content-type": "application/json", "x-request-id": "r-1"},
    }
    (seen,) = outside.seen
    assert (seen.method, seen.target, seen.body) == ("POST", "/charges?dry=no", {"cents": 5})
    assert seen.headers["idempotency-key"] == "billing:1"
    assert seen.headers["authorization"] == f"Bearer {TOKEN}"


def test_the_same_key_twice_is_one_effect_and_the_header_has_the_name_it_is_given(crm: Crm, outside: World) -> None:
    assert do(crm, "charge")["body"] == do(crm, "charge")["body"]
    assert outside.times("billing:1") == 1
    crm.key_header = "X-Once"
    do(crm, "charge", call("k2"))
    assert outside.seen[-1].headers["x-once"] == "k2"
    assert "idempotency-key" not in outside.seen[-1].headers


def test_a_key_that_no_header_can_carry_is_quoted_and_found_by_reconcile(crm: Crm, outside: World) -> None:
    strange = call("büro 100%:1\n")
    do(crm, "charge", strange)
    assert outside.seen[-1].headers["idempotency-key"] == "b%C3%BCro%20100%25:1%0A"
    assert isinstance(ask(crm, "charge", strange), Applied)


@pytest.mark.parametrize("id_", ["a/b", "../admin", "a b?c#d", "100%", "ü", "%2e%2e"])
def test_a_path_parameter_stays_one_piece_of_the_path(crm: Crm, outside: World, id_: str) -> None:
    do(crm, "upsert", id=id_, json={"name": "x"})
    assert outside.seen[-1].target.count("/") == 2
    assert list(outside.customers) == [id_]
    assert do(crm, "find", id=id_)["body"] == {"name": "x"}


@pytest.mark.parametrize(
    ("operation", "params", "name"),
    [
        ("upsert", {}, "id"),
        ("upsert", {"id": ""}, "id"),
        ("upsert", {"id": ".."}, "id"),
        ("note", {"id": "x"}, "id"),
        ("remove", {"id": "7"}, "id"),
        ("order", {"json": {"cents": 1}}, "json.order"),
        ("order", {}, "json"),
        ("charge", {"body": 1}, "body"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_before_anything_is_sent(
    crm: Crm, outside: World, operation: str, params: dict[str, Any], name: str
) -> None:
    with pytest.raises(LogicError, match=f"{operation} was (given a wrong|not given) {re.escape(name)}"):
        do(crm, operation, **params)
    assert outside.seen == []


def test_a_missing_path_parameter_is_refused_even_without_the_check(crm: Crm, outside: World) -> None:
    with pytest.raises(LogicError, match=r"crm.upsert: PUT /customers/\{id\}: id is missing"):
        Crm.upsert.function(crm, call())
    with pytest.raises(LogicError, match="cannot be part of a path"):
        Crm.upsert.function(crm, call(), id="..")
    with pytest.raises(LogicError, match="could not be built"):
        Crm.charge.function(crm, call(), json={"x": object()})
    with pytest.raises(LogicError, match="expected an object"):
        Crm.order.function(crm, call(), json=[1])
    assert outside.seen == []


def test_a_request_whose_lookup_could_not_be_built_is_not_sent(crm: Crm, outside: World) -> None:
    with pytest.raises(LogicError, match=r"json.customer is missing"):
        do(crm, "send", json={"other": 1})
    assert outside.seen == []
    do(crm, "send", json={"customer": "c7"})
    assert outside.seen[-1].target == "/charges?source=pipeline"
    outside.customers["c7"] = {"found": True}
    assert ask(crm, "send", json={"customer": "c7"}).result["body"] == {"found": True}


def test_typed_parameters_and_a_typed_body_arrive_as_json(crm: Crm, outside: World) -> None:
    which = uuid4()
    do(crm, "remove", id=which)
    assert UUID(outside.seen[-1].target.rsplit("/", 1)[-1]) == which
    do(crm, "order", call("k"), json=Order(order="o1"))
    assert outside.seen[-1].body == {"order": "o1", "cents": 100, "reference": "k"}


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (server.says(400), ErrorReading(meaning=ErrorMeaning.REFUSED)),
        (server.says(404), ErrorReading(meaning=ErrorMeaning.REFUSED)),
        (server.says(401), ErrorReading(meaning=ErrorMeaning.DENIED)),
        (server.says(403), ErrorReading(meaning=ErrorMeaning.DENIED)),
        (server.says(429, Retry_After="7"), ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=timedelta(seconds=7))),
        (server.says(429), ErrorReading(meaning=ErrorMeaning.NOT_NOW)),
        (server.says(409), ErrorReading(meaning=ErrorMeaning.UNKNOWN)),
        (server.says(500), ErrorReading(meaning=ErrorMeaning.UNKNOWN)),
        (server.says(503, Retry_After="7"), ErrorReading(meaning=ErrorMeaning.UNKNOWN)),
        (server.fails_after, ErrorReading(meaning=ErrorMeaning.UNKNOWN)),
        (server.resets_before, ErrorReading(meaning=ErrorMeaning.UNKNOWN)),
        (server.resets_after, ErrorReading(meaning=ErrorMeaning.UNKNOWN)),
        (server.breaks_off, ErrorReading(meaning=ErrorMeaning.UNKNOWN)),
    ],
)
def test_an_error_has_the_reading_of_its_status(
    crm: Crm, outside: World, behaviour: server.Behaviour, expected: ErrorReading
) -> None:
    outside.will(behaviour)
    assert reading(crm, "charge", json={}) == expected
    assert len(outside.seen) == 1


def test_a_retry_after_with_an_instant_counts_from_the_date_of_the_response(crm: Crm, outside: World) -> None:
    date, later = "Wed, 21 Oct 2026 07:28:00 GMT", "Wed, 21 Oct 2026 07:28:30 GMT"

    def busy(exchange: server.Exchange) -> None:
        exchange.send_response_only(429)
        for name, value in {"Date": date, "Retry-After": later, "Content-Length": "0"}.items():
            exchange.send_header(name, value)
        exchange.end_headers()

    outside.will(busy)
    assert reading(crm, "charge").after == timedelta(seconds=30)


def test_an_operation_declares_the_meaning_of_its_statuses(crm: Crm, outside: World) -> None:
    outside.will(server.says(409, b'{"id": 1}'), server.says(422), server.says(503, Retry_After="3"), server.says(500))
    assert do(crm, "note", id=1)["body"] == {"id": 1}
    assert reading(crm, "note", id=1).meaning is ErrorMeaning.UNKNOWN
    assert reading(crm, "note", id=1) == ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=timedelta(seconds=3))
    assert reading(crm, "note", id=1).meaning is ErrorMeaning.REFUSED


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(crm: Crm, outside: World, status: int) -> None:
    outside.will(server.says(status, Location="/charges"))
    assert reading(crm, "charge").meaning is ErrorMeaning.UNKNOWN
    assert len(outside.seen) == 1
    assert outside.effects == []


def test_at_a_closed_port_nothing_was_sent() -> None:
    crm = Crm(f"http://127.0.0.1:{server.unused_port()}", token=SecretStr(TOKEN))
    assert reading(crm, "charge").meaning is ErrorMeaning.NOT_NOW
    nowhere = Crm("http://no-such-host.invalid", token=SecretStr(TOKEN))
    assert reading(nowhere, "charge").meaning is ErrorMeaning.NOT_NOW
    assert isinstance(ask(crm, "charge"), Retry)


@pytest.mark.parametrize(
    "behaviour", [server.is_silent, server.drips_head, server.drips_body], ids=["silent", "drips head", "drips body"]
)
def test_a_call_ends_by_its_deadline_for_every_behaviour_of_the_server(
    crm: Crm, outside: World, behaviour: server.Behaviour
) -> None:
    def unanswered(seconds: float) -> None:
        outside.mutations.clear()
        outside.will(behaviour)
        began = time.monotonic()
        assert reading(crm, "charge", call(seconds=seconds)).meaning is ErrorMeaning.UNKNOWN
        assert 0.8 * seconds < time.monotonic() - began < 40

    with_time(unanswered)
    outside.reads_will(behaviour)
    began = time.monotonic()
    assert isinstance(ask(crm, "charge", call(seconds=0.5)), Retry)
    assert time.monotonic() - began < 40


def test_nothing_is_sent_once_the_deadline_has_passed(crm: Crm, outside: World) -> None:
    do(crm, "charge")
    assert reading(crm, "charge", call("late", seconds=-1)).meaning is ErrorMeaning.NOT_NOW
    assert isinstance(ask(crm, "charge", call("late", seconds=-1)), Retry)
    assert len(outside.seen) == 1


def test_a_server_that_stops_reading_is_not_waited_for_beyond_the_deadline() -> None:
    much = {"text": "x" * 16_000_000}  # more than the buffers on the way can take

    def unread(seconds: float) -> None:
        with server.deaf(takes=1) as url:
            began = time.monotonic()
            with pytest.raises(UnclearResponseError, match="may or may not"):
                Crm.charge.function(Crm(url), call(seconds=2 * seconds), json=much)
            assert time.monotonic() - began < 60

    with_time(unread)


def test_a_server_that_accepts_no_connection_costs_no_more_than_the_deadline() -> None:
    with server.deaf(takes=0) as url:
        began = time.monotonic()
        assert reading(Crm(url), "charge", call(seconds=0.5)).meaning is ErrorMeaning.NOT_NOW
        assert time.monotonic() - began < 40


def test_a_slow_name_lookup_costs_no_more_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(90) and [])
    began = time.monotonic()
    assert reading(Crm("http://slow.example.com"), "charge", call(seconds=0.3)).meaning is ErrorMeaning.NOT_NOW
    assert time.monotonic() - began < 60
    never.set()


def test_name_lookups_that_hang_do_not_stop_the_lookups_of_other_hosts(
    outside: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, system = threading.Event(), socket.getaddrinfo

    def found(host: str | bytes, *rest: Any, **more: Any) -> Any:
        if host in ("slow.example.com", b"slow.example.com"):
            never.wait(90)
        return system("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    slow, quick = Crm("http://slow.example.com"), Crm(outside.url.replace("127.0.0.1", "quick.example.com"))
    try:
        with ThreadPoolExecutor(20) as threads:
            ended = list(threads.map(lambda _: reading(slow, "charge", call(seconds=0.3)).meaning, range(20)))
        assert ended == [ErrorMeaning.NOT_NOW] * 20
        assert do(quick, "charge")["status"] == 201
    finally:
        never.set()
        quick.close_connections()


def test_every_address_of_a_name_is_tried(outside: World, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(outside.url.rsplit(":", 1)[1])
    system = socket.getaddrinfo

    def found(host: str | bytes, *rest: Any, **more: Any) -> Any:
        if host not in ("two.example.com", b"two.example.com"):
            return system(host, *rest, **more)
        return [*system("127.0.0.9", *rest, **more), *system("127.0.0.1", *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    crm = Crm(f"http://two.example.com:{port}")
    assert do(crm, "charge")["status"] == 201
    crm.close_connections()


def test_a_kept_connection_is_used_again_under_the_next_calls_own_deadline(
    outside: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.connectors.http_exchange._IDLE", (20, 600.0))
    crm = Crm(outside.url)
    ports: list[int] = []

    def noted(exchange: server.Exchange) -> None:
        ports.append(exchange.client_address[1])
        server.answers(exchange)

    def kept(seconds: float) -> None:
        ports.clear()
        outside.mutations.clear()
        outside.will(noted, noted)
        first = call("a", seconds=seconds)
        do(crm, "charge", first)
        threading.Event().wait(first.remaining.total_seconds() + 0.05)
        do(crm, "charge", call("b"))
        assert len(ports) == 2
        assert len(set(ports)) == 1

    with_time(kept)
    crm.close_connections()
