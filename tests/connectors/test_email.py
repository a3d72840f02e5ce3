"""Mail over SMTP against real servers: what was sent is known, what may have been sent is called unknown."""

import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from email import message_from_bytes
from email.header import decode_header, make_header
from email.utils import getaddresses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from pipeline.connectors import Call, Grade
from pipeline.connectors.email import Email, EmailWithSent, Imap, Mailbox, MailMessage, Smtp, Tls, encode_message
from pipeline.domain.errors import InvalidInputError, LogicError
from pipeline.domain.reconciliation import Applied, ErrorMeaning, NotFound, Retry
from tests.connectors import mail_servers as servers
from tests.connectors.http_server import unused_port, with_time
from tests.connectors.mail_servers import (
    KEY,
    MAIL,
    ImapServer,
    Loop,
    Script,
    SmtpServer,
    mailer,
    outcome,
    reconcile,
    send,
)
from tests.support.certificates import certificate_file
from tests.support.wait import wait_for

pytestmark = pytest.mark.filterwarnings("ignore:Session.login_data is deprecated")  # aiosmtpd about itself

LINES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
OPERATION, WITH_SENT = Email.operations()["send"], EmailWithSent.operations()["send"]
HIDDEN_TOO = ["eve@example.org", "bob@example.org"]


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def smtp(loop: Loop) -> Iterator[SmtpServer]:
    with servers.smtp_server(loop) as server:
        yield server


@pytest.fixture
def imap(loop: Loop) -> Iterator[ImapServer]:
    with servers.imap_server(loop) as server:
        server.make("Sent")
        yield server


def test_a_mail_arrives_with_a_message_id_made_from_its_key_and_the_key_itself(smtp: SmtpServer) -> None:
    result = send(mailer(smtp.port), cc=["Bob <bob@example.org>", "ann@example.org"], bcc="eve@example.org")
    [mail] = smtp.handler.received
    assert result == {"message_id": mail.message["Message-ID"], "reply": "250 2.0.0 queued as 4711"}
    assert re.fullmatch(r"<[0-9a-f]{40}@example\.com>", mail.message["Message-ID"])
    assert mail.message["X-Idempotency-Key"] == KEY
    assert mail.recipients == ["ann@example.org", "bob@example.org", "eve@example.org"], "everybody once"
    assert mail.message["Bcc"] is None
    assert b"eve" not in mail.raw
    wait_for(lambda: smtp.handler.commands[-1] == "QUIT")
    assert (
        send(mailer(smtp.port))["message_id"] == result["message_id"] != send(mailer(smtp.port), key="b")["message_id"]
    )


def test_everything_may_be_written_in_any_script(smtp: SmtpServer) -> None:
    send(
        mailer(smtp.port, sender="Bücher & Töne <läden@bücher.example>"),
        key="aufträge:世界 1",
        to=['"Løve, Ünal" <ünal@example.org>', "ann@例え.jp"],
        subject="Grüße aus 東京 " * 20,
        text="Schöne Grüße\n.\n..\nFrom here\n" + "ü" * 2000,
        html="<p>Schöne Grüße 🌍</p>",
        reply_to="Hilfe für Sie <hilfe@example.org>",
        headers={"X-Note": "äöü", "In-Reply-To": "<1@example.org>"},
    )
    [mail] = smtp.handler.received
    message, plain = mail.message, mail.message.get_body(("plain",))
    assert message["Subject"] == "Grüße aus 東京 " * 20
    assert [each.display_name for each in message["To"].addresses] == ["Løve, Ünal", ""]
    assert mail.recipients == ["ünal@example.org", "ann@xn--r8jz45g.jp"]
    assert (message["X-Note"], message["In-Reply-To"]) == ("äöü", "<1@example.org>")
    assert message["Reply-To"].addresses[0].display_name == "Hilfe für Sie"
    assert plain is not None
    assert plain.get_content().replace("\r\n", "\n") == "Schöne Grüße\n.\n..\nFrom here\n" + "ü" * 2000 + "\n"


