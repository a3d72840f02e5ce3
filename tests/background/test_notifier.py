"""Operators are notified once, through a receiver that can check the signature."""

import hmac
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pipeline.background import rescuer
from pipeline.background.notifier import LogNotifier, Notice, WebhookNotifier, signature
from pipeline.background.scheduler import Scheduler
from pipeline.background.sweeps import Sweeps
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.telemetry.logs import JsonFormatter, PrettyFormatter
from pipeline.workflows.registry import Registry
from tests.factories import LEASE, TIMEOUT, a_run, a_workflow, some_events, stopped

SECRET = "only we know"


class Receiver(BaseHTTPRequestHandler):
    """Keeps what it was sent; answers as the test sets it."""

    got: list[tuple[dict[str, Any], bool]]
    ids: list[str]
    status: int

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent = [self.headers[f"webhook-{name}"] for name in ("id", "timestamp", "signature")]
        genuine = hmac.compare_digest(sent[2], signature(sent[0], sent[1], body, SECRET))
        type(self).got.append((json.loads(body), genuine))
        type(self).ids.append(sent[0])
        self.send_response(type(self).status)
        self.send_header("Location", f"/elsewhere{self.path}")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def receiver() -> Iterator[tuple[type[Receiver], str]]:
    kind = type("One", (Receiver,), {"got": [], "ids": [], "status": 204})
    server = HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_port}/notices"
    server.shutdown()
    thread.join()
    server.server_close()


def sweeps(db: Database, notifier: Any) -> Sweeps:
    return Sweeps(
        db=db,
        registry=Registry(),
        scheduler=Scheduler(db, lambda _: None, cohort_time=LEASE),
        jitter=lambda: 0.0,
        redispatch_after=LEASE,
        dispatch_reconcile=lambda _: None,
        notifier=notifier,
    )


def test_maintenance_blocks_and_unknown_outcomes_are_announced_once_and_signed(
    db: Database, receiver: tuple[type[Receiver], str]
) -> None:
    kind, url = receiver
    a_workflow(db, "mended")
    stopped(db, a_run(db, Phase.PREPARING, workflow="mended"))
    a_workflow(db, "locked")
    stopped(db, a_run(db, Phase.PREPARING, workflow="locked"), FailureKind.AUTH)
    a_workflow(db, "unsure", concurrency=2, on_uncertain="contain")
    some_events(db, "m1", workflow="unsure")
    a_run(db, Phase.MUTATING, workflow="unsure", reconcilable=False)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover(db)
    sweep = sweeps(db, WebhookNotifier(url, SECRET))
    assert sweep.notices().counts == {"delivered": 3}
    assert sweep.notices().counts == {}
    assert {(notice["workflow"], notice["kind"]) for notice, _ in kind.got} == {
        ("mended", "maintenance"),
        ("locked", "blocked"),
        ("unsure", "indeterminate"),
    }
    assert all(genuine for _, genuine in kind.got)


@pytest.mark.parametrize("status", [500, 302, 308, 304])
def test_a_notice_that_could_not_be_delivered_is_sent_again(
    db: Database, receiver: tuple[type[Receiver], str], status: int
) -> None:
    kind, url = receiver
    kind.status = status
    a_workflow(db)
    stopped(db, a_run(db, Phase.PREPARING), FailureKind.AUTH)
    sweep = sweeps(db, WebhookNotifier(url, SECRET))
    assert sweep.notices().counts == {"undelivered": 1}
    kind.status = 204
    assert sweep.notices().counts == {"delivered": 1}
    assert len(kind.got) == 2, "no redirect was followed"
    assert kind.ids[0] == kind.ids[1], "a receiver knows a repeat by its id"


def test_a_signature_is_the_one_of_standard_webhooks() -> None:
    body = b'{"test": 2432232314}'
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signed = signature("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body, secret)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_without_a_receiver_notices_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    notice = Notice(
        headline="billing waits", kind="blocked", workflow="billing", subject="block 1", reason="auth", since="now"
    )
    LogNotifier().notify(notice)
    assert (
        "notice.blocked: billing waits: workflow billing: block 1 (since now); `pipeline attention` says why"
        in caplog.text
    )


def test_notices_in_the_log_have_ids_as_fields_and_no_error_texts(caplog: pytest.LogCaptureFixture) -> None:
    reason = "mail.send: TimeoutError: SECRET"
    notice = Notice(headline="Mail", kind="late_effect", workflow="w", subject="mutation 7", reason=reason, since="now")
    LogNotifier().notify(notice)
    (record,) = caplog.records
    line = JsonFormatter().format(record)
    told = json.loads(line)
    assert {name: told[name] for name in ("notice", "headline", "workflow", "subject", "since")} == {
        "notice": "late_effect",
        "headline": "Mail",
        "workflow": "w",
        "subject": "mutation 7",
        "since": "now",
    }
    assert "SECRET" not in line
    assert "SECRET" not in PrettyFormatter(logging.Formatter()).format(record)


def test_a_webhook_that_is_no_web_address_is_refused() -> None:
    with pytest.raises(ValueError, match="http or https"):
        WebhookNotifier("file:///etc/passwd", SECRET)
