"""What the connector http reconciles, keeps and hides; and which declarations it refuses."""

import gzip
import multiprocessing
import re
import subprocess
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from pipeline.connectors.http import Http, UnclearResponseError, get, post, put
from pipeline.domain.errors import AuthError, InvalidInputError, LogicError, TransientError
from pipeline.domain.reconciliation import Applied, NotFound, Retry
from pipeline.domain.redaction import HIDDEN
from pipeline.transitions import payload_schemas
from tests.connectors import http_server as server
from tests.connectors.http_server import World, ask, call, do, with_time, world
from tests.support.certificates import contexts
from tests.support.wait import wait_for

TOKEN = "sk-very-secret-token"
BY_KEY = get("/charges", query={"key": "{key}"})
PAGE = "docs/reference/connectors-http.md"


def first(body: Any) -> Any:
    return body["items"][0] if body["items"] else None


class Shop(Http):
    name = "shop"
    charge = post("/charges", lookup=BY_KEY, found=first, keyed=True)
    rename = put("/customers/{id}", lookup=get("/customers/{id}"))
    change = put(
        "/customers/{id}",
        lookup=get("/customers/{id}"),
        found=lambda body, sent: body if body == sent["json"] else None,
    )
    create = post("/customers", fetch_by=get("/customers/{external_id}"))
    secretly = post("/charges", redact=["json"])
    find = get("/customers/{id}", timeout=timedelta(seconds=30))
    glance = get("/customers/{id}", timeout=timedelta(seconds=1))


@pytest.fixture
def outside() -> Iterator[World]:
    with world() as it:
        yield it


