"""Notify operators of what waits for them: maintenance, indeterminate mutations, blocked workflows.

Notices are read from the tables and sent outside any transaction, at least once: a crash between sending a notice
and recording it sends it again. The receiver is pluggable; a signed webhook and the log come with the package.
The webhook has the headers of Standard Webhooks, which libraries of many languages verify.
"""

import base64
import hashlib
import hmac
import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.transitions import housekeeping

log = logging.getLogger(__name__)

_SECRET_PREFIX = "whsec_"  # noqa: S105 - the beginning of every secret of Standard Webhooks
_TIMEOUT_SECONDS = 10.0
_MAX_ANSWER = 4096  #: bytes of an answer that are read
_PASS_SECONDS = 60  #: a receiver that never answers must not hold up the sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that waits for an operator. It holds no payload, but its reason may quote an error."""

    headline: str  #: what is asked about, redacted; of approvals the first
    kind: str  #: maintenance, blocked, indeterminate, late_effect, breaker, approval or quarantined
    workflow: str
    subject: str
    reason: str
    since: str

    @property
    def id(self) -> str:
        """Identify the notice: the same each time that it is sent."""
        return hashlib.sha256(f"{self.kind}\n{self.subject}\n{self.since}".encode()).hexdigest()[:32]


class Notifier(Protocol):
    """A receiver of notices. When it raises, the notice was not delivered and is sent again later."""

    def notify(self, notice: Notice) -> None: ...


class LogNotifier:
    """Writes notices to the log, for alerts. Leaves the reason out, because an error may quote a payload."""

    def notify(self, notice: Notice) -> None:
        fields = {
            "notice": notice.kind,
            "headline": notice.headline,
            "workflow": notice.workflow,
            "subject": notice.subject,
            "since": notice.since,
        }
        message = (
            "notice.%(notice)s: %(headline)s: workflow %(workflow)s: %(subject)s (since %(since)s); "
            "`pipeline attention` says why"
        )
        log.warning(message, fields, extra=fields)


class WebhookNotifier:
    """Posts notices as JSON, signed with a secret that the receiver knows as well.

    Only an answer with a status from 200 to 299 counts as delivered. A redirect is not followed: it could lead the
    notice to another system.
    """

    def __init__(self, url: str, secret: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a webhook needs an http or https URL, got {url.partition(':')[0]!r}")
        self.url, self.secret = url, secret
        self._opener = build_opener(_RefusedRedirects)

    def notify(self, notice: Notice) -> None:
        body = json.dumps(asdict(notice), sort_keys=True).encode()
        sent_at = str(int(time.time()))  # noqa: TID251 - receivers compare it with the clocks of hosts
        headers = {
            "Content-Type": "application/json",
            "webhook-id": notice.id,
            "webhook-timestamp": sent_at,
            "webhook-signature": signature(notice.id, sent_at, body, self.secret),
        }
        request = Request(self.url, data=body, headers=headers, method="POST")  # noqa: S310 - scheme checked above
        with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            answer.read(_MAX_ANSWER)


class _RefusedRedirects(HTTPRedirectHandler):
    """Follow no redirect: the answer stays an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def signature(notice_id: str, sent_at: str, body: bytes, secret: str) -> str:
    """Return the signature of a notice: the receiver computes it too, compares in constant time, and checks the age.

    A secret that begins with ``whsec_`` is base64, as Standard Webhooks writes it. Any other is taken as it is.
    """
    key = (
        base64.b64decode(secret.removeprefix(_SECRET_PREFIX)) if secret.startswith(_SECRET_PREFIX) else secret.encode()
    )
    signed = hmac.new(key, f"{notice_id}.{sent_at}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def deliver_notices(db: Database, notifier: Notifier) -> SweepReport:
    """Deliver the next page of notices. A notice that its receiver refuses is sent again by a later pass."""
    report, ends_at = SweepReport(), time.monotonic() + _PASS_SECONDS
    with db.transaction() as tx:
        page = housekeeping.next_notices(tx)
    for row in page.rows:
        notice = Notice(
            headline=row.headline,
            kind=row.kind,
            workflow=row.workflow,
            subject=row.subject,
            reason=row.reason,
            since=row.since.isoformat(),
        )
        report.add("delivered" if _deliver(db, notifier, notice) else "undelivered")
        if time.monotonic() > ends_at:
            break
    delivered, undelivered = (report.counts.get(name, 0) for name in ("delivered", "undelivered"))
    with db.transaction() as tx:
        housekeeping.save_notice_position(tx, page, delivered=delivered, undelivered=undelivered)
    return report


def _deliver(db: Database, notifier: Notifier, notice: Notice) -> bool:
    """Deliver one notice and record that. False: its receiver did not take it."""
    try:
        notifier.notify(notice)
    except Exception as error:  # noqa: BLE001 - the receiver is a server of the operators, and may raise anything
        log.warning("a notice could not be delivered: %s", error)
        return False
    with db.transaction() as tx:
        housekeeping.mark_notice_delivered(tx, notice.kind, notice.subject)
    return True
