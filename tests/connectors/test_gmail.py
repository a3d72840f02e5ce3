"""Mail through the Gmail API, against a stand-in that says what of the API it imitates."""

import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from pipeline.connectors import Call, Grade
from pipeline.connectors.gmail import Gmail
from pipeline.consumer_engine.bounded import call_and_await
from pipeline.domain.errors import AuthError, InvalidInputError, LogicError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Retry
from tests.connectors import mail_servers as servers
from tests.connectors.fake_gmail import TOKEN, Fault, StandIn, stand_in
from tests.connectors.http_server import unused_port, with_time, world
from tests.connectors.mail_servers import KEY, MAIL
from tests.support.certificates import contexts
from tests.support.rule import rule

OPERATION = Gmail.operations()["send"]


@pytest.fixture
def api() -> Iterator[StandIn]:
    with stand_in() as running:
        yield running


def gmail(api: StandIn, token: Any = None, **settings: Any) -> Gmail:
    usual = dict[str, Any](token=token or SecretStr(TOKEN), base_url=api.url, sender="shop@example.com")
    return Gmail(**usual | settings)


def run(function: Callable[..., Any], connector: Gmail, within: float, key: str, params: dict[str, Any]) -> Any:
    """Call as the host does: parameters read back from JSON, what is returned awaited."""
    given = OPERATION.arguments(OPERATION.to_stored_params(MAIL | params))
    return call_and_await(lambda: function(connector, Call.within(key, timedelta(seconds=within)), **given), ())


def send(connector: Gmail, *, within: float = 20.0, key: str = KEY, **params: Any) -> Any:
    return run(OPERATION.function, connector, within, key, params)


def reconcile(connector: Gmail, *, within: float = 20.0, key: str = KEY) -> Any:
    assert OPERATION.reconcile_function is not None
    return run(OPERATION.reconcile_function, connector, within, key, {})


def reading(connector: Gmail, **call: Any) -> ErrorReading:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the callers check its type
        send(connector, **call)
    assert TOKEN not in f"{caught.value!r} {caught.value.__cause__!r}"
    return OPERATION.reading(caught.value)


def test_a_mail_is_sent_with_our_message_id_and_found_by_it(api: StandIn) -> None:
    connector = gmail(api)
    assert isinstance(reconcile(connector), NotFound)
    result = send(connector, cc=["Bob <bob@example.org>"], bcc="eve@example.org", html="<p>Grüße</p>", subject="Grüße")
    [kept] = api.mails
    assert result == {"id": kept.id, "threadId": kept.id, "message_id": kept.message["Message-ID"]}
    assert re.fullmatch(r"<[0-9a-f]{40}@example\.com>", kept.message["Message-ID"])
    assert kept.message["X-Idempotency-Key"] == KEY
    assert (kept.message["Bcc"], kept.message["Subject"]) == ("eve@example.org", "Grüße"), "Gmail reads whom to send to"
    assert reconcile(connector) == Applied(result)
    assert isinstance(reconcile(connector, key="another"), NotFound)


def test_the_operation_can_reconcile_and_its_settle_window_covers_the_search_lag(api: StandIn) -> None:
    assert (OPERATION.grade, OPERATION.settle) == (Grade.B, timedelta(minutes=2))
    api.indexes_at_once = False
    send(gmail(api))
    assert isinstance(reconcile(gmail(api)), NotFound), "which counts only once the two minutes are over"
    api.index()
    assert isinstance(reconcile(gmail(api)), Applied)


def test_a_subclass_may_allow_more_time_for_the_search() -> None:
    class Slow(Gmail):
        send = dataclasses.replace(Gmail.send, settle=timedelta(minutes=10))

    assert (Slow.operations()["send"].settle, Slow.operations()["send"].grade) == (timedelta(minutes=10), Grade.B)
    assert OPERATION.settle == timedelta(minutes=2)


QUOTA = {"retry-after": "17"}
DATED = {"retry-after": "Thu, 01 Jan 2026 00:01:00 GMT", "date": "Thu, 01 Jan 2026 00:00:00 GMT"}


