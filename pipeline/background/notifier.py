"""Notify operators of what waits for them: maintenance, indeterminate mutations, blocked workflows.

Notices are read from the tables and sent outside any transaction, at least once: a crash between sending a notice
and recording it sends it again. The receiver is pluggable; a signed webhook and the log come with the package.
"""

import hashlib
import hmac
import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import Protocol
from urllib.request import Request, urlopen

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.transitions import housekeeping

log = logging.getLogger(__name__)

SIGNATURE_HEADER = "X-Pipeline-Signature"
_TIMEOUT_SECONDS = 10.0
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
    """Posts notices as JSON, signed with a secret that the receiver knows as well."""

    def __init__(self, url: str, secret: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"a webhook needs an http or https URL, got {url.partition(':')[0]!r}")
        self.url, self.secret = url, secret

    def notify(self, notice: Notice) -> None:
        body = json.dumps(asdict(notice), sort_keys=True).encode()
        headers = {"Content-Type": "application/json", SIGNATURE_HEADER: signature(body, self.secret)}
        request = Request(self.url, data=body, headers=headers, method="POST")  # noqa: S310 - scheme checked above
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - same
            answer.read()


def signature(body: bytes, secret: str) -> str:
    """The signature of a body. The receiver computes it too and compares in constant time."""
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


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
