"""Handing a mail to an SMTP server, and knowing exactly when it may have been taken.

Until the lone dot that ends a mail is written, the server has nothing to deliver: whatever goes wrong
before it means that nothing happened. After it only the server's answer says what happened; without one
nobody knows. The dot is therefore sent by itself, after the rest has gone out.
"""

import contextlib
import ipaddress
import re
import smtplib
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.connectors.email.sockets import BoundedSocket, Login, ServerAddress, Tls, open_socket, tls_context
from pipeline.connectors.sdk import Call
from pipeline.domain.errors import AuthError, HandlerError, LogicError, TransientError

_NO_ACCESS = frozenset({530, 534, 535, 538})
_MAX_REPLY_TEXT = 200
_ENHANCED = re.compile(r"[245]\.\d{1,3}\.\d{1,3}")

Redact = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A mail as the server takes it: from whom, to whom, and the bytes."""

    sender: str
    recipients: tuple[str, ...]
    raw: bytes
    bcc_only: frozenset[str]  #: recipients that no error may name

    @property
    def is_ascii(self) -> bool:
        return all(address.isascii() for address in (self.sender, *self.recipients))


def deliver(server: ServerAddress, login: Login | None, envelope: Envelope, call: Call, redact: Redact) -> str:
    """Hand the mail over; what the server answered. ``hide`` takes out of its words what nobody may read."""
    with _errors_before_send(server, redact):
        client = _SmtpClient(server, call.ends_at)
    with contextlib.closing(client):
        with _errors_before_send(server, redact):
            client.greet()
            client.log_in(login)
            client.send_envelope(envelope, redact)
            client.send_data(envelope.raw)
        answer = client.end_data(redact)
        client.quit_quickly()
    return answer


class _SmtpClient(smtplib.SMTP):
    """A dialogue that ends in time."""

    def __init__(self, place: ServerAddress, ends_at: float) -> None:
        self.server, self.ends_at = place, ends_at
        opened = open_socket(place, ends_at)
        super().__init__(local_hostname=_address_literal(opened.getsockname()[0]))
        self.sock = opened
        self._host = place.host  # what STARTTLS checks the certificate against

    def greet(self) -> None:
        """Hear the server's greeting, and go on encrypted where that is asked for."""
        code, words = self.getreply()
        if code != 220:
            raise smtplib.SMTPConnectError(code, words)
        self.ehlo_or_helo_if_needed()
        if self.server.tls is Tls.STARTTLS:
            self._limit_to_time_left()
            code, words = self.starttls(context=tls_context(self.server, self.ends_at))
            if code != 220:
                raise smtplib.SMTPConnectError(code, words)
            self.ehlo_or_helo_if_needed()

    def log_in(self, login: Login | None) -> None:
        """Show who we are, in one way only: some servers hang up on the first login that fails.

        Words of the server are not repeated here, for some repeat what was sent.
        """
        if login is None:
            return
        ways: dict[str, Any] = {"PLAIN": self.auth_plain, "LOGIN": self.auth_login, "CRAM-MD5": self.auth_cram_md5}
        way = next((way for way in ways if way in self.esmtp_features.get("auth", "").upper().split()), None)
        if way is None:
            raise AuthError(
                f"{self.server} offers no way to log in that is known here; nothing was sent. Check host, port and tls."
            )
        self.user, self.password = login.username, login.password.get_secret_value()
        try:
            self.auth(way, ways[way])
        except smtplib.SMTPAuthenticationError as error:
            answer = _reply_codes(error.smtp_code, error.smtp_error)
            if 400 <= error.smtp_code < 500:
                raise TransientError(
                    f"{self.server} cannot check the login now ({answer}); nothing was sent."
                ) from None
            raise AuthError(
                f"{self.server} does not accept the login ({answer}); nothing was sent. Check user name and password."
            ) from None

    def send_envelope(self, envelope: Envelope, hide: Redact) -> None:
        """Name sender and recipients. If one of them is refused the mail goes to nobody."""
        if not envelope.is_ascii and not self.has_extn("smtputf8"):
            raise LogicError(f"{self.server} takes only ASCII addresses, and one here is not; nothing was sent.")
        options = [f"size={len(envelope.raw)}"] if self.has_extn("size") else []
        code, words = self.mail(envelope.sender, options if envelope.is_ascii else [*options, "SMTPUTF8"])
        if code != 250:
            raise _refusal_error(code, hide(_one_line(words)), f"{self.server} refused the mail from {envelope.sender}")
        refused = {}
        for recipient in envelope.recipients:
            code, words = self.rcpt(recipient)
            if not 200 <= code < 300:
                is_hidden = recipient in envelope.bcc_only  # whose name may be among the words
                shown = (
                    f"somebody in bcc ({_reply_codes(code, words)})"
                    if is_hidden
                    else f"{recipient} ({code} {_one_line(words)})"
                )
                refused[hide(shown)] = code
        if refused:
            with contextlib.suppress(OSError):
                self.rset()
            raise _refusal_error(
                max(refused.values()), "", f"{self.server} refused {', '.join(refused)}, so the mail went to nobody"
            )

    def send_data(self, raw: bytes) -> None:
        """Send all of the mail but its end."""
        code, words = self.docmd("DATA")
        if code != 354:
            raise smtplib.SMTPDataError(code, words)
        self.send(re.sub(rb"(?m)^\.", b"..", raw))
        self._limit_to_time_left()

    def end_data(self, hide: Redact) -> str:
        """Send the dot that makes the server responsible; its answer. Without one the outcome is unknown."""
        try:
            self.send(b".\r\n")
            code, words = self.getreply()
        except (OSError, ValueError) as error:
            raise ConnectionError(
                f"{self.server} was sent the whole mail and did not answer ({type(error).__name__}): whether it was "
                "taken is unknown."
            ) from None
        answer = f"{code} {hide(_one_line(words))}".strip()
        if 200 <= code < 300:
            return answer
        if not 400 <= code < 600:
            raise ConnectionError(f"{self.server} answered the whole mail with {answer!r}, which says nothing of it.")
        raise _refusal_error(code, hide(_one_line(words)), f"{self.server} refused the mail")

    def quit_quickly(self) -> None:
        """Say goodbye, in little of the time that is left: the mail is gone, and its news must not be late."""
        left = self.ends_at - time.monotonic()
        if isinstance(self.sock, BoundedSocket):
            self.sock.ends_at = time.monotonic() + min(1.0, left / 4)
        with contextlib.suppress(OSError):
            self.quit()

    def _limit_to_time_left(self) -> None:
        """Let what follows wait no longer than there is time; raises when there is none."""
        if isinstance(self.sock, BoundedSocket):
            self.sock.settimeout(self.sock.seconds_left())