def test_a_line_with_a_single_dot_does_not_end_the_mail(smtp: SmtpServer) -> None:
    text = "one\n.\nRSET\nMAIL FROM:<eve@example.org>\n..two\n.three\n"
    send(mailer(smtp.port), text=text)
    [mail] = smtp.handler.received
    assert mail.message.get_content().replace("\r\n", "\n") == text
    assert smtp.handler.commands == ["MAIL", "RCPT", "DATA", "QUIT"]


def test_a_server_that_takes_only_ascii_addresses_is_not_sent_others(loop: Loop) -> None:
    with servers.smtp_server(loop, enable_SMTPUTF8=False) as server:
        assert outcome(mailer(server.port), to="ünal@example.org") is ErrorMeaning.REFUSED
        assert send(mailer(server.port), to="Ünal <unal@bücher.example>", subject="ü")
        assert server.handler.received[0].recipients == ["unal@xn--bcher-kva.example"]


@given(subject=LINES, name=LINES.map(str.strip), text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_mail_is_read_back_as_it_was_written_and_nothing_in_it_starts_a_line_of_its_own(
    subject: str, name: str, text: str
) -> None:
    box = Mailbox(local="ann", domain="example.org", name=name)
    letter, call = MailMessage(to=(box, box), subject=subject, text=text), Call(idempotency_key=KEY, ends_at=0.0)
    raw = encode_message(letter, call, sender=None, domain="example.com")
    assert not re.search(rb"[^\r]\n|\r[^\n]", raw)
    assert max(map(len, raw.split(b"\r\n"))) <= 998
    head = servers.Received("", [], raw).message
    assert head.keys()[:5] == ["To", "Subject", "Date", "Message-ID", "X-Idempotency-Key"]
    assert {key.lower() for key in head.keys()[5:]} == {"content-type", "content-transfer-encoding", "mime-version"}
    assert str(head["Subject"]) == subject
    to = getaddresses([message_from_bytes(raw)["To"]])  # the older parser: the newer one splits long names wrongly
    assert [(str(make_header(decode_header(each))), spec) for each, spec in to] == [(name, "ann@example.org")] * 2


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"to": []}, "wrong to: Value error, it is empty"),
        ({"to": ""}, "wrong to: Value error, address 1: it is not a mail address"),
        ({"to": ["ann@example.org", "bob"]}, "address 2: it is not a mail address"),
        ({"to": "a@b.c, d@e.f"}, "not a mail address"),
        ({"to": "ann@-example.org"}, "not a host name"),
        ({"to": "Ann\r\nBcc: eve@example.org <ann@example.org>"}, "control character U+000D"),
        ({"to": 7}, "expected a mail address or a list of them"),
        ({"bcc": "s3cret at home"}, "wrong bcc: Value error, address 1"),
        ({"subject": "Hello\nBcc: eve@example.org"}, "wrong subject: Value error, it contains the control"),
        ({"subject": "Hello\u2028there"}, "U+2028"),
        ({"headers": {"X-A": "b\r\nBcc: eve@example.org"}}, "X-A: it contains the control character U+000D"),
        ({"headers": {"X-A\r\nBcc": "eve@example.org"}}, "is not the name of a header"),
        ({"headers": {"bcc": "eve@example.org"}}, "bcc is written by the connector"),
        ({"headers": {"Content-Type": "text/html"}}, "is written by the connector"),
    ],
)
def test_a_mail_that_cannot_be_sent_is_refused_before_it_is_stored(params: dict[str, Any], expected: str) -> None:
    with pytest.raises(LogicError) as caught:
        OPERATION.to_stored_params(MAIL | params)
    assert expected in str(caught.value)
    assert "s3cret" not in str(caught.value), "who is hidden is not named"


