"""The shipped connector email says the truth whatever breaks between it and a real SMTP server."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from pipeline.connectors import Grade
from pipeline.testing import Case, FaultyProxy, Subject, is_complete_lines
from tests.connectors.mail_servers import (
    HOST,
    ImapServer,
    Loop,
    Received,
    SmtpServer,
    imap_server,
    mailer,
    smtp_server,
    with_sent,
)
from tests.support.conformance_retries import patient


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def smtp(loop: Loop) -> Iterator[SmtpServer]:
    with smtp_server(loop) as server:
        yield server


@pytest.fixture
def imap() -> Iterator[ImapServer]:
    """In a loop of its own: the other server waits for it when it files a copy."""
    loop = Loop()
    with imap_server(loop) as server:
        server.make("Sent")
        yield server
    loop.close()


def ends_the_mail(data: bytes) -> bool:
    """The one request that a server takes for a mail, if its last line comes alone or with the rest."""
    return data.endswith(b"\r\n.\r\n") or data == b".\r\n"


@pytest.fixture
def subject(smtp: SmtpServer) -> Iterator[Subject]:
    with FaultyProxy(HOST, smtp.port, is_complete=is_complete_lines, has_effect=ends_the_mail) as proxy:
        yield Subject(
            connector=mailer(proxy.port),
            operation="send",
            params={"to": "ada@example.org", "subject": "Your receipt", "text": "Thank you."},
            effects=smtp.handler.times,
            proxy=proxy,
            is_http=False,
            timeout=timedelta(milliseconds=400),
            settle=timedelta(milliseconds=200),
            result_parts=["message_id"],
        )


class Filing(list[Received]):
    """What a server took that files a copy of everything by itself."""

    def __init__(self, imap: ImapServer) -> None:
        super().__init__()
        self.imap = imap

    def append(self, mail: Received) -> None:
        super().append(mail)
        self.imap.file("Sent", mail.raw)


def test_a_mail_conforms_to_its_declared_grade(subject: Subject) -> None:
    patient(subject).require(Grade.D)


def test_a_mail_with_a_filed_copy_conforms_to_its_declared_grade(subject: Subject, imap: ImapServer) -> None:
    connector = with_sent(subject.proxy.port, imap.port)
    report = patient(replace(subject, connector=connector))
    report.require(Grade.B)
    before = next(finding for finding in report.results if finding.case is Case.RECONCILE_BEFORE)
    assert before.notes == ["it never returns NotFound: an operator must resolve a mutation that did not happen"]


def test_a_mail_with_a_copy_filed_by_the_server_conforms_to_its_declared_grade(
    subject: Subject, smtp: SmtpServer, imap: ImapServer
) -> None:
    smtp.handler.received = Filing(imap)
    connector = with_sent(subject.proxy.port, imap.port, file_sent=False)
    report = patient(replace(subject, connector=connector))
    report.require(Grade.B)
    assert [finding.notes for finding in report.results if finding.case is Case.RECONCILE_BEFORE] == [[]]