@pytest.mark.parametrize(
    ("fault", "outcome", "after"),
    [
        (Fault(400, "invalidArgument"), ErrorMeaning.REFUSED, None),
        (Fault(404, "notFound"), ErrorMeaning.REFUSED, None),
        (Fault(413, "tooLarge"), ErrorMeaning.REFUSED, None),
        (Fault(401, "authError"), ErrorMeaning.DENIED, None),
        (Fault(403, "insufficientPermissions"), ErrorMeaning.DENIED, None),
        (Fault(403, body=b"<html>"), ErrorMeaning.DENIED, None),
        (Fault(403, "rateLimitExceeded", QUOTA), ErrorMeaning.NOT_NOW, 17),
        (Fault(403, "userRateLimitExceeded"), ErrorMeaning.NOT_NOW, None),
        (Fault(429, "userRateLimitExceeded", QUOTA), ErrorMeaning.NOT_NOW, 17),
        (Fault(429, "rateLimitExceeded", DATED), ErrorMeaning.NOT_NOW, 60),
        (Fault(500, "backendError"), ErrorMeaning.UNKNOWN, None),
        (Fault(503, "backendError", commits=True), ErrorMeaning.UNKNOWN, None),
        (Fault(302, headers={"location": "/elsewhere"}), ErrorMeaning.UNKNOWN, None),
        (Fault(200, body=b"<html>welcome to the hotel"), ErrorMeaning.UNKNOWN, None),
        (Fault(200, body=b"{}", commits=True), ErrorMeaning.UNKNOWN, None),
        (Fault(), ErrorMeaning.UNKNOWN, None),
        (Fault(commits=True), ErrorMeaning.UNKNOWN, None),
    ],
    ids=str,
)
def test_a_response_gives_the_outcome_of_the_mail_or_unknown(
    api: StandIn, fault: Fault, outcome: ErrorMeaning, after: int | None
) -> None:
    api.faults.append(fault)
    found = reading(gmail(api))
    assert found.meaning is outcome
    assert found.after == (timedelta(seconds=after) if after else None)
    assert api.times(KEY) == fault.commits
    assert len(api.requests) == 1, "nothing is sent twice and no redirect is followed"


@rule("R-19")
def test_a_mail_without_a_response_is_found_if_it_was_accepted(api: StandIn) -> None:
    for commits, verdict in ((False, NotFound), (True, Applied)):
        api.faults.append(Fault(commits=commits))
        assert reading(gmail(api)).meaning is ErrorMeaning.UNKNOWN
        assert isinstance(reconcile(gmail(api)), verdict)


@pytest.mark.parametrize("fault", [Fault(drips=True, commits=True), Fault(hangs=True)], ids=["dripping", "silent"])
def test_a_hanging_server_is_left_by_the_deadline(api: StandIn, fault: Fault) -> None:
    def unanswered(seconds: float) -> None:
        api.faults.clear()
        api.faults.extend([fault, fault])
        began = time.monotonic()
        assert reading(gmail(api), within=seconds).meaning is ErrorMeaning.UNKNOWN
        assert isinstance(reconcile(gmail(api), within=0.5), Retry)
        assert time.monotonic() - began < 40

    with_time(unanswered)


def test_a_request_that_never_reached_the_server_did_not_happen(api: StandIn) -> None:
    nowhere = gmail(api, base_url=f"http://127.0.0.1:{unused_port()}")
    assert reading(nowhere).meaning is ErrorMeaning.NOT_NOW
    assert isinstance(reconcile(nowhere), Retry)
    assert reading(gmail(api), within=0.0).meaning is ErrorMeaning.NOT_NOW
    with servers.raw_server(servers.silent) as port:  # no handshake, so nothing of the mail goes out
        assert reading(gmail(api, base_url=f"https://127.0.0.1:{port}"), within=0.5).meaning is ErrorMeaning.NOT_NOW
    assert api.requests == []


@rule("R-19")
@pytest.mark.parametrize(
    "fault",
    [
        Fault(401, "authError"),
        Fault(403, "insufficientPermissions"),
        Fault(429, "rateLimitExceeded", QUOTA),
        Fault(500, "backendError"),
        Fault(200, body=b"<html>"),
        Fault(200, body=b"[]"),
        Fault(200, body=b"{}"),
        Fault(200, body=b'{"messages": "none"}'),
        Fault(200, body=b'{"resultSizeEstimate": 3, "nextPageToken": "x"}'),
        Fault(),
    ],
    ids=str,
)
def test_only_a_complete_empty_list_is_evidence_of_absence(api: StandIn, fault: Fault) -> None:
    api.faults.append(fault)
    verdict = reconcile(gmail(api))
    assert isinstance(verdict, Retry)
    assert verdict.after == (timedelta(seconds=17) if fault.headers else None)


def test_a_token_may_be_made_anew_for_each_request(api: StandIn) -> None:
    tokens = iter(["an-old-one", TOKEN])
    connector = gmail(api, token=lambda: next(tokens))
    assert reading(connector).meaning is ErrorMeaning.DENIED
    assert send(connector)["id"]
    assert TOKEN not in f"{connector!r} {vars(connector)}"