def test_unchecked_parameters_are_refused_as_well(smtp: SmtpServer) -> None:
    call = Call.within(KEY, timedelta(seconds=5))
    wrong: list[dict[str, Any]] = [{"to": "bob"}, {"to": []}, {"text": "\ud800"}, {"headers": {"To": "x"}}]
    for params in (*wrong, {"subject": "a\nBcc: b@c.d"}):
        with pytest.raises(LogicError):
            OPERATION.function(mailer(smtp.port), call, **MAIL | params)
    assert smtp.handler.received == []


def test_operators_see_recipients_and_subject_and_no_more() -> None:
    params = OPERATION.to_stored_params(MAIL | {"bcc": "eve@example.org", "html": "<p>private</p>"})
    assert OPERATION.headline(params) == "Mail to ann@example.org: Your order"
    assert {name for name, value in OPERATION.redaction.value(params).items() if value == "•••"} == {
        "bcc",
        "text",
        "html",
    }


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (Script(mail="451 later"), ErrorMeaning.NOT_NOW),
        (Script(mail="550 no"), ErrorMeaning.REFUSED),
        (Script(mail="530 log in first"), ErrorMeaning.DENIED),
        (Script(recipients={"ann@example.org": "450 later"}), ErrorMeaning.NOT_NOW),
        (Script(recipients={"ann@example.org": "550 no such user"}), ErrorMeaning.REFUSED),
        (Script(recipients={"ann@example.org": "421 closing"}), ErrorMeaning.NOT_NOW),
        (Script(before_data="451 later"), ErrorMeaning.NOT_NOW),
        (Script(before_data="554 no"), ErrorMeaning.REFUSED),
        (Script(data="451 later"), ErrorMeaning.NOT_NOW),
        (Script(data="552 too big"), ErrorMeaning.REFUSED),
        (Script(data="354 go on"), ErrorMeaning.UNKNOWN),
    ],
    ids=str,
)
def test_a_reply_means_refused_or_not_now_or_unknown(smtp: SmtpServer, script: Script, expected: ErrorMeaning) -> None:
    smtp.handler.script = script
    assert outcome(mailer(smtp.port)) is expected
    assert smtp.handler.times(KEY) == 0


@pytest.mark.parametrize("takes", [True, False], ids=["taken", "not-taken"])
@pytest.mark.parametrize("after", ["cut", "hang", "drip"])
def test_without_a_reply_to_the_whole_mail_the_outcome_is_unknown(smtp: SmtpServer, after: str, takes: bool) -> None:
    smtp.handler.script = Script(after=after, takes=takes)

    def unanswered(seconds: float) -> None:
        smtp.handler.received.clear()
        assert "unknown" in servers.unanswered(mailer(smtp.port), seconds)
        assert smtp.handler.times(KEY) == takes

    with_time(unanswered)


def test_one_refused_recipient_stops_the_mail_to_all_and_is_named_unless_in_bcc(smtp: SmtpServer) -> None:
    refusals = {"bob@example.org": "450 later", "eve@example.org": "550 5.1.1 <eve@example.org> unknown"}
    smtp.handler.script = Script(recipients=refusals)
    error = servers.failure(mailer(smtp.port), cc="bob@example.org", bcc=HIDDEN_TOO)
    assert OPERATION.reading(error).meaning is ErrorMeaning.REFUSED, "one of them would be refused again"
    assert "bob@example.org (450 later)" in str(error)
    assert "a recipient in bcc (550 5.1.1)" in str(error)
    assert "eve" not in str(error)
    assert smtp.handler.received == []
    assert "RSET" in smtp.handler.commands
    assert "DATA" not in smtp.handler.commands


def test_an_unreachable_server_or_a_passed_deadline_means_not_now(smtp: SmtpServer) -> None:
    assert outcome(mailer(smtp.port), within=0.0) is ErrorMeaning.NOT_NOW
    assert smtp.handler.commands == []
    assert outcome(mailer(unused_port())) is ErrorMeaning.NOT_NOW
    nowhere = Email(smtp=Smtp(host="nowhere.invalid", port=25, tls=Tls.NONE), sender="a@example.com")
    assert outcome(nowhere) is ErrorMeaning.NOT_NOW


