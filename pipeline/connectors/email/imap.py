"""The folder of sent mail: file a copy, and search for one by its Message-ID."""

import base64
import contextlib
import imaplib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from pipeline.connectors.email.sockets import ServerAddress, Tls, TlsMode, checked_login, open_socket, tls_context
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.payloads import single_line

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
            if not any(isinstance(each, bytes) for each in found):
                raise SentFolderError("the server searched and did not say what it found")
            return any(each.split() for each in found if isinstance(each, bytes))


class _ImapClient(imaplib.IMAP4):
    """An IMAP session that ends by the deadline."""

    def __init__(self, place: ServerAddress, ends_at: float) -> None:
        self.server, self.ends_at = place, ends_at
        super().__init__(place.host, place.port)

    def _create_socket(self, _: float | None) -> Any:
        return open_socket(self.server, self.ends_at)

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