def test_a_missing_or_unusable_token_sends_nothing_and_is_not_shown(api: StandIn) -> None:
    def broken() -> str:
        raise RuntimeError(f"refresh of {TOKEN} failed")

    def expired() -> str:
        raise AuthError("log in again")

    for token, outcome in (
        (broken, ErrorMeaning.NOT_NOW),
        (expired, ErrorMeaning.DENIED),
        (lambda: f"{TOKEN}\nX: y", ErrorMeaning.DENIED),
    ):
        assert reading(gmail(api, token=token)).meaning is outcome
        verdict = reconcile(gmail(api, token=token))
        assert isinstance(verdict, Retry)
        assert TOKEN not in verdict.reason
    assert api.requests == []


def test_messages_of_the_server_are_repeated_without_the_token(api: StandIn) -> None:
    api.faults.append(Fault(400, "badRequest", message=f"bad header Bearer {TOKEN}\nand so on" + "!" * 1000))
    with pytest.raises(LogicError, match="bad header Bearer ••• and so on") as caught:
        send(gmail(api, token=lambda: TOKEN))
    assert len(str(caught.value)) < 400


def test_bad_input_is_refused_before_it_is_stored_and_redacted_for_operators() -> None:
    wrong: list[dict[str, Any]] = [{"to": []}, {"to": "ann"}, {"subject": "a\nb"}, {"headers": {"Bcc": "eve@x.org"}}]
    for params in wrong:
        with pytest.raises(LogicError):
            OPERATION.to_stored_params(MAIL | params)
    assert OPERATION.headline(OPERATION.to_stored_params(MAIL)) == "Mail to ann@example.org: Your order"
    assert OPERATION.redact == {"bcc", "text", "html"}


def test_a_large_mail_in_any_script_arrives_whole(api: StandIn) -> None:
    text = "Grüße aus 東京\n" * 100_000
    send(gmail(api, sender="Bücher <läden@bücher.example>"), text=text, to="Ünal <ünal@example.org>", within=90.0)
    [kept] = api.mails
    assert kept.message.get_content().replace("\r\n", "\n") == text
    assert "ünal@example.org".encode() in str(kept.message["To"]).encode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("settings", "domain"),
    [
        ({"sender": None}, "gmail.com"),
        ({"sender": None, "user": "shop@example.com"}, "example.com"),
        ({"domain": "ids.example"}, "ids.example"),
    ],
)
def test_the_domain_of_the_message_id_comes_from_the_settings(
    api: StandIn, settings: dict[str, Any], domain: str
) -> None:
    connector = gmail(api, **settings)
    assert send(connector)["message_id"].endswith(f"@{domain}>")
    assert isinstance(reconcile(connector), Applied)


@pytest.mark.parametrize(
    "settings",
    [{"base_url": "gmail.googleapis.com"}, {"base_url": "http://gmail.example.com"}, {"sender": "x"}, {"domain": "-"}],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="cannot be used"):
        Gmail(**dict[str, Any](token=SecretStr("t")) | settings)


def test_the_example_of_the_reference_works(project: Path, api: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (project / "docs/reference/connectors-gmail.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.setenv("GMAIL_TOKEN", TOKEN)
    names: dict[str, Any] = {}
    exec(code.replace("sender=", f'base_url="{api.url}", sender='), names)
    assert send(names["gmail"])["id"]
    assert isinstance(reconcile(names["gmail"]), Applied)


def test_an_untrusted_certificate_is_denied_and_nothing_is_sent(api: StandIn) -> None:
    serving, _ = contexts()
    with world(serving) as other:
        assert reading(gmail(api, base_url=other.url)).meaning is ErrorMeaning.DENIED
        assert other.seen == []


def test_the_proxy_of_the_environment_is_used_unless_the_host_is_excepted(
    api: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", api.url)
    monkeypatch.delenv("no_proxy", raising=False)
    behind = f"http://localhost:{unused_port()}"
    assert send(gmail(api, base_url=behind))["id"]
    assert api.requests[0].startswith(f"POST {behind}/gmail/")
    monkeypatch.setenv("no_proxy", "localhost")
    assert reading(gmail(api, base_url=behind)).meaning is ErrorMeaning.NOT_NOW


def test_a_refusal_with_retry_after_has_its_pause(api: StandIn) -> None:
    api.faults.append(Fault(429, "rateLimitExceeded", QUOTA))
    with pytest.raises(TransientError) as caught:
        send(gmail(api))
    assert caught.value.fields["after"] == timedelta(seconds=17)


def test_without_httpx_the_module_says_what_to_install() -> None:
    code = "import sys; sys.modules['httpx'] = None; import pipeline.connectors.gmail"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "which is not installed: pip install 'celery-durable-effects[http]'" in answer.stderr