def test_a_server_that_ignores_quit_does_not_delay_the_result(smtp: SmtpServer) -> None:
    smtp.handler.script = Script(leaves=False)
    began = time.monotonic()
    assert send(mailer(smtp.port), within=90.0)["reply"].startswith("250")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("talk", [servers.dripping, servers.silent], ids=["dripping", "silent"])
def test_a_hanging_server_is_left_by_the_deadline_and_nothing_was_sent(talk: Any) -> None:
    with servers.raw_server(talk) as port:
        for tls in (Tls.NONE, Tls.IMPLICIT):
            began = time.monotonic()
            assert outcome(mailer(port, tls=tls), within=0.3) is ErrorMeaning.NOT_NOW
            assert time.monotonic() - began < 40


@pytest.mark.parametrize("talk", [servers.unencrypted_smtp, servers.unencrypted_imap], ids=["smtp", "imap"])
def test_a_hanging_tls_handshake_is_left_by_the_deadline(talk: Any) -> None:
    with servers.raw_server(talk) as port:
        began = time.monotonic()
        if talk is servers.unencrypted_smtp:
            assert outcome(mailer(port, tls=Tls.STARTTLS), within=0.4) is ErrorMeaning.NOT_NOW
        else:
            assert isinstance(reconcile(servers.with_sent(unused_port(), port, tls=Tls.STARTTLS), within=0.4), Retry)
        assert time.monotonic() - began < 40


def test_a_mail_that_is_larger_than_the_server_takes_is_refused_and_a_large_one_arrives(loop: Loop) -> None:
    with servers.smtp_server(loop, data_size_limit=8_000_000) as server:
        assert outcome(mailer(server.port), text="ü" * 3_000_000, within=90.0) is ErrorMeaning.REFUSED
        assert "MAIL" not in server.handler.commands, "the size is announced before anything is sent"
        send(mailer(server.port), text="x" * 5_000_000, within=90.0)
        assert len(server.handler.received[0].raw) > 5_000_000


def test_a_login_is_used_and_a_wrong_one_is_denied_without_showing_it(smtp: SmtpServer) -> None:
    assert send(mailer(smtp.port, username=servers.USER, password=SecretStr(servers.PASSWORD)))
    wrong = mailer(smtp.port, username=servers.USER, password=SecretStr("wr0ng-one"))
    error = servers.failure(wrong)
    assert OPERATION.reading(error).meaning is ErrorMeaning.DENIED
    assert "535" in str(error)
    assert "wr0ng-one" not in f"{error!r} {wrong!r} {vars(wrong)} {error.__cause__!r}"


def test_a_server_without_login_or_encryption_is_denied(loop: Loop) -> None:
    with servers.smtp_server(loop, authenticator=None, auth_exclude_mechanism=["LOGIN", "PLAIN"]) as server:
        assert (
            outcome(mailer(server.port, username=servers.USER, password=SecretStr(servers.PASSWORD)))
            is ErrorMeaning.DENIED
        )
        assert outcome(mailer(server.port, tls=Tls.STARTTLS)) is ErrorMeaning.DENIED


