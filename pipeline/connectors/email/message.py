"""Check the parts of a mail and write it as bytes, for every mail connector.

The Message-ID is made from the idempotency key alone. So a reconcile knows the Message-ID without the mail. Text that
could start a new header line is refused.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.header import Header
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator
from typing_extensions import TypedDict  # that of typing has no schema before Python 3.12

from pipeline.connectors.sdk import Call, Connector
from pipeline.domain.errors import LogicError

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