@pytest.fixture
def shops() -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(*args: Any, **settings: Any) -> Shop:
        made.append(Shop(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close_connections()


@pytest.fixture
def shop(outside: World, shops: Callable[..., Shop]) -> Shop:
    return shops(outside.url, token=SecretStr(TOKEN))


def test_a_lookup_returns_the_result_in_the_shape_of_the_senders_result(shop: Shop, outside: World) -> None:
    outside.will(server.resets_after)
    with pytest.raises(UnclearResponseError):
        do(shop, "charge", json={"cents": 5})
    found = ask(shop, "charge", json={"cents": 5})
    assert found == Applied(
        {
            "status": 200,
            "body": {"id": 1, "key": "billing:1", "sent": {"cents": 5}},
            "headers": {"content-type": "application/json", "x-request-id": "r-1"},
        }
    )
    assert do(shop, "charge", json={"cents": 5})["body"] == found.result["body"]
    assert outside.times("billing:1") == 1


def test_a_missing_effect_is_not_found(shop: Shop) -> None:
    assert isinstance(ask(shop, "charge"), NotFound)
    assert ask(shop, "rename", id="c1") == NotFound("GET /customers/{id} answered 404")


def test_a_result_is_fetched_by_the_outside_systems_id(shop: Shop, outside: World) -> None:
    outside.customers["c1"] = {"name": "Ada"}
    create = Shop.operations()["create"]
    assert (create.can_fetch, Shop.operations()["charge"].can_fetch) == (True, False)
    assert create.fetch_function is not None
    found = create.fetch_function(shop, call(), external_id="c1")
    assert (found["status"], found["body"]) == (200, {"name": "Ada"})
    assert create.fetch_function(shop, call(), external_id="c2") == NotFound(
        "GET /customers/{external_id} answered 404"
    )
    assert payload_schemas.result_schema(create.result_type)["required"] == ["status", "body", "headers"]  # type: ignore[index]
    outside.reads_will(server.resets_after)
    with pytest.raises(TransientError):
        create.fetch_function(shop, call(), external_id="c1")


@pytest.mark.parametrize(
    ("fetch_by", "problem"),
    [
        (post("/charges"), "has a fetch_by that is no read"),
        (get("/charges/{id}"), "expected {external_id} in it, and no other parameter"),
        (get("/charges"), "expected {external_id} in it, and no other parameter"),
    ],
)
def test_a_read_that_does_not_fetch_by_the_external_id_alone_is_refused(fetch_by: Any, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(problem)):
        post("/charges", fetch_by=fetch_by)


def test_a_lookup_may_compare_the_found_object_with_the_request(shop: Shop, outside: World) -> None:
    outside.customers["c1"] = {"name": "old"}
    assert isinstance(ask(shop, "change", id="c1", json={"name": "new"}), NotFound)
    assert isinstance(ask(shop, "change", id="c1", json={"name": "old"}), Applied)


@pytest.mark.parametrize(
    "found",
    [
        lambda body: body["items"],
        lambda body: any(item["id"] for item in body["items"]),
        lambda body: {item["id"]: item for item in body["items"]},
        lambda body: len(body["items"]),
        lambda body: filter(None, body["items"]),
        lambda body: (item for item in body["items"]),
    ],
)
def test_a_found_that_returns_something_empty_other_than_none_means_retry(
    outside: World, found: Callable[[Any], Any]
) -> None:
    class Searching(Http):
        name = "searching"
        charge = post("/charges", lookup=BY_KEY, found=found)

    it = Searching(outside.url)
    unclear = ask(it, "charge")
    it.close_connections()
    assert isinstance(unclear, Retry)
    assert "expected what was found, or None" in unclear.reason


def test_a_slow_commit_is_not_found_at_first_and_found_later(shop: Shop, outside: World) -> None:
    released = threading.Event()

    def slow(seconds: float) -> None:
        outside.mutations.clear()
        outside.will(server.after(released))
        with pytest.raises(UnclearResponseError):
            do(shop, "charge", call(seconds=seconds))

    with_time(slow)
    assert isinstance(ask(shop, "charge"), NotFound)
    released.set()
    wait_for(lambda: isinstance(ask(shop, "charge"), Applied))


@pytest.mark.parametrize(
    ("operation", "behaviour"),
    [
        ("charge", server.says(500)),
        ("charge", server.says(401)),
        ("charge", server.says(410)),
        ("charge", server.says(302, Location="/other")),
        ("charge", server.resets_before),
        ("charge", server.breaks_off),
        ("charge", server.says(200, b'{"items": "surprise"', Content_Type="application/json")),
        ("charge", server.says(200, b"{}")),
        ("charge", server.says(200, b'{"items": [' + b"1," * 50_000 + b"1]}")),
        ("rename", server.says(200, b"[]")),
    ],
)
def test_an_unclear_response_to_a_lookup_means_retry(
    shop: Shop, outside: World, operation: str, behaviour: server.Behaviour
) -> None:
    outside.reads_will(behaviour)
    params: dict[str, Any] = {"id": "c1"} if operation == "rename" else {}
    verdict = ask(shop, operation, **params)
    assert isinstance(verdict, Retry)
    assert verdict.reason
    assert TOKEN not in verdict.reason


def test_a_rate_limited_lookup_has_the_pause_of_retry_after(shop: Shop, outside: World) -> None:
    outside.reads_will(server.says(429, Retry_After="9"))
    assert ask(shop, "charge").after == timedelta(seconds=9)


def test_a_read_returns_a_404_as_a_result(shop: Shop, outside: World) -> None:
    assert do(shop, "find", id="c1")["status"] == 404
    outside.customers["c1"] = {"name": "x"}
    assert do(shop, "find", id="c1")["body"] == {"name": "x"}


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (server.says(500), TransientError),
        (server.says(429), TransientError),
        (server.resets_before, TransientError),
        (server.says(403), AuthError),
        (server.says(400), LogicError),
    ],
)
def test_a_read_that_fails_leaves_nothing_in_doubt(
    shop: Shop, outside: World, behaviour: server.Behaviour, kind: type[Exception]
) -> None:
    outside.reads_will(behaviour)
    with pytest.raises(kind):
        do(shop, "find", id="c1")


