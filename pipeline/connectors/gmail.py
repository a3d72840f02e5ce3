"""Send mail through the Gmail API, and find it again by its Message-ID.

Each request opens its own connection. The server may close a kept connection at the moment it is used, and then it
would be unknown whether the mail was accepted.
"""

import base64
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import SecretStr

from pipeline.config import is_loopback
from pipeline.connectors import email as mail
from pipeline.connectors.error_table import read_status
from pipeline.connectors.sdk import Call, mutation
from pipeline.domain.errors import AuthError, HandlerError, InvalidInputError, TransientError
from pipeline.domain.reconciliation import Applied, ErrorReading, NotFound, Retry, Verdict
from pipeline.text import single_line

try:
    import httpx

    from pipeline.connectors.http_exchange import (
        TRANSPORT_ERRORS,
        Connections,
        Exchange,
        HttpResponse,
        UnclearResponseError,
        raise_for_reading,
        read_response,
    )
except ImportError as missing:
    raise ImportError(
        "The connector gmail needs httpx, which is not installed: pip install 'celery-durable-effects[http]'"
    ) from missing

__all__ = ["Gmail"]

_QUOTA = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
_MAX_RESPONSE_BYTES = 1_000_000  #: bytes; a response about one mail is far smaller
_KEPT = ("retry-after", "date")
_TOKEN = re.compile(r"[\x21-\x7e]+")

Token = Callable[[], str] | SecretStr


class Gmail(mail.Mailer):
    """Mail through the Gmail API. Reconciles by a search in the sent mail: grade B."""

    def __init__(
        self,
        *,
        token: Token,
        sender: str | None = None,
        user: str = "me",
        base_url: str = "https://gmail.googleapis.com",
        domain: str | None = None,
        name: str = "gmail",
    ) -> None:
        self.name, self.token, self.user = name, token, user
        parts = urlsplit(base_url)
        if not parts.hostname or (
            parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname))
        ):
            raise InvalidInputError(f"The base_url {base_url!r} cannot be used; expected https://host.")
        self._connections = Connections(trust_env=True, proxy=_environment_proxy(base_url), keep=False)
        self.url = f"{base_url.rstrip('/')}/gmail/v1/users/{quote(user, safe='')}/messages"
        try:
            self.sender = mail.Mailbox.parse(sender) if sender else None
            self.domain = mail.Mailbox.parse(f"id@{domain}").domain if domain else self._own_domain()
        except ValueError as error:
            raise InvalidInputError(
                f"The sender {sender!r} or the domain {domain!r} cannot be used: {error}."
            ) from None

    send = mutation(shows=mail.SHOWS, redact=mail.REDACT, settle=timedelta(minutes=2))(mail.send)

    def deliver(self, call: Call, message: mail.MailMessage) -> dict[str, Any]:
        """Send the mail through the API."""
        raw = mail.encode_message(message, call, sender=self.sender, domain=self.domain, include_bcc=True)
        response = self._request(call, "POST", f"{self.url}/send", json={"raw": base64.urlsafe_b64encode(raw).decode()})
        if response.status == 200 and isinstance(response.body, dict) and response.body.get("id"):
            return self._result(call, response.body)
        return raise_for_reading(_reading(response), f"Gmail answered {self._message(response)}.")

    @send.reconcile
    def find_sent(self, call: Call, **_: Any) -> Verdict:
        """Search the sent mail for the Message-ID."""
        wanted = mail.message_id(call.idempotency_key, self.domain).strip("<>")
        query = {"q": f"rfc822msgid:{wanted} in:sent", "includeSpamTrash": "true"}
        try:
            response = self._request(call, "GET", self.url, params=query)
        except (HandlerError, UnclearResponseError) as error:
            return Retry(f"Gmail could not be asked ({type(error).__name__})")
        if response.status != 200:
            return Retry(f"Gmail did not answer the search ({self._message(response)})", after=_reading(response).after)
        return self._verdict(call, response.body)

    def _verdict(self, call: Call, body: Any) -> Verdict:
        """Return the verdict of a search. Only a complete and empty list means that the mail is not there."""
        if not isinstance(body, dict):
            return Retry("Gmail did not answer with a list of messages")
        found = body.get("messages", [])
        if isinstance(found, list) and found and isinstance(found[0], dict):
            return Applied(self._result(call, found[0]))
        if found or "resultSizeEstimate" not in body or body.get("nextPageToken"):
            return Retry("Gmail did not answer with a complete list of messages")
        return NotFound("Gmail has no sent mail with this Message-ID")

    def _result(self, call: Call, message: dict[str, Any]) -> dict[str, Any]:
        known = {"id": message.get("id"), "threadId": message.get("threadId")}
        return known | {"message_id": mail.message_id(call.idempotency_key, self.domain)}

    def _request(self, call: Call, method: str, url: str, **request: Any) -> HttpResponse:
        """Send one request. Returns the response, or raises an error that says whether anything was sent."""
        headers = {"authorization": f"Bearer {self._access_token()}"}
        exchange = Exchange(self._connections, call.ends_at, _MAX_RESPONSE_BYTES)
        try:
            with httpx.Client(transport=exchange) as client:
                response = client.request(method, url, headers=headers, **request)
        except TRANSPORT_ERRORS as error:
            raise exchange.failure(error, self.scrub(f"Gmail gave no answer ({type(error).__name__})")) from None
        return read_response(response, keep=_KEPT, limit=_MAX_RESPONSE_BYTES)

    def _access_token(self) -> str:
        """Get the access token. Errors repeat neither the token nor the text of the exception."""
        try:
            token = self.token.get_secret_value() if isinstance(self.token, SecretStr) else self.token()
        except HandlerError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing was sent
            raise TransientError(
                f"The access token for Gmail could not be fetched ({type(error).__name__}); nothing was sent."
            ) from None
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise AuthError("The access token for Gmail cannot be used; nothing was sent. Expected printable ASCII.")
        self.last_token = SecretStr(token)  # so that messages are scrubbed of it
        return token

    def _message(self, response: HttpResponse) -> str:
        """Return the status and the API's message in one line."""
        return self.scrub(single_line(f"{response.status} {_error(response).get('message', '')}"))

    def _own_domain(self) -> str:
        if self.sender:
            return self.sender.domain
        return mail.Mailbox.parse(self.user).domain if "@" in self.user else "gmail.com"


def _reading(response: HttpResponse) -> ErrorReading:
    """Classify a response. A quota error may have the status 403, and means the same as 429."""
    several = _error(response).get("errors")
    errors = several if isinstance(several, list) else []
    reasons = {str(each.get("reason")) for each in errors if isinstance(each, dict)}
    if response.status == 403 and reasons & _QUOTA:
        return read_status(429, response.headers.get("retry-after"), response.headers.get("date"))
    return response.reading


def _error(response: HttpResponse) -> dict[str, Any]:
    """Return the API's description of an error; empty when there is none."""
    error = response.body.get("error") if isinstance(response.body, dict) else None
    return error if isinstance(error, dict) else {}


def _environment_proxy(base_url: str) -> str | None:
    """Return the proxy that the environment names for this URL."""
    parts = urlsplit(base_url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