@pytest.mark.parametrize("tls", [Tls.STARTTLS, Tls.IMPLICIT])
def test_encrypted_connections_work_for_both_servers_if_the_certificate_is_trusted(
    loop: Loop, tmp_path: Path, tls: Tls
) -> None:
    cert = certificate_file(tmp_path)
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(cert)
    implicit = tls is Tls.IMPLICIT
    login: dict[str, Any] = {"username": servers.USER, "password": SecretStr(servers.PASSWORD)}
    with (
        servers.smtp_server(loop, tls=own, implicit=implicit) as smtp,
        servers.imap_server(loop, cert=None if implicit else cert, implicit=own if implicit else None) as imap,
    ):
        sent = Imap(host=servers.HOST, port=imap.port, tls=tls, folder="INBOX", ca_file=str(cert), **login)
        place = Smtp(host=servers.HOST, port=smtp.port, tls=tls, ca_file=str(cert))
        trusting = EmailWithSent(smtp=place, sender="shop@example.com", sent=sent, **login)
        assert send(trusting)["filed"] is True
        assert isinstance(reconcile(trusting), Applied)
        smtp.handler.script = Script(after="drip")
        with_time(lambda seconds: servers.unanswered(trusting, seconds))
        smtp.handler.script = Script()
        assert outcome(mailer(smtp.port, tls=tls)) is ErrorMeaning.DENIED, "the certificate is not trusted"
        assert smtp.handler.times(KEY) == 2


def test_only_with_a_folder_of_sent_mail_the_connector_can_reconcile() -> None:
    assert (OPERATION.can_reconcile, OPERATION.grade) == (False, Grade.D)
    assert (WITH_SENT.can_reconcile, WITH_SENT.grade) == (True, Grade.B)
    assert WITH_SENT.settle == timedelta(minutes=2)


@pytest.mark.parametrize("folder", ["Sent", 'Éléments envoyés & "Co"', "送信済み"])
def test_a_sent_mail_is_filed_by_us_and_found_again_even_from_another_domain(
    smtp: SmtpServer, imap: ImapServer, folder: str
) -> None:
    wire = {"Sent": "Sent", "送信済み": "&kAFP4W4IMH8-"}.get(folder, '&AMk-l&AOk-ments envoy&AOk-s &- \\"Co\\"')
    if folder != "Sent":
        imap.make(wire)
    connector = servers.with_sent(smtp.port, imap.port, folder=folder)
    result = send(connector)
    assert result["filed"] is True
    [copy] = imap.copies(wire)
    assert copy["Message-ID"] == result["message_id"]
    assert reconcile(connector) == Applied(result | {"reply": ""})
    connector.sender = Mailbox.parse("shop@moved.example")
    assert isinstance(reconcile(connector), Applied)


