"""A stand-in for the Gmail API, over real HTTP: the real one cannot be reached from a test.

It imitates, of ``users.messages.send`` and ``users.messages.list``: bearer tokens; the shape of answers and
errors, quota errors among them, as 403 and as 429; recipients taken from To, Cc and Bcc; search by
``rfc822msgid:`` and ``in:sent``, which sees a mail only once it is indexed; and that a mail is kept with the
Message-ID it came with. Nothing in a mail is rewritten. Everything else of the API is left out.
It can also fail as networks do: before or after it has taken a mail.
"""

import base64
import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "ya29.s3cret-token"


@dataclass(frozen=True)
class Fault:
    """What happens to a request out of the ordinary."""

    status: int = 0  #: answer so, or not at all
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "as the test wants it"
    body: bytes | None = None  #: instead of the usual description of the error
    commits: bool = False  #: the mail is taken before it happens
    drips: bool = False  #: the answer comes byte by byte and never ends
    hangs: bool = False  #: no answer comes


@dataclass
class Kept:
    """A mail in the mailbox."""

    id: str
    message: EmailMessage
    indexed: bool


class StandIn:
    """The mailbox, and what the API does with the next requests."""

    def __init__(self) -> None:
        self.mails: list[Kept] = []
        self.faults: deque[Fault] = deque()
        self.requests: list[str] = []
        self.indexes_at_once = True
        self.url = ""
        self.over = threading.Event()

    def times(self, key: str) -> int:
        """How often a mail with this idempotency key was taken."""
        return sum(each.message["X-Idempotency-Key"] == key for each in self.mails)

    def index(self) -> None:
        """Let the search see everything that was sent until now."""
        for each in self.mails:
            each.indexed = True

    def take(self, raw: str) -> tuple[int, dict[str, Any]]:
        """Send a mail: the status and the answer."""
        message = message_from_bytes(base64.urlsafe_b64decode(raw), policy=default)
        if not any(message[name] for name in ("To", "Cc", "Bcc")):
            return 400, problem(400, "invalidArgument", "Recipient address required")
        number = f"18c{len(self.mails):013x}"
        self.mails.append(Kept(number, message, self.indexes_at_once))
        return 200, {"id": number, "threadId": number, "labelIds": ["SENT"]}

    def search(self, query: str) -> dict[str, Any]:
        """The list of what is found."""
        wanted = [term.partition(":")[2] for term in query.split() if term.startswith("rfc822msgid:")]
        assert "in:sent" in query.split()
        found = [
            {"id": each.id, "threadId": each.id}
            for each in self.mails
            if each.indexed and str(each.message["Message-ID"]).strip("<>") in wanted
        ]
        return ({"messages": found} if found else {}) | {"resultSizeEstimate": len(found)}


def problem(status: int, reason: str, message: str) -> dict[str, Any]:
    """An error as the API describes it."""
    each = {"domain": "global", "reason": reason, "message": message}
    return {"error": {"code": status, "message": message, "errors": [each]}}


class _Handler(BaseHTTPRequestHandler):
    api: StandIn
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self._may():
            fault = self.api.faults.popleft() if self.api.faults else None
            if fault is None or fault.commits:
                status, body = self.api.take(given["raw"])
            self._fail(fault) if fault else self._answer(status, body)

    def do_GET(self) -> None:
        if self._may():
            fault = self.api.faults.popleft() if self.api.faults else None
            query = parse_qs(urlsplit(self.path).query)
            self._fail(fault) if fault else self._answer(200, self.api.search(query["q"][0]))

    def _may(self) -> bool:
        self.api.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            self._answer(401, problem(401, "authError", "Invalid Credentials"))
        elif not path.startswith(("/gmail/v1/users/me/messages", "/gmail/v1/users/shop@example.com/messages")):
            self._answer(404, problem(404, "notFound", "Not Found"))
        else:
            return True
        return False

    def _fail(self, fault: Fault) -> None:
        if fault.drips:
            self._drip()
        elif fault.hangs:
            self.api.over.wait(120)
        elif fault.status:
            body = fault.body or json.dumps(problem(fault.status, fault.reason, fault.message)).encode()
            self._answer(fault.status, body, fault.headers)
        if not fault.status:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _drip(self) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self.api.over.wait(0.05):
                self.wfile.write(b"x")

    def _answer(self, status: int, body: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response_only(status)
        for name, value in ({"date": self.date_time_string()} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("content-type", "application/json; charset=UTF-8")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """The stand-in, running on a free port."""
    api = StandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": api}))
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        api.over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
