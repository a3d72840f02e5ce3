"""Sockets that end by a deadline, however slowly the server sends.

A timeout per operation does not bound a session: a server may send one byte now and then without end. Here every
operation gets only the time that is left. When none is left, nothing is written any more.
"""

import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import SecretStr

from pipeline.domain.errors import InvalidInputError


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


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BoundedSocket(socket.socket):
    """A socket whose operations all end by one deadline on the monotonic clock."""

    ends_at: float = 0.0

    def seconds_left(self) -> float:
        """Seconds that are left. Raises if there are none."""
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this call is over")
        return left

    def recv(self, *args: Any) -> bytes:
        self.settimeout(self.seconds_left())
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self.settimeout(self.seconds_left())
        return super().recv_into(*args)

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