@contextlib.contextmanager
def _errors_before_send(place: ServerAddress, hide: Redact) -> Iterator[None]:
    """Whatever goes wrong in here, no mail was taken: it is said as an error that means so."""
    try:
        yield
    except HandlerError:
        raise
    except ssl.SSLCertVerificationError as error:
        raise AuthError(
            f"The certificate of {place} is not trusted ({error.verify_message}); nothing was sent."
        ) from None
    except smtplib.SMTPResponseException as error:
        raise _refusal_error(error.smtp_code, hide(_one_line(error.smtp_error)), f"{place} refused the mail") from None
    except smtplib.SMTPNotSupportedError:
        raise AuthError(f"{place} does not offer STARTTLS; nothing was sent. Check port and tls.") from None
    except (OSError, ValueError) as error:
        words = hide(_one_line(str(error)))
        raise TransientError(
            f"{place} could not be spoken to ({type(error).__name__}: {words}); nothing was sent."
        ) from None


def _refusal_error(code: int, words: str, what: str) -> HandlerError:
    """What an answer means that is not the one that was hoped for."""
    message = f"{what} ({f'{code} {words}'.strip()}); nothing was sent." if words else f"{what}."
    if code in _NO_ACCESS:
        return AuthError(message)
    return LogicError(message) if 500 <= code < 600 else TransientError(message)


def _reply_codes(code: int, words: bytes | str) -> str:
    """What a server answered, without its words."""
    found = _ENHANCED.match(_one_line(words))
    return f"{code} {found[0]}" if found else str(code)


def _one_line(words: bytes | str) -> str:
    """A server's words on one line, and not too many of them."""
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[:_MAX_REPLY_TEXT]


def _address_literal(address: str) -> str:
    """Our own address as we introduce ourselves. A host name would have to be looked up, and may be nobody's."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return f"[{parsed}]" if parsed.version == 4 else f"[IPv6:{parsed}]"
