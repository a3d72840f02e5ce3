"""Write mail and send it over SMTP; reconcile it by a folder of sent mail.

The Message-ID is made from the idempotency key alone. So a reconcile knows the Message-ID without the mail. Text that
could start a new header line is refused.

``Email`` relies on the reply of the SMTP server. Without a reply the outcome stays unknown.
``EmailWithSent`` searches the folder of sent mail for the Message-ID. A copy proves that the mail was sent. A missing
copy proves that it was not sent only if the server files copies by itself.
"""

import hashlib
import logging
import re
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from email.header import Header
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, SecretStr
from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from pipeline.connectors.mail_servers import (
    Envelope,
    Imap,
    SentFolderError,
    ServerAddress,
    Tls,
    TlsMode,
    checked_login,
    deliver,
)
from pipeline.connectors.sdk import Call, Connector, mutation
from pipeline.domain.errors import InvalidInputError, LogicError
from pipeline.domain.reconciliation import Applied, NotFound, Retry, Verdict
from pipeline.domain.redaction import HIDDEN

__all__ = ["Email", "EmailWithSent", "Imap", "Smtp", "Tls"]

KEY_HEADER = "X-Idempotency-Key"

_EXAMPLE = "expected one such as ann@example.com or Ann Lee <ann@example.com>"
_NAMED = re.compile(r"(?P<name>.*?)\s*<(?P<spec>[^<>]*)>")
_LOCAL = re.compile(r"[\w!#$%&'*+/=?^`{|}~-]+(\.[\w!#$%&'*+/=?^`{|}~-]+)*")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+( [A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,70}")
_MAX_WORD = 900  #: characters; a line may have 998, and a word cannot be split
_ADDRESS_HEADERS = {"from", "sender", "to", "cc", "bcc", "reply-to", "return-path"}
_RESERVED_HEADERS = _ADDRESS_HEADERS | {"subject", "date", "message-id", "received", "mime-version", KEY_HEADER.lower()}
_CONTENT = SMTP.clone(cte_type="7bit")  # every server accepts seven bits


def require_one_line(text: str) -> str:
    """Refuse text that a header cannot carry. Every kind of line break is refused."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") and character != "\t":
            raise ValueError(
                f"it contains the control character U+{ord(character):04X}, which a header cannot carry; "
                "expected a single line of text"
            )
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """A mail address with the name shown beside it."""

    local: str
    domain: str  #: in ASCII, with IDNA if needed
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a single address. Errors do not repeat it, since it may be in bcc."""
        named = _NAMED.fullmatch(require_one_line(text).strip())
        name, spec = (named["name"], named["spec"]) if named else ("", text.strip())
        local, at, domain = spec.rpartition("@")
        if not at or not _LOCAL.fullmatch(local) or len(local.encode()) > 64:
            raise ValueError(f"it is not a mail address; {_EXAMPLE}")
        return cls(local=local, domain=_ascii_domain(domain), name=_unquote(name).strip())

    @property
    def address(self) -> str:
        """The bare address, as SMTP sends it."""
        return f"{self.local}@{self.domain}"

    @property
    def header(self) -> str:
        """The address as a header has it."""
        if not self.name:
            return self.address
        if not self.name.isascii() or "=?" in self.name or len(self.name) > 60:
            shown = Header(self.name, "utf-8", maxlinelen=70).encode(linesep="\r\n")
        elif _PLAIN_NAME.fullmatch(self.name):
            shown = self.name
        else:
            shown = '"' + re.sub(r'(["\\])', r"\\\1", self.name) + '"'
        return f"{shown} <{self.address}>"


def _ascii_domain(domain: str) -> str:
    try:
        made = domain.encode("idna").decode("ascii").lower()
    except UnicodeError:
        made = ""
    if not made or len(made) > 253 or not all(_LABEL.fullmatch(label) for label in made.split(".")):
        raise ValueError(f"the part after @ is not a host name; {_EXAMPLE}")
    return made


def _unquote(name: str) -> str:
    if len(name) >= 2 and name[0] == name[-1] == '"':
        return re.sub(r"\\(.)", r"\1", name[1:-1])
    return name


def parse_addresses(value: Iterable[str] | str | None) -> tuple[Mailbox, ...]:
    """Parse one address or a list of them."""
    return tuple(Mailbox.parse(each) for each in ([value] if isinstance(value, str) else value or ()))


def _checked_addresses(value: Any) -> Any:
    """Return the value if it is an address or a list of addresses."""
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(each, str) for each in several):
        raise ValueError("expected a mail address or a list of them")
    for number, each in enumerate(several, start=1):
        try:
            Mailbox.parse(each)
        except ValueError as error:
            raise ValueError(f"address {number}: {error}") from None
    return value if isinstance(value, str) else list(several)


