"""Mail through the Gmail API, found again by its Message-ID.

Each request is made over a connection of its own: a connection kept from an earlier mail may be closed by the
other side at the moment it is used, and whether that mail was taken would be anybody's guess.
"""

import asyncio
import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, assert_never
from urllib.parse import quote, urlsplit

from pydantic import SecretStr

from pipeline.connectors.email import message as mail
from pipeline.connectors.email.sockets import is_loopback
from pipeline.connectors.error_table import ErrorMeaning, ErrorReading, read_status, retry_after
from pipeline.connectors.sdk import Applied, Call, NotFound, Retry, Verdict, mutation
from pipeline.domain.errors import AuthError, HandlerError, InvalidInputError, LogicError, TransientError

try:
    import httpx
except ImportError as missing:
    raise ImportError("The gmail connector needs httpx; install it with: pip install 'pipeline[http]'") from missing

_QUOTA = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
_MAX_RESPONSE_BYTES = 1_000_000  #: bytes; what the API says about one mail is far below
_TOKEN = re.compile(r"[\x21-\x7e]+")

Token = Callable[[], str] | SecretStr


@dataclass(frozen=True, slots=True, kw_only=True)
class _GmailResponse:
    """What the API said."""

    status: int
    headers: httpx.Headers
    body: Any  #: None when it was not JSON

    @property
    def error(self) -> dict[str, Any]:
        """What it says about an error, or nothing."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return error if isinstance(error, dict) else {}

    @property
    def reasons(self) -> set[str]:
        """Its words for machines."""
        several = self.error.get("errors")
        return (
            {str(each.get("reason")) for each in several if isinstance(each, dict)}
            if isinstance(several, list)
            else set()
        )

    @property
    def message(self) -> str:
        """Its words for people, on one line and not too many."""
        return " ".join(f"{self.status} {self.error.get('message', '')}".split())[:200]

    @property
    def reading(self) -> ErrorReading:
        """What it says about the outcome. Quota errors come as 403 too, and are no question of access."""
        after = retry_after(self.headers.get("retry-after"), now=self._now)
        if self.status == 403 and self.reasons & _QUOTA:
            return ErrorReading(meaning=ErrorMeaning.NOT_NOW, after=after)
        return ErrorReading(meaning=read_status(self.status).meaning, after=after)

    @property
    def _now(self) -> datetime | None:
        """The server's own clock: a date in Retry-After is by that one."""
        try:
            return parsedate_to_datetime(self.headers.get("date", "")).astimezone(UTC)
        except (ValueError, TypeError, OverflowError):
            return None


