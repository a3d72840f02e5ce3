"""Talk to mail servers: SMTP to send, IMAP for the folder of sent mail, over sockets that end by a deadline.

A timeout per operation does not bound a session: a server may send one byte now and then without end. Here every
operation gets only the time that is left. When none is left, nothing is written any more.

An SMTP server delivers nothing before it has received the single dot that ends a mail. So an error before the dot means
that nothing happened. After the dot only the server's reply says what happened. Without a reply the outcome is
unknown. The dot is therefore sent by itself, after all the rest.
"""

import base64
import contextlib
import imaplib
import ipaddress
import re
import smtplib
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import SecretStr

from pipeline.config import is_loopback
from pipeline.connectors.sdk import Call
from pipeline.domain.errors import AuthError, HandlerError, InvalidInputError, LogicError, TransientError
from pipeline.text import single_line


class Tls(StrEnum):
    """How a connection is protected."""

    STARTTLS = "starttls"  #: starts without TLS, and encrypts before login and mail
    IMPLICIT = "implicit"  #: encrypted from the first byte
    NONE = "none"  #: no TLS; a password is sent only to this machine


TlsMode = Tls | Literal["starttls", "implicit", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user name and its password."""

    username: str
    password: SecretStr


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of a server, and its TLS mode."""

    host: str
    port: int
    tls: Tls
    ca_file: str | None = None  #: certificates to trust instead of the system's

    @classmethod
    def create(cls, host: str, port: int | None, tls: str, ca_file: str | None, *, ports: Mapping[Tls, int]) -> Self:
        """Check the settings of a server. Without a port, the usual one is used."""
        if tls not in list(Tls):
            raise InvalidInputError(f"tls={tls!r} is not known; expected {', '.join(map(repr, map(str, Tls)))}.")
        if not re.fullmatch(r"[^\s/@]{1,253}", host):
            raise InvalidInputError(f"{host!r} is not the name of a host; expected one such as mail.example.com.")
        return cls(host=host, port=port or ports[Tls(tls)], tls=Tls(tls), ca_file=ca_file)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def checked_login(server: ServerAddress, username: str | None, password: SecretStr | None) -> Login | None:
    """Check a login: it is complete, printable ASCII, and not sent without TLS."""
    if username is None and password is None:
        return None
    if username is None or password is None:
        raise InvalidInputError(
            f"The login for {server} has only one half; expected user name and password, or neither."
        )
    for what, value in (("user name", username), ("password", password.get_secret_value())):
        if not value or not value.isascii() or not value.isprintable():
            raise InvalidInputError(f"The {what} for {server} is empty or not plain ASCII; expected printable ASCII.")
    if server.tls is Tls.NONE and not is_loopback(server.host):
        raise InvalidInputError(
            f"The password for {server} would be sent in the clear; expected tls='starttls' or tls='implicit'."
        )
    return Login(username=username, password=password)


#: Bytes that a server may send in one session. Its answers are far shorter, and all of them are kept in memory.
MAX_RECEIVED = 2**20


class BoundedSocket(socket.socket):
    """A socket whose operations all end by one deadline on the monotonic clock, and that receives a bounded amount."""

    ends_at: float = 0.0
    received: int = 0  #: bytes so far

    def seconds_left(self) -> float:
        """Seconds that are left. Raises if there are none."""
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this call is over")
        return left

    def count_received(self, size: int) -> None:
        """Add up what the server has sent. Raises if that is too much."""
        self.received += size
        if self.received > MAX_RECEIVED:
            raise ConnectionAbortedError(f"the server sent more than {MAX_RECEIVED} bytes")

    def recv(self, *args: Any) -> bytes:
        self.settimeout(self.seconds_left())
        found = super().recv(*args)
        self.count_received(len(found))
        return found

    def recv_into(self, *args: Any) -> int:
        self.settimeout(self.seconds_left())
        size = super().recv_into(*args)
        self.count_received(size)
        return size

    def send(self, *args: Any) -> int:
        self.settimeout(self.seconds_left())
        return super().send(*args)

    def sendall(self, *args: Any) -> None:
        self.settimeout(self.seconds_left())
        super().sendall(*args)


class _BoundedTlsSocket(BoundedSocket, ssl.SSLSocket):
    """The same over TLS."""

    def do_handshake(self, block: bool = False) -> None:
        self.settimeout(self.seconds_left())
        super().do_handshake(block)


def tls_context(server: ServerAddress, ends_at: float) -> ssl.SSLContext:
    """Return the TLS context for a server. It checks certificates, and its sockets keep the deadline."""
    made = ssl.create_default_context(cafile=server.ca_file)
    made.sslsocket_class = type("BoundedTlsSocket", (_BoundedTlsSocket,), {"ends_at": ends_at})
    return made


def open_socket(server: ServerAddress, ends_at: float) -> socket.socket:
    """Connect to the first address that answers, with TLS if that is implicit."""
    refused: OSError = OSError(f"{server.host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM):
        raw = BoundedSocket(family, kind, protocol)
        raw.ends_at = ends_at
        try:
            raw.settimeout(raw.seconds_left())
            raw.connect(address)
            if server.tls is not Tls.IMPLICIT:
                return raw
            return tls_context(server, ends_at).wrap_socket(raw, server_hostname=server.host)
        except OSError as error:
            raw.close()
            refused = error
    raise refused


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


_PORTS = {Tls.IMPLICIT: 993, Tls.STARTTLS: 143, Tls.NONE: 143}
_ATOM = re.compile(r"[\w@.+-]+", re.ASCII)


class SentFolderError(Exception):
    """The folder could not be read or written. This says nothing about the mail itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imap:
    """The IMAP server and the folder with copies of sent mail."""

    host: str
    username: str
    password: SecretStr
    port: int | None = None  #: by default 993, or 143 unless TLS is implicit
    tls: TlsMode = Tls.IMPLICIT
    folder: str = "Sent"
    ca_file: str | None = None

    def __post_init__(self) -> None:
        checked_login(self.server, self.username, self.password)
        if not self.folder or not self.folder.isprintable():
            raise InvalidInputError(f"The folder {self.folder!r} has no printable name; expected one such as 'Sent'.")

    @property
    def server(self) -> ServerAddress:
        """The server."""
        return ServerAddress.create(self.host, self.port, self.tls, self.ca_file, ports=_PORTS)

    def file(self, raw: bytes, ends_at: float) -> None:
        """File a copy in the folder."""
        with _session(self, ends_at) as client:
            _require_ok(
                client.append(_encode_folder(self.folder), r"(\Seen)", "", raw), f"cannot file into {self.folder!r}"
            )

    def has_message(self, part_of_id: str, ends_at: float) -> bool:
        """Return whether the folder has a mail whose Message-ID contains this."""
        with _session(self, ends_at) as client:
            _require_ok(client.select(_encode_folder(self.folder), readonly=True), f"cannot open {self.folder!r}")
            found = _require_ok(client.uid("SEARCH", "HEADER", "Message-ID", f'"{part_of_id}"'), "cannot search")
            numbers = [number for each in found if isinstance(each, bytes) for number in each.split()]
            if not any(isinstance(each, bytes) for each in found) or not all(map(bytes.isdigit, numbers)):
                raise SentFolderError("the server searched and did not say what it found")
            return bool(numbers)


class _ImapClient(imaplib.IMAP4):
    """An IMAP session that ends by the deadline."""

    def __init__(self, place: ServerAddress, ends_at: float) -> None:
        self.server, self.ends_at = place, ends_at
        super().__init__(place.host, place.port)

    def _create_socket(self, _: float | None) -> Any:
        return open_socket(self.server, self.ends_at)

    def read(self, size: int) -> bytes:
        """Read a literal. Its size is the server's word, and memory for all of it would be taken at once."""
        if size > MAX_RECEIVED:
            raise self.abort(f"the server announced {size} bytes")
        return super().read(size)

    def shutdown(self) -> None:
        """Close the connection without waiting for the other side."""
        with contextlib.suppress(OSError):
            super().shutdown()


@contextlib.contextmanager
def _session(imap: Imap, ends_at: float) -> Iterator[_ImapClient]:
    """Open a session and log in. All errors become SentFolderError, without secrets."""
    try:
        client = _ImapClient(imap.server, ends_at)
        try:
            if imap.server.tls is Tls.STARTTLS:
                client.starttls(ssl_context=tls_context(imap.server, ends_at))
            _log_in(client, imap)
            yield client
        finally:
            client.shutdown()
    except SentFolderError as error:
        raise SentFolderError(f"{imap.server} {error}") from None
    except imaplib.IMAP4.error as error:
        raise SentFolderError(f"{imap.server} refused: {single_line(error.args[0] if error.args else '')}") from None
    except (OSError, ValueError) as error:
        raise SentFolderError(f"{imap.server} could not be used ({type(error).__name__})") from None


def _log_in(client: _ImapClient, imap: Imap) -> None:
    """Log in. The server's reply is not repeated in errors, since it may contain the password."""
    name = imap.username if _ATOM.fullmatch(imap.username) else _quote(imap.username)
    try:
        client.login(name, imap.password.get_secret_value())
    except imaplib.IMAP4.abort:
        raise
    except imaplib.IMAP4.error:
        raise SentFolderError("does not accept the login") from None


def _require_ok(answer: tuple[str, list[Any]], otherwise: str) -> list[Any]:
    kind, data = answer
    if kind != "OK":
        raise SentFolderError(f"{otherwise}: {single_line(data[0] if data else '')}")
    return data


def _quote(text: str) -> str:
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _encode_folder(name: str) -> str:
    """Return the name of a folder in IMAP's encoding: parts beyond ASCII in modified base64."""

    def run(found: re.Match[str]) -> str:
        packed = base64.b64encode(found[0].encode("utf-16-be")).rstrip(b"=").decode().replace("/", ",")
        return f"&{packed}-"

    return _quote(re.sub(r"[^\x20-\x7e]+", run, name.replace("&", "&-")))
