"""Send a mail to an SMTP server, and know when it may have been accepted.

The server delivers nothing before it has received the single dot that ends a mail. So an error before the dot means
that nothing happened. After the dot only the server's reply says what happened. Without a reply the outcome is
unknown. The dot is therefore sent by itself, after all the rest.
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
from pipeline.domain.payloads import single_line

_NO_ACCESS = frozenset({530, 534, 535, 538})
_ENHANCED = re.compile(r"[245]\.\d{1,3}\.\d{1,3}")

Redact = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A mail as SMTP sends it: the sender, the recipients and the bytes."""

    sender: str
    recipients: tuple[str, ...]
    raw: bytes
    bcc_only: frozenset[str]  #: recipients that no error may name

    @property
    def is_ascii(self) -> bool:
        return all(address.isascii() for address in (self.sender, *self.recipients))


def deliver(server: ServerAddress, login: Login | None, envelope: Envelope, call: Call, redact: Redact) -> str:
    """Send the mail and return the server's reply. ``redact`` removes hidden values from texts."""
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
    """An SMTP session that ends by the deadline."""

    def __init__(self, place: ServerAddress, ends_at: float) -> None:
        self.server, self.ends_at = place, ends_at
        opened = open_socket(place, ends_at)
        super().__init__(local_hostname=_address_literal(opened.getsockname()[0]))
        self.sock = opened
        self._host = place.host  # STARTTLS checks the certificate against it

    def greet(self) -> None:
        """Read the server's greeting, and start TLS if that is configured."""
        code, reply = self.getreply()
        if code != 220:
            raise smtplib.SMTPConnectError(code, reply)
        self.ehlo_or_helo_if_needed()
        if self.server.tls is Tls.STARTTLS:
            code, reply = self.starttls(context=tls_context(self.server, self.ends_at))
            if code != 220:
                raise smtplib.SMTPConnectError(code, reply)
            self.ehlo_or_helo_if_needed()

    def log_in(self, login: Login | None) -> None:
        """Log in by one mechanism only: some servers disconnect after a failed login.

        The server's reply is not repeated in errors, since it may contain the password.
        """
        if login is None:
            return
        ways: dict[str, Any] = {"PLAIN": self.auth_plain, "LOGIN": self.auth_login, "CRAM-MD5": self.auth_cram_md5}
        way = next((way for way in ways if way in self.esmtp_features.get("auth", "").upper().split()), None)
        if way is None:
            raise AuthError(
                f"{self.server} offers no login mechanism that is supported; nothing was sent. Check host, "
                f"port and tls."
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

    def send_envelope(self, envelope: Envelope, redact: Redact) -> None:
        """Send the sender and the recipients. If one of them is refused, nothing is sent."""
        if not envelope.is_ascii and not self.has_extn("smtputf8"):
            raise LogicError(f"{self.server} takes only ASCII addresses, and one here is not; nothing was sent.")
        options = [f"size={len(envelope.raw)}"] if self.has_extn("size") else []
        code, reply = self.mail(envelope.sender, options if envelope.is_ascii else [*options, "SMTPUTF8"])
        if code != 250:
            raise _refusal_error(
                code, redact(single_line(reply)), f"{self.server} refused the mail from {envelope.sender}"
            )
        refused = {}
        for recipient in envelope.recipients:
            code, reply = self.rcpt(recipient)
            if not 200 <= code < 300:
                shown = f"{recipient} ({code} {single_line(reply)})"
                if recipient in envelope.bcc_only:  # the reply may name the recipient
                    shown = f"a recipient in bcc ({_reply_codes(code, reply)})"
                refused[redact(shown)] = code
        if refused:
            with contextlib.suppress(OSError):
                self.rset()
            raise _refusal_error(
                max(refused.values()), "", f"{self.server} refused {', '.join(refused)}; nothing was sent"
            )

    def send_data(self, raw: bytes) -> None:
        """Send the mail without the dot that ends it."""
        code, reply = self.docmd("DATA")
        if code != 354:
            raise smtplib.SMTPDataError(code, reply)
        self.send(re.sub(rb"(?m)^\.", b"..", raw))
        if self.ends_at <= time.monotonic():  # the last moment at which this means that nothing happened
            raise TimeoutError("the time for this call is over")

    def end_data(self, redact: Redact) -> str:
        """Send the dot that ends the mail, and return the reply. Without a reply the outcome is unknown."""
        try:
            self.send(b".\r\n")
            code, reply = self.getreply()
        except (OSError, ValueError) as error:
            raise ConnectionError(
                f"{self.server} was sent the whole mail and did not answer ({type(error).__name__}): whether it was "
                "taken is unknown."
            ) from None
        answer = f"{code} {redact(single_line(reply))}".strip()
        if 200 <= code < 300:
            return answer
        if not 400 <= code < 600:
            raise ConnectionError(
                f"{self.server} answered the whole mail with {answer!r}: whether it was taken is unknown."
            )
        raise _refusal_error(code, redact(single_line(reply)), f"{self.server} refused the mail")

    def quit_quickly(self) -> None:
        """Send QUIT within a short time, so that the result is not late."""
        left = self.ends_at - time.monotonic()
        if isinstance(self.sock, BoundedSocket):
            self.sock.ends_at = time.monotonic() + min(1.0, left / 4)
        with contextlib.suppress(OSError):
            self.quit()


@contextlib.contextmanager
def _errors_before_send(place: ServerAddress, redact: Redact) -> Iterator[None]:
    """Translate errors from before the dot. All of them mean that no mail was accepted."""
    try:
        yield
    except HandlerError:
        raise
    except ssl.SSLCertVerificationError as error:
        raise AuthError(
            f"The certificate of {place} is not trusted ({error.verify_message}); nothing was sent."
        ) from None
    except smtplib.SMTPResponseException as error:
        raise _refusal_error(
            error.smtp_code, redact(single_line(error.smtp_error)), f"{place} refused the mail"
        ) from None
    except smtplib.SMTPNotSupportedError:
        raise AuthError(f"{place} does not offer STARTTLS; nothing was sent. Check port and tls.") from None
    except (OSError, ValueError) as error:
        reply = redact(single_line(str(error)))
        raise TransientError(
            f"{place} could not be used ({type(error).__name__}: {reply}); nothing was sent."
        ) from None


def _refusal_error(code: int, reply: str, what: str) -> HandlerError:
    """Return the error for a negative reply."""
    message = f"{what} ({f'{code} {reply}'.strip()}); nothing was sent." if reply else f"{what}."
    if code in _NO_ACCESS:
        return AuthError(message)
    return LogicError(message) if 500 <= code < 600 else TransientError(message)


def _reply_codes(code: int, reply: bytes | str) -> str:
    """Return the codes of a reply, without its text."""
    found = _ENHANCED.match(single_line(reply))
    return f"{code} {found[0]}" if found else str(code)


def _address_literal(address: str) -> str:
    """This machine's address for EHLO. A host name would need a lookup and may not exist in DNS."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return f"[{parsed}]" if parsed.version == 4 else f"[IPv6:{parsed}]"
