"""Real mail servers in a thread: aiosmtpd for SMTP, pymap for IMAP, and a socket that misbehaves on purpose."""

import asyncio
import contextlib
import imaplib
import itertools
import socket
import ssl
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from proxyprotocol.reader import ProxyProtocolReader
from pydantic import SecretStr
from pymap.backend.dict import DictBackend
from pymap.imap import IMAPServer
from pysasl.hashing import Cleartext

from pipeline.connectors.email import Email, EmailWithSent, Imap, Smtp, Tls
from pipeline.connectors.sdk import Call
from pipeline.domain.reconciliation import ErrorMeaning

T = TypeVar("T")
HOST = "127.0.0.1"
USER, PASSWORD = "postman", "s3cret-of-the-postman"
KEY = "orders:0198c0de-0000-7000-8000-000000000001"
MAIL = {"to": "ann@example.org", "subject": "Your order", "text": "It is on its way."}


class Loop:
    """An event loop in a thread, for servers that need one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, run over there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        """End every task, then the loop."""
        self.run(self._cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()

    async def _cancel(self) -> None:
        rest = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


@dataclass(frozen=True)
class Received:
    """A mail the server took."""

    sender: str
    recipients: list[str]
    raw: bytes

    @property
    def message(self) -> EmailMessage:
        """The mail as a program reads it."""
        return message_from_bytes(self.raw, policy=default)


@dataclass
class Script:
    """What the SMTP server does out of the ordinary. A status of None means the ordinary."""

    mail: str | None = None
    recipients: dict[str, str] = field(default_factory=dict)
    before_data: str | None = None
    data: str | None = None  #: the answer to the whole mail, which is not taken unless it begins with 2
    takes: bool | None = None  #: whether it is taken, whatever the answer
    after: str = "answer"  #: answer, cut, hang or drip
    leaves: bool = True  #: whether a goodbye is answered


class SmtpHandler:
    """Keeps what it takes, and misbehaves by its script."""

    def __init__(self) -> None:
        self.script = Script()
        self.received: list[Received] = []
        self.commands: list[str] = []

    def times(self, key: str) -> int:
        """How often a mail with this idempotency key was taken."""
        return sum(each.message["X-Idempotency-Key"] == key for each in self.received)

    async def handle_MAIL(  # noqa: N802 - the name that aiosmtpd calls
        self, _: SMTP, __: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        self.commands.append("MAIL")
        return self.script.mail or "250 OK"

    async def handle_RCPT(  # noqa: N802
        self, _: SMTP, __: Session, envelope: Envelope, address: str, ___: list[str]
    ) -> str:
        self.commands.append("RCPT")
        refusal = self.script.recipients.get(address)
        if refusal is None:
            envelope.rcpt_tos.append(address)
        return refusal or "250 OK"

    async def handle_RSET(self, *_: Any) -> str:  # noqa: N802
        self.commands.append("RSET")
        return "250 OK"

    async def handle_QUIT(self, *_: Any) -> str:  # noqa: N802
        self.commands.append("QUIT")
        if not self.script.leaves:
            await asyncio.Event().wait()
        return "221 Bye"

    async def handle_DATA(self, server: SMTP, _: Session, envelope: Envelope) -> str:  # noqa: N802
        script = self.script
        answer = script.data or "250 2.0.0 queued as 4711"
        self.commands.append("DATA")
        if script.takes if script.takes is not None else answer.startswith("2"):
            raw = cast(bytes, envelope.original_content)
            self.received.append(Received(str(envelope.mail_from), list(envelope.rcpt_tos), raw))
        if script.after == "cut":
            assert server.transport is not None
            server.transport.abort()  # type: ignore[attr-defined]
        elif script.after == "hang":
            await asyncio.Event().wait()
        elif script.after == "drip":
            await self._drip(server)
        return answer

    async def _drip(self, server: SMTP) -> None:
        assert server.transport is not None
        for byte in itertools.chain(b"250-", itertools.repeat(ord("x"))):
            server.transport.write(bytes([byte]))  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)


class _Smtp(SMTP):
    """Can refuse DATA itself, which handlers are not asked about."""

    async def smtp_DATA(self, arg: str) -> None:  # noqa: N802
        refusal = self.event_handler.script.before_data
        if refusal is not None:
            await self.push(refusal)
        else:
            await super().smtp_DATA(arg)


@dataclass
class SmtpServer:
    """A running SMTP server."""

    port: int
    handler: SmtpHandler


def _knows(server: SMTP, session: Session, envelope: Envelope, mechanism: str, login: Any) -> AuthResult:
    assert isinstance(login, LoginPassword)
    known = (login.login, login.password) == (USER.encode(), PASSWORD.encode())
    return AuthResult(success=known, handled=False)


@contextlib.contextmanager
def smtp_server(
    loop: Loop, *, tls: ssl.SSLContext | None = None, implicit: bool = False, **options: Any
) -> Iterator[SmtpServer]:
    """aiosmtpd on a free port, with a login, and TLS if there is a certificate."""
    handler = SmtpHandler()
    settings: dict[str, Any] = {
        "enable_SMTPUTF8": True,
        "hostname": "mail.test",
        "authenticator": _knows,
        "auth_require_tls": False,
        "tls_context": None if implicit else tls,
        **options,
    }

    async def start() -> asyncio.Server:
        def made() -> SMTP:
            return _Smtp(handler, loop=loop.loop, **settings)

        return await loop.loop.create_server(made, HOST, 0, ssl=tls if implicit else None)

    server = loop.run(start())
    yield SmtpServer(server.sockets[0].getsockname()[1], handler)
    loop.loop.call_soon_threadsafe(server.close)


@dataclass
class ImapServer:
    """A running IMAP server, with a client of its own to inspect it."""

    port: int

    @contextlib.contextmanager
    def client(self) -> Iterator[imaplib.IMAP4]:
        """A dialogue after the login, by the standard library alone."""
        with imaplib.IMAP4(HOST, self.port, timeout=60) as client:
            client.login(USER, PASSWORD)
            yield client

    def make(self, folder: str) -> None:
        """Make a folder, by the name that the wire has for it."""
        with self.client() as client:
            assert client.create(f'"{folder}"')[0] == "OK"

    def file(self, folder: str, raw: bytes) -> None:
        """File a mail, as a server does that files what it sends."""
        with self.client() as client:
            assert client.append(f'"{folder}"', "", "", raw)[0] == "OK"

    def copies(self, folder: str) -> list[EmailMessage]:
        """What is in a folder."""
        with self.client() as client:
            assert client.select(f'"{folder}"', readonly=True)[0] == "OK"
            _, data = client.fetch("1:*", "(RFC822)")
            parts = [each[1] for each in data if isinstance(each, tuple)]
            return [message_from_bytes(part, policy=default) for part in parts]


@contextlib.contextmanager
def imap_server(
    loop: Loop, *, cert: Path | None = None, implicit: ssl.SSLContext | None = None
) -> Iterator[ImapServer]:
    """pymap on a free port, in memory, with one user."""
    args = Namespace(
        host=HOST,
        port=0,
        debug=False,
        cert=str(cert) if cert else None,
        key=None,
        tls=cert is not None,
        passlib_cfg=None,
        proxy_protocol=None,
        inherited_sockets=None,
        demo_data=False,
        demo_user=USER,
        demo_password=PASSWORD,
    )

    async def start() -> asyncio.Server:
        backend, config = await DictBackend.init(args, invalid_user_sleep=0.0, hash_context=Cleartext())
        config.apply_context()
        answer = ProxyProtocolReader(config.proxy_protocol).get_callback(IMAPServer(backend.login, config))
        return await asyncio.start_server(answer, HOST, 0, ssl=implicit)

    server = loop.run(start())
    yield ImapServer(server.sockets[0].getsockname()[1])
    loop.loop.call_soon_threadsafe(server.close)


@contextlib.contextmanager
def raw_server(talk: Callable[[socket.socket], None]) -> Iterator[int]:
    """A socket that treats each connection as the test wants; its port."""
    with socket.create_server((HOST, 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                talk(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def dripping(connection: socket.socket) -> None:
    """Send a byte now and then, for ever."""
    pause = threading.Event()
    while not pause.wait(0.05):
        connection.sendall(b"2")


def silent(connection: socket.socket) -> None:
    """Take everything and say nothing."""
    while connection.recv(4096):
        pass


def unencrypted_smtp(connection: socket.socket) -> None:
    """An SMTP server that agrees to STARTTLS and then says nothing."""
    connection.sendall(b"220 ready\r\n")
    for line in connection.makefile("rb"):
        connection.sendall(b"250-here\r\n250 STARTTLS\r\n" if line.startswith(b"ehlo") else b"220 go ahead\r\n")
        if line.startswith(b"STARTTLS"):
            silent(connection)


def unencrypted_imap(connection: socket.socket) -> None:
    """An IMAP server that agrees to STARTTLS and then says nothing."""
    connection.sendall(b"* OK ready\r\n")
    for line in connection.makefile("rb"):
        tag, command = line.split()[:2]
        known = b"* CAPABILITY IMAP4rev1 STARTTLS\r\n" if command == b"CAPABILITY" else b""
        connection.sendall(known + tag + b" OK done\r\n")
        if command == b"STARTTLS":
            silent(connection)


def wordless(connection: socket.socket) -> None:
    """An IMAP server that says yes to everything, and no more."""
    connection.sendall(b"* OK ready\r\n")
    for line in connection.makefile("rb"):
        tag, command = line.split()[:2]
        known = b"* CAPABILITY IMAP4rev1\r\n" if command == b"CAPABILITY" else b""
        connection.sendall(known + tag + b" OK done\r\n")


def mailer(port: int, sender: str = "Shop <shop@example.com>", **settings: Any) -> Email:
    """A connector that speaks to a server here."""
    place = Smtp(host=HOST, port=port, tls=settings.pop("tls", Tls.NONE), ca_file=settings.pop("ca_file", None))
    return Email(smtp=place, sender=sender, **settings)


def with_sent(smtp_port: int, imap_port: int, *, file_sent: bool = True, **sent: Any) -> EmailWithSent:
    """A connector that speaks to two servers here."""
    place: dict[str, Any] = {"host": HOST, "port": imap_port, "tls": Tls.NONE}
    place |= {"username": USER, "password": SecretStr(PASSWORD)}
    smtp = Smtp(host=HOST, port=smtp_port, tls=Tls.NONE)
    return EmailWithSent(smtp=smtp, sender="shop@example.com", sent=Imap(**place | sent), file_sent=file_sent)


def send(connector: Email, *, key: str = KEY, within: float = 20.0, **params: Any) -> Any:
    """Send as the host does: parameters checked and written down, then read back."""
    operation = type(connector).operations()["send"]
    given = operation.arguments(operation.to_stored_params(MAIL | params))
    return operation.function(connector, Call.within(key, timedelta(seconds=within)), **given)


def failure(connector: Email, **call: Any) -> BaseException:
    """The error that sending ends with."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the callers check its type
        send(connector, **call)
    return caught.value


def outcome(connector: Email, **call: Any) -> ErrorMeaning:
    """What that error says."""
    return type(connector).operations()["send"].reading(failure(connector, **call)).meaning


def unanswered(connector: Email, seconds: float) -> str:
    """Return the error of a mail that was sent whole without a reply: the outcome is unknown."""
    began = time.monotonic()
    error = failure(connector, within=seconds)
    assert type(connector).operations()["send"].reading(error).meaning is ErrorMeaning.UNKNOWN
    assert time.monotonic() - began < 40
    return str(error)


def reconcile(connector: EmailWithSent, key: str = KEY, within: float = 20.0) -> Any:
    """Reconcile a mail as the worker does."""
    operation = EmailWithSent.operations()["send"]
    assert operation.reconcile_function is not None
    return operation.reconcile_function(
        connector, Call.within(key, timedelta(seconds=within)), **operation.arguments(MAIL)
    )