def test_a_read_without_a_response_leaves_nothing_in_doubt(shop: Shop, outside: World) -> None:
    outside.reads_will(server.is_silent)
    with pytest.raises(TransientError):
        do(shop, "glance", id="c1")


@pytest.mark.parametrize(
    ("body", "kind", "kept"),
    [
        (b'{"a": [1, null]}', "application/json", {"a": [1, None]}),
        (b'{"a": 1}', "application/problem+json", {"a": 1}),
        (b"done", "text/plain", "done"),
        (b'{"a": ', "application/json", '{"a": '),
        (b'{"a": NaN}', "application/json", '{"a": NaN}'),
        (b"[" * 60_000, "application/json", "[" * 60_000),
        (b"a\0b\xff", "text/plain", "a�b�"),
        (b"x", "text/plain; charset=no-such-thing", "x"),
        (b"", "application/json", None),
    ],
)
def test_the_body_is_kept_as_json_or_as_text(shop: Shop, outside: World, body: bytes, kind: str, kept: Any) -> None:
    outside.will(server.says(200, body, Content_Type=kind))
    assert do(shop, "charge")["body"] == kept


def test_of_a_huge_body_only_the_beginning_is_kept(shop: Shop, outside: World) -> None:
    outside.will(server.says(200, b'"' + b"x" * 5_000_000 + b'"'), server.floods)
    for key in ("large", "endless"):
        result = do(shop, "charge", call(key))
        assert result["truncated"] is True
        assert len(result["body"]) == shop.max_body


def test_an_untrusted_certificate_is_denied(shops: Callable[..., Shop]) -> None:
    serving, trusting = contexts()
    with world(serving) as outside:
        with pytest.raises(AuthError, match="Nothing was sent"):
            do(shops(outside.url), "charge")
        assert outside.seen == []
        trusted = shops(outside.url, ssl_context=trusting)
        assert do(trusted, "charge")["status"] == 201

        def unanswered(seconds: float) -> None:
            outside.mutations.clear()
            outside.will(server.drips_head)
            with pytest.raises(UnclearResponseError):
                do(trusted, "charge", call("k2", seconds=seconds))

        with_time(unanswered)


def test_a_hanging_handshake_costs_no_more_than_the_deadline(shops: Callable[..., Shop]) -> None:
    with server.deaf(takes=1) as url, pytest.raises(TransientError, match="Nothing was sent"):
        do(shops(url.replace("http:", "https:")), "charge", call(seconds=0.4))


def test_credentials_go_out_and_are_never_shown(outside: World, shops: Callable[..., Shop]) -> None:
    basic = shops(outside.url, auth=("me", SecretStr("pass word")), headers={"X-Api-Key": SecretStr("k-123456")})
    echo = b'{"you sent": "bWU6cGFzcyB3b3Jk, pass word, k-123456"}'
    outside.will(server.says(400, echo))
    with pytest.raises(LogicError) as caught:
        do(basic, "charge", json={"note": "n-1"})
    assert outside.seen[-1].headers["authorization"] == "Basic bWU6cGFzcyB3b3Jk"
    assert outside.seen[-1].headers["x-api-key"] == "k-123456"
    assert str(caught.value).count(HIDDEN) == 3
    for secret in ("bWU6cGFzcyB3b3Jk", "pass word", "k-123456"):
        assert secret not in f"{caught.value!r} {basic!r} {vars(basic)!r}"
    token = shops(outside.url, token=SecretStr(TOKEN))
    outside.will(server.says(403, f'{{"token": "{TOKEN}"}}'.encode()))
    with pytest.raises(AuthError) as denied:
        do(token, "charge")
    assert TOKEN not in f"{denied.value!r} {token!r} {vars(token)!r}"


def test_an_error_does_not_repeat_redacted_values_of_a_response(shop: Shop, outside: World) -> None:
    outside.will(server.says(400, b'{"bad": "4111-1111"}'), server.says(400, b'{"bad": "cents"}'))
    with pytest.raises(LogicError) as hidden:
        do(shop, "secretly", json={"card": "4111-1111"})
    assert "4111" not in str(hidden.value)
    with pytest.raises(LogicError, match=r"POST /charges answered 400.*cents"):
        do(shop, "charge")