def test_a_copy_that_cannot_be_filed_does_not_turn_a_sent_mail_into_an_error(
    smtp: SmtpServer, imap: ImapServer, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in ({"folder": "Nowhere"}, {"password": SecretStr("wr0ng-one")}, {"port": unused_port()}):
        connector = servers.with_sent(smtp.port, imap.port, **sent)
        assert send(connector)["filed"] is False
        assert isinstance(reconcile(connector), Retry)
    assert smtp.handler.times(KEY) == 3
    assert "no copy could be filed" in caplog.text
    assert "wr0ng-one" not in caplog.text


@pytest.mark.parametrize("talk", [servers.dripping, servers.silent], ids=["dripping", "silent"])
def test_a_hanging_folder_leaves_time_to_report_that_the_mail_was_sent(smtp: SmtpServer, talk: Any) -> None:
    with servers.raw_server(talk) as port:
        connector = servers.with_sent(smtp.port, port)

        def news(seconds: float) -> None:
            began = time.monotonic()
            assert send(connector, within=2 * seconds)["filed"] is False
            assert time.monotonic() - began < 0.95 * 2 * seconds

        with_time(news)
        began = time.monotonic()
        assert isinstance(reconcile(connector, within=0.3), Retry)
        assert time.monotonic() - began < 40


def test_a_search_without_a_result_is_no_evidence_of_absence(smtp: SmtpServer) -> None:
    with servers.raw_server(servers.wordless) as port:
        verdict = reconcile(servers.with_sent(smtp.port, port, file_sent=False))
        assert isinstance(verdict, Retry)
        assert "did not say what it found" in verdict.reason


def test_a_missing_copy_proves_nothing_where_we_file_and_absence_where_the_server_does(
    smtp: SmtpServer, imap: ImapServer
) -> None:
    smtp.handler.script = Script(after="cut", takes=True)
    assert outcome(servers.with_sent(smtp.port, imap.port)) is ErrorMeaning.UNKNOWN
    verdict = reconcile(servers.with_sent(smtp.port, imap.port))
    assert isinstance(verdict, Retry)
    assert "proves nothing" in verdict.reason
    filing = servers.with_sent(smtp.port, imap.port, file_sent=False)
    assert isinstance(reconcile(filing), NotFound)
    imap.file("Sent", smtp.handler.received[0].raw)
    assert isinstance(reconcile(filing, key="another"), NotFound)
    assert reconcile(filing) == Applied({"message_id": smtp.handler.received[0].message["Message-ID"], "reply": ""})
    smtp.handler.script = Script()
    assert "filed" not in send(filing, key="another")
    assert len(imap.copies("Sent")) == 1, "a server that files needs no second copy"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sender": "noaddress"}, "The sender 'noaddress' cannot be used"),
        ({"smtp": {"host": "mx", "tls": "ssl"}}, "expected 'starttls', 'implicit', 'none'"),
        ({"smtp": {"host": "smtp://mx"}}, "not the name of a host"),
        ({"username": servers.USER}, "only one half"),
        ({"username": servers.USER, "password": SecretStr("pässword")}, "not plain ASCII"),
        ({"username": "a\nb", "password": SecretStr("secret")}, "user name"),
        (
            {"smtp": {"host": "mx.example.com", "tls": "none"}, "username": servers.USER, "password": SecretStr("pw")},
            "in the clear",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings: dict[str, Any], expected: str) -> None:
    usual = dict[str, Any](smtp={"host": "mx.example.com"}, sender="shop@example.com") | settings
    with pytest.raises(InvalidInputError, match=expected):
        Email(**usual | {"smtp": Smtp(**usual["smtp"])})


def test_the_example_of_the_reference_works(project: Path, smtp: SmtpServer, imap: ImapServer) -> None:
    page = (project / "docs/reference/connectors-email.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    here = f'host="{servers.HOST}", port={{}}, tls="none"'
    code = code.replace('host="smtp.example.com"', here.format(smtp.port))
    code = code.replace('host="imap.example.com"', here.format(imap.port))
    names: dict[str, Any] = {}
    exec(code.replace("os.environ", "environ"), names | {"environ": {"MAIL_PASSWORD": servers.PASSWORD}}, names)
    connector = names["email"]
    assert send(connector)["filed"] is True
    assert isinstance(reconcile(connector), Applied)


def chatty(line: bytes) -> Callable[[socket.socket], None]:
    """A server that sends one line again and again."""

    def talk(connection: socket.socket) -> None:
        while True:
            connection.sendall(line * 1000)

    return talk


def test_a_mail_server_that_never_ends_its_answer_fills_no_memory() -> None:
    with servers.raw_server(chatty(b"220-" + b"x" * 500 + b"\r\n")) as port:
        error = servers.failure(servers.mailer(port), within=60.0)
    assert "sent more than" in str(error)
    assert Email.operations()["send"].reading(error).meaning is ErrorMeaning.NOT_NOW


@pytest.mark.parametrize("size", [4_000_000_000, 10**23], ids=["large", "larger than memory"])
def test_a_folder_that_announces_a_huge_literal_leaves_the_mail_sent(smtp: SmtpServer, size: int) -> None:
    def announce(connection: socket.socket) -> None:
        connection.sendall(b"* OK hello\r\n* X {%d}\r\n" % size)
        connection.recv(1)

    with servers.raw_server(announce) as port:
        email = servers.with_sent(smtp.port, port)
        assert servers.send(email)["filed"] is False
        verdict = servers.reconcile(email)
    assert isinstance(verdict, Retry)
    assert "announced" in verdict.reason