class Gmail(mail.Mailer):
    """Mail through the Gmail API. An unknown outcome is looked for among the sent mail: grade B."""

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
        self.url = f"{base_url.rstrip('/')}/gmail/v1/users/{quote(user, safe='')}/messages"
        try:
            self.sender = mail.Mailbox.parse(sender) if sender else None
            self.domain = mail.Mailbox.parse(f"id@{domain}").domain if domain else self._own_domain()
        except ValueError as error:
            raise InvalidInputError(
                f"The sender {sender!r} or the domain {domain!r} cannot be used: {error}."
            ) from None

    send = mutation(shows=mail.SHOWS, redact=mail.REDACT, settle=timedelta(minutes=2))(mail.send)

    async def deliver(self, call: Call, message: mail.MailMessage) -> dict[str, Any]:
        """Hand the letter to the API."""
        raw = mail.encode_message(message, call, sender=self.sender, domain=self.domain, include_bcc=True)
        body = {"raw": base64.urlsafe_b64encode(raw).decode()}
        sent = _SendTracker()
        try:
            answer = await self._request(call, sent, "POST", f"{self.url}/send", json=body)
        except HandlerError:
            raise
        except (httpx.HTTPError, TimeoutError, OSError) as error:
            if not sent.has_sent:
                raise TransientError(
                    f"Gmail could not be reached ({type(error).__name__}); nothing was sent."
                ) from None
            raise ConnectionError(
                f"Gmail was sent the mail and did not answer ({type(error).__name__}): whether it was taken is unknown."
            ) from None
        if answer.status != 200 or not isinstance(answer.body, dict) or not answer.body.get("id"):
            raise self._response_error(answer)
        return self._result(call, answer.body)

    @send.reconcile
    async def find_sent(self, call: Call, **_: Any) -> Verdict:
        """Look for the mail by its Message-ID among what was sent."""
        wanted = mail.message_id(call.idempotency_key, self.domain).strip("<>")
        query = {"q": f"rfc822msgid:{wanted} in:sent", "includeSpamTrash": "true"}
        try:
            answer = await self._request(call, _SendTracker(), "GET", self.url, params=query)
        except (HandlerError, httpx.HTTPError, TimeoutError, OSError) as error:
            return Retry(f"Gmail could not be asked ({type(error).__name__})")
        if answer.status != 200:
            return Retry(f"Gmail did not say ({self.scrub(answer.message)})", after=answer.reading.after)
        return self._verdict(call, answer.body)

    def _verdict(self, call: Call, body: Any) -> Verdict:
        """Absence is taken only from an answer that says clearly that there is nothing."""
        if not isinstance(body, dict):
            return Retry("Gmail answered with something that is not a list of messages")
        found = body.get("messages", [])
        if isinstance(found, list) and found and isinstance(found[0], dict):
            return Applied(self._result(call, found[0]))
        if found or "resultSizeEstimate" not in body or body.get("nextPageToken"):
            return Retry("Gmail answered with something that is not a whole list of messages")
        return NotFound("Gmail knows no sent mail with this Message-ID")

    def _result(self, call: Call, message: dict[str, Any]) -> dict[str, Any]:
        known = {"id": message.get("id"), "threadId": message.get("threadId")}
        return known | {"message_id": mail.message_id(call.idempotency_key, self.domain)}

    async def _request(self, call: Call, sent: "_SendTracker", method: str, url: str, **request: Any) -> _GmailResponse:
        """One request within the time of the call, from the look for an address to the last byte of the answer."""
        headers = {"authorization": f"Bearer {self._access_token()}"}
        left = call.remaining.total_seconds()
        if left <= 0:
            raise TransientError("The time for this call was over before anything was sent.")
        # The library closes a connection that its own limit ends, and forgets one that is cancelled in a handshake.
        limits = httpx.Timeout(left, connect=left * 0.4)
        async with asyncio.timeout(left), httpx.AsyncClient(timeout=limits, follow_redirects=False) as client:
            extensions = {"trace": sent.trace}
            async with client.stream(method, url, headers=headers, extensions=extensions, **request) as response:
                read = b""
                async for chunk in response.aiter_bytes():
                    read += chunk
                    if len(read) > _MAX_RESPONSE_BYTES:
                        break
                return _GmailResponse(status=response.status_code, headers=response.headers, body=_parse_json(read))

    def _access_token(self) -> str:
        """The access token of this moment. Nothing is repeated of one that cannot be used, nor of why it is missing."""
        try:
            token = self.token.get_secret_value() if isinstance(self.token, SecretStr) else self.token()
        except HandlerError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing was sent
            raise TransientError(
                f"The access token for Gmail could not be had ({type(error).__name__}); nothing was sent."
            ) from None
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise AuthError("The access token for Gmail is not one; nothing was sent. Expected printable ASCII.")
        self.last_token = SecretStr(token)  # so that words are scrubbed of it
        return token

    def _response_error(self, answer: _GmailResponse) -> Exception:
        """What an answer means that is not the one that was hoped for."""
        reading, words = answer.reading, self.scrub(answer.message)
        match reading.meaning:
            case ErrorMeaning.REFUSED:
                return LogicError(f"Gmail refused the mail ({words}); nothing was sent.")
            case ErrorMeaning.DENIED:
                return AuthError(f"Gmail gives no access ({words}); nothing was sent. Check the token and its scopes.")
            case ErrorMeaning.NOT_NOW:
                return TransientError(f"Gmail takes no mail now ({words}); nothing was sent.", after=reading.after)
            case ErrorMeaning.UNKNOWN:
                return ConnectionError(f"Gmail answered {words}: whether the mail was taken is unknown.")
            case _ as never:
                assert_never(never)

    def _own_domain(self) -> str:
        if self.sender:
            return self.sender.domain
        return mail.Mailbox.parse(self.user).domain if "@" in self.user else "gmail.com"


class _SendTracker:
    """Whether any byte of a request was on its way."""

    has_sent = False

    async def trace(self, event: str, _: dict[str, Any]) -> None:
        """Hear from the HTTP library what it is about to do."""
        if event.endswith("send_request_headers.started"):
            self.has_sent = True


def _parse_json(read: bytes) -> Any:
    try:
        return json.loads(read)
    except ValueError:
        return None