def test_an_auth_of_httpx_works_and_cookies_are_not_kept(outside: World, shops: Callable[..., Shop]) -> None:
    shop = shops(outside.url, auth=httpx.BasicAuth("a", "b"))
    outside.will(server.says(200, Set_Cookie="session=1; Path=/"))
    do(shop, "charge", call("k1"))
    do(shop, "charge", call("k2"))
    assert outside.seen[-1].headers["authorization"] == "Basic YTpi"
    assert "cookie" not in outside.seen[-1].headers


class Blocking(httpx.Auth):
    """Fetches a token by code that blocks, as most libraries for OAuth do."""

    def __init__(self) -> None:
        self.began, self.over = threading.Event(), threading.Event()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        self.began.set()
        self.over.wait(60)
        request.headers["authorization"] = "Bearer fetched"
        yield request


def test_a_blocking_auth_delays_no_other_call_and_its_time_counts(outside: World, shops: Callable[..., Shop]) -> None:
    auth = Blocking()
    blocked, other = shops(outside.url, auth=auth), shops(outside.url)
    late = call("late", seconds=0.3)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(do, blocked, "charge", late)
        assert auth.began.wait(60)
        assert do(other, "charge", call("other"))["status"] == 201
        threading.Event().wait(late.remaining.total_seconds() + 0.05)
        auth.over.set()
        with pytest.raises(TransientError, match="Nothing was sent"):
            waiting.result(60)
    assert outside.times("late") == 0
    do(blocked, "charge", call("in time"))
    assert outside.seen[-1].headers["authorization"] == "Bearer fetched"


def test_a_request_that_http_does_not_allow_is_refused_and_nothing_is_sent(
    outside: World, shops: Callable[..., Shop]
) -> None:
    with pytest.raises(LogicError):
        do(shops(outside.url, headers={"X Team": "a"}), "charge")
    assert outside.seen == []


def test_a_compressed_response_is_read_although_not_requested(shop: Shop, outside: World) -> None:
    plain = b'{"text": "' + b"x" * 1000 + b'"}'
    outside.will(server.says(200, gzip.compress(plain), Content_Encoding="gzip"))
    assert do(shop, "charge")["body"] == {"text": "x" * 1000}
    outside.will(server.says(200, b"not gzip at all", Content_Encoding="gzip"))
    with pytest.raises(UnclearResponseError):
        do(shop, "charge", call("k2"))


def test_a_response_that_is_packed_again_and_again_is_not_unpacked(shop: Shop, outside: World) -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(256)) + packer.flush()
    outside.will(server.says(200, bomb, Content_Encoding="gzip"))
    assert len(do(shop, "charge")["body"]) == shop.max_body
    for number, encoding in enumerate(["gzip, gzip", "br", "zstd", "compress"]):
        tracemalloc.start()
        outside.will(server.says(200, gzip.compress(bomb), Content_Encoding=encoding))
        assert do(shop, "charge", call(f"packed {number}"))["status"] == 200
        assert tracemalloc.get_traced_memory()[1] < 2**24
        tracemalloc.stop()


