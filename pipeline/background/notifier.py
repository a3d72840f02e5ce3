"""Telling people what waits for them: code to mend, an outcome nobody knows, a workflow held back.

Notices are read from the tables and sent outside any transaction, at least once: a crash between
sending and remembering sends again. Where they go is pluggable; a signed webhook and the log ship.
"""

import hashlib
import hmac
import json
import logging
from dataclasses import asdict, dataclass
from typing import Protocol
from urllib.request import Request, urlopen

log = logging.getLogger(__name__)

SIGNATURE_HEADER = "X-Pipeline-Signature"
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something a person should know. Ids and reasons; payloads never, but a reason may be the words of an error."""

    kind: str  #: maintenance, blocked, indeterminate, late_effect, breaker, approval or quarantined
    workflow: str
    subject: str
    reason: str
    since: str


class Notifier(Protocol):
    """Somewhere a notice can go. Raising means it was not delivered and will be tried again."""

    def notify(self, notice: Notice) -> None: ...


class LogNotifier:
    """Says notices in the log, where alerts can find them. Words of an error may quote a payload, so they stay out."""

    def notify(self, notice: Notice) -> None:
        fields = {
            "notice": notice.kind,
            "workflow": notice.workflow,
            "subject": notice.subject,
            "since": notice.since,
        }
        words = "notice.%(notice)s: workflow %(workflow)s: %(subject)s (since %(since)s); `pipeline attention` says why"
        log.warning(words, fields, extra=fields)


class WebhookNotifier:
    """Posts notices as JSON. The receiver checks the signature with the secret both sides know."""

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
    """What the receiver computes and compares in constant time."""
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