def _require_recipient(value: list[str] | str) -> list[str] | str:
    if not value:
        raise ValueError("it is empty; expected at least one mail address")
    return value


def checked_headers(headers: dict[str, str]) -> dict[str, str]:
    """Check further headers. Those that the connector writes itself are refused."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a header; expected letters, digits and hyphens")
        if name.lower() in _RESERVED_HEADERS or name.lower().startswith(("content-", "resent-")):
            raise ValueError(f"{name} is written by the connector; expected other headers only")
        try:
            require_one_line(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return headers


Line = Annotated[str, AfterValidator(require_one_line)]
Recipients = Annotated[list[str] | str, BeforeValidator(_checked_addresses)]
To = Annotated[list[str] | str, AfterValidator(_require_recipient), BeforeValidator(_checked_addresses)]
Headers = Annotated[dict[str, str], AfterValidator(checked_headers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MailMessage:
    """A mail before it is written: recipients, subject, text and headers."""

    to: tuple[Mailbox, ...]
    subject: str
    text: str = ""
    html: str | None = None
    cc: tuple[Mailbox, ...] = ()
    bcc: tuple[Mailbox, ...] = ()
    reply_to: tuple[Mailbox, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipients(self) -> tuple[str, ...]:
        """Every recipient once."""
        return tuple(dict.fromkeys(each.address for each in (*self.to, *self.cc, *self.bcc)))

    @property
    def bcc_only(self) -> frozenset[str]:
        """The recipients that only ``bcc`` names."""
        return frozenset(each.address for each in self.bcc) - {each.address for each in (*self.to, *self.cc)}


def message_id(key: str, domain: str) -> str:
    """Return the Message-ID for an idempotency key. It is always the same for one key."""
    return f"<{local_id(key)}@{domain}>"


def local_id(key: str) -> str:
    """Return the part of the Message-ID that does not depend on the domain."""
    return hashlib.sha256(key.encode()).hexdigest()[:40]


def encode_message(
    message: MailMessage, call: Call, *, sender: Mailbox | None, domain: str, include_bcc: bool = False
) -> bytes:
    """Write the mail as bytes. Set ``include_bcc`` only if the server reads the recipients from the headers.

    The date is by this machine's clock. No decision depends on it.
    """
    with _translate_value_errors("mail"):
        return _header_block(message, call, sender=sender, domain=domain, include_bcc=include_bcc) + _content(
            message, call
        )


@contextmanager
def _translate_value_errors(what: str) -> Iterator[None]:
    """Translate errors of writing a mail into LogicError, since nothing was sent."""
    try:
        yield
    except UnicodeEncodeError:
        raise LogicError(f"The {what} contains half of a character (a lone surrogate); expected whole text.") from None
    except ValueError as error:
        raise LogicError(f"The {what} cannot be written: {error}.") from None


def _header_block(message: MailMessage, call: Call, *, sender: Mailbox | None, domain: str, include_bcc: bool) -> bytes:
    heads = [
        *(("From", each.header) for each in [sender] if each),
        *_address_lines(To=message.to, Cc=message.cc, Bcc=message.bcc if include_bcc else ()),
        *_address_lines(**{"Reply-To": message.reply_to}),
        ("Subject", header_text("Subject", message.subject)),
        ("Date", formatdate()),
        ("Message-ID", message_id(call.idempotency_key, domain)),
        (KEY_HEADER, header_text(KEY_HEADER, call.idempotency_key)),
        *((name, header_text(name, value)) for name, value in checked_headers(dict(message.headers)).items()),
    ]
    return "".join(f"{name}: {value}\r\n" for name, value in heads).encode()


def _address_lines(**lists: tuple[Mailbox, ...]) -> list[tuple[str, str]]:
    return [(name, ",\r\n ".join(each.header for each in boxes)) for name, boxes in lists.items() if boxes]


def header_text(name: str, text: str) -> str:
    """Text for a header. It is encoded if some programs would read the plain text differently."""
    require_one_line(text)
    parts = text.split(" ")
    is_plain = text.isascii() and text.isprintable() and "=?" not in text
    if is_plain and (not text or all(0 < len(word) < _MAX_WORD for word in parts)):
        return Header(text, "us-ascii", header_name=name).encode(splitchars=" ", linesep="\r\n")
    return Header(text, "utf-8", header_name=name).encode(linesep="\r\n")


def _content(message: MailMessage, call: Call) -> bytes:
    email = EmailMessage(policy=_CONTENT)
    email.set_content(message.text, charset="utf-8")
    if message.html is not None:
        email.add_alternative(message.html, subtype="html", charset="utf-8")
        email.set_boundary(f"part-{local_id(call.idempotency_key + ' parts')}")
    return email.as_bytes()


class Mailer(Connector):
    """A connector that delivers mail. All of them share the parameters of ``send``."""

    def deliver(self, call: Call, message: MailMessage) -> Any:
        """Send the mail and return its result."""
        raise NotImplementedError


class SentMail(TypedDict):
    """The result of a mail, as the ledger stores it. Each connector adds what its server says."""

    message_id: str


def send(  # noqa: PLR0913 - the parts of a mail, given by name
    self: Mailer,
    call: Call,
    *,
    to: To,
    subject: Line,
    text: str = "",
    html: str | None = None,
    cc: Recipients | None = None,
    bcc: Recipients | None = None,
    reply_to: Recipients | None = None,
    headers: Headers | None = None,
) -> SentMail:
    """Send one mail to all recipients or to none."""
    with _translate_value_errors("list of recipients"):
        message = MailMessage(
            to=parse_addresses(_require_recipient(to)),
            subject=subject,
            text=text,
            html=html,
            cc=parse_addresses(cc),
            bcc=parse_addresses(bcc),
            reply_to=parse_addresses(reply_to),
            headers=headers or {},
        )
    sent: SentMail = self.deliver(call, message)
    return sent


#: Operators see the recipients and the subject of a mail, not its text.
SHOWS = "Mail to {to}: {subject}"
REDACT = ("bcc", "text", "html")


log = logging.getLogger(__name__)

_PORTS = {Tls.STARTTLS: 587, Tls.IMPLICIT: 465, Tls.NONE: 25}
_LONGEST_FILING = 10.0  #: seconds for filing a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Smtp:
    """The SMTP server."""

    host: str
    port: int | None = None  #: by default 587, 465 or 25, depending on tls
    tls: TlsMode = Tls.STARTTLS
    ca_file: str | None = None  #: certificates to trust instead of the system's

    def __post_init__(self) -> None:
        _ = self.server  # refuses an address that cannot be used

    @property
    def server(self) -> ServerAddress:
        """The server with its port."""
        return ServerAddress.create(self.host, self.port, self.tls, self.ca_file, ports=_PORTS)


class Email(Mailer):
    """Mail through an SMTP server. An operator resolves unknown outcomes: grade D."""

    def __init__(
        self,
        *,
        smtp: Smtp,
        sender: str,
        username: str | None = None,
        password: SecretStr | None = None,
        name: str = "email",
    ) -> None:
        self.name = name
        self.server = smtp.server
        self.username, self.password = username, password
        self._login = checked_login(self.server, username, password)
        try:
            self.sender = Mailbox.parse(sender)
        except ValueError as error:
            raise InvalidInputError(f"The sender {sender!r} cannot be used: {error}.") from None

    send = mutation(shows=SHOWS, redact=REDACT)(send)

    def deliver(self, call: Call, message: MailMessage) -> dict[str, Any]:
        """Send the mail to all recipients or to none. The result has the server's reply."""
        return self._deliver_encoded(call, message, self._encode(call, message))

    def _encode(self, call: Call, message: MailMessage) -> bytes:
        return encode_message(message, call, sender=self.sender, domain=self.sender.domain)

    def _deliver_encoded(self, call: Call, message: MailMessage, raw: bytes) -> dict[str, Any]:
        def redact(text: str) -> str:
            for address in message.bcc_only:
                text = re.sub(re.escape(address), HIDDEN, text, flags=re.IGNORECASE)
            return self.scrub(text)

        envelope = Envelope(
            sender=self.sender.address, recipients=message.recipients, raw=raw, bcc_only=message.bcc_only
        )
        reply = deliver(self.server, self._login, envelope, call, redact)
        return {"message_id": message_id(call.idempotency_key, self.sender.domain), "reply": reply}