@pytest.mark.parametrize(
    "charset", ["idna", "undefined", "punycode", "zlib_codec", "utf-7", "unicode_escape", "a\x01b"]
)
def test_the_charset_of_a_response_changes_its_text_and_never_the_outcome(
    shop: Shop, outside: World, charset: str
) -> None:
    outside.will(server.says(200, b"\xff+2AA-\\udc00", Content_Type=f"text/plain; charset={charset}"))
    result = do(shop, "charge")
    assert result["status"] == 200
    result["body"].encode()  # no half of a surrogate pair


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("api.example.com", "expected one like"),
        ("//api.example.com", "expected one like"),
        ("ftp://api.example.com", "expected one like"),
        ("https://", "expected one like"),
        ("", "expected one like"),
        ("https://host:99999999", "cannot be read"),
        ("https://host/?a=1", "with a query"),
        ("https://me:hunter2@host", "credentials in its base URL"),
    ],
)
def test_a_base_url_that_cannot_be_used_is_refused(url: str, expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected) as caught:
        Shop(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"token": SecretStr("abcdef\n")},
        {"token": SecretStr("schlüssel")},
        {"headers": {"X-Team": "a\r\nX-Evil: 1"}},
        {"headers": {"Authorization": "Bearer abcdef"}},
    ],
)
def test_credentials_that_cannot_be_sent_or_would_be_shown_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Shop("https://host", **settings)
    assert "abcdef" not in str(caught.value)


@pytest.mark.parametrize(
    ("declare", "expected"),
    [
        (lambda: get("things"), "cannot be used"),
        (lambda: get("/things?x=1"), "cannot be used"),
        (lambda: get("/things/{id"), "other half"),
        (lambda: get("/things/{}"), "expected a name"),
        (lambda: get("/things/{id:float}"), "expected a name"),
        (lambda: get("/things/{json}"), "expected a name"),
        (lambda: post("/things", lookup=get("/things/{id}")), "needs {id}"),
        (lambda: post("/things", lookup=BY_KEY), "expected found="),
        (lambda: post("/things", found=first), "without lookup="),
        (lambda: post("/things", lookup=post("/things")), "no read"),
        (lambda: post("/things", statuses={409: "done"}), "expected a status"),
        (lambda: post("/things", statuses={42: "applied"}), "expected a status"),
    ],
)
def test_an_invalid_declaration_is_refused_at_its_line(declare: Callable[[], Any], expected: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(expected)):
        declare()


def test_many_threads_share_a_connector(shop: Shop, outside: World) -> None:
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda n: do(shop, "charge", call(f"k{n}"))["body"]["key"], range(64)))
    assert results == [f"k{n}" for n in range(64)]
    assert sorted(key for key, _ in outside.effects) == sorted(results)


def test_a_forked_process_makes_connections_of_its_own(
    outside: World, shops: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.connectors.http_exchange._IDLE", (20, 600.0))
    shop = shops(outside.url)
    ports: list[int] = []

    def noted(exchange: server.Exchange) -> None:
        ports.append(exchange.client_address[1])
        server.answers(exchange)

    outside.will(noted, noted, noted)
    do(shop, "charge", call("parent"))
    child = multiprocessing.get_context("fork").Process(target=do, args=(shop, "charge", call("child", 60)))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    do(shop, "charge", call("parent again"))
    assert [key for key, _ in outside.effects] == ["parent", "child", "parent%20again"]
    assert ports[0] == ports[2] != ports[1]


def test_without_httpx_the_import_says_what_to_install(project: Path) -> None:
    code = "import sys; sys.modules['httpx'] = None; import pipeline.connectors.http"
    ended = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "pip install 'celery-durable-effects[http]'" in ended.stderr.splitlines()[-1]


def test_the_example_of_the_page_works(project: Path, outside: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_URL", outside.url)
    monkeypatch.setenv("SHOP_TOKEN", TOKEN)
    (code,) = re.findall(r"```python\n(.*?)```", (project / PAGE).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, PAGE, "exec"), names)
    shop = names["shop"]
    outside.will(server.resets_after)
    with pytest.raises(UnclearResponseError):
        do(shop, "charge", json={"order": "o1", "cents": 5})
    assert ask(shop, "charge", json={"order": "o1", "cents": 5}).result["body"]["key"] == "billing:1"
    do(shop, "update", call("k2"), id="c1", json={"name": "x"})
    assert do(shop, "customer", id="c1")["body"] == {"name": "x"}
    assert {name: each.grade for name, each in type(shop).operations().items() if each.is_mutation} == {
        "charge": "A",
        "update": "B",
    }
    shop.close_connections()