class EmailWithSent(Email):
    """Mail through an SMTP server. Reconciles by the folder of sent mail: grade B.

    With ``file_sent`` the connector files the copy itself, after the server has accepted the mail. A process that dies
    in between leaves a sent mail without a copy. So a missing copy proves nothing: the connector is asked again, and in
    the end an operator resolves the outcome. Without ``file_sent`` the server must file copies by itself.
    """

    def __init__(  # noqa: PLR0913 - settings, given by name
        self,
        *,
        smtp: Smtp,
        sender: str,
        sent: Imap,
        file_sent: bool = True,
        username: str | None = None,
        password: SecretStr | None = None,
        name: str = "email",
    ) -> None:
        super().__init__(smtp=smtp, sender=sender, username=username, password=password, name=name)
        self.sent, self.file_sent = sent, file_sent
        self.sent_password = sent.password  # here too, so that messages are scrubbed of it

    send = mutation(shows=SHOWS, redact=REDACT, settle=timedelta(minutes=2))(send)

    def deliver(self, call: Call, message: MailMessage) -> dict[str, Any]:
        """Send the mail, then file a copy if ``file_sent`` is set."""
        raw = self._encode(call, message)
        result = self._deliver_encoded(call, message, raw)
        return result | {"filed": self._file(call, raw)} if self.file_sent else result

    def _file(self, call: Call, raw: bytes) -> bool:
        """File a copy within part of the time that is left. The mail is sent in any case."""
        ends_at = time.monotonic() + min(_LONGEST_FILING, call.remaining.total_seconds() / 2)
        try:
            self.sent.file(raw, ends_at)
        except SentFolderError as error:
            log.warning("a mail was sent, but no copy could be filed: %s", self.scrub(str(error)))
            return False
        return True

    @send.reconcile
    def find_sent(self, call: Call, **_: Any) -> Verdict:
        """Search for the copy. A missing copy counts as evidence only if the server files copies."""
        try:
            is_there = self.sent.has_message(local_id(call.idempotency_key), call.ends_at)
        except SentFolderError as error:
            return Retry(f"the folder of sent mail could not be searched: {self.scrub(str(error))}")
        if is_there:
            result = {"message_id": message_id(call.idempotency_key, self.sender.domain), "reply": ""}
            return Applied(result | {"filed": True} if self.file_sent else result)
        if self.file_sent:
            return Retry(
                f"there is no copy in {self.sent.folder!r}, which proves nothing: copies are filed after sending, "
                "and this one may be missing although the mail was sent"
            )
        return NotFound(f"the server filed no copy in {self.sent.folder!r}")
