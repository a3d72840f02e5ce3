"""Mail over SMTP, and where there is a folder of sent mail, a look into it.

``Email`` hands a mail to a server and believes its answer; without an answer nobody can be asked.
``EmailWithSent`` looks for the mail in the folder of sent mail by its Message-ID. A copy proves that it was
sent. That there is none proves something only where the server files copies by itself.
"""

import logging
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pydantic import SecretStr

from pipeline.connectors.email import message as mail
from pipeline.connectors.email.imap import Imap, SentFolderError
from pipeline.connectors.email.smtp import Envelope, deliver
from pipeline.connectors.email.sockets import ServerAddress, Tls, TlsMode, checked_login
from pipeline.connectors.sdk import HIDDEN, Applied, Call, NotFound, Retry, Verdict, mutation
from pipeline.domain.errors import InvalidInputError

log = logging.getLogger(__name__)

_PORTS = {Tls.STARTTLS: 587, Tls.IMPLICIT: 465, Tls.NONE: 25}
_LONGEST_FILING = 10.0  #: seconds; a copy is not worth more


@dataclass(frozen=True, slots=True, kw_only=True)
class Smtp:
    """The server that takes mail."""

    host: str
    port: int | None = None  #: by default 587, 465 or 25, as TLS is used
    tls: TlsMode = Tls.STARTTLS
    ca_file: str | None = None  #: certificates to trust instead of the system's

    def __post_init__(self) -> None:
        _ = self.server  # refuses what cannot be a server

    @property
    def server(self) -> ServerAddress:
        """The server with its port."""
        return ServerAddress.create(self.host, self.port, self.tls, self.ca_file, ports=_PORTS)


class Email(mail.Mailer):
    """Mail through an SMTP server. An unknown outcome is a question for a person: grade D."""

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
            self.sender = mail.Mailbox.parse(sender)
        except ValueError as error:
            raise InvalidInputError(f"The sender {sender!r} cannot be used: {error}.") from None

    send = mutation(shows=mail.SHOWS, redact=mail.REDACT)(mail.send)

    def deliver(self, call: Call, message: mail.MailMessage) -> dict[str, Any]:
        """Hand the letter to the server: all recipients or none. The result says what it answered."""
        return self._deliver_encoded(call, message, self._encode(call, message))

    def _encode(self, call: Call, letter: mail.MailMessage) -> bytes:
        return mail.encode_message(letter, call, sender=self.sender, domain=self.sender.domain)

    def _deliver_encoded(self, call: Call, letter: mail.MailMessage, raw: bytes) -> dict[str, Any]:
        def hide(words: str) -> str:
            for address in letter.bcc_only:
                words = re.sub(re.escape(address), HIDDEN, words, flags=re.IGNORECASE)
            return self.scrub(words)

        envelope = Envelope(sender=self.sender.address, recipients=letter.recipients, raw=raw, bcc_only=letter.bcc_only)
        reply = deliver(self.server, self._login, envelope, call, hide)
        return {"message_id": mail.message_id(call.idempotency_key, self.sender.domain), "reply": reply}


class EmailWithSent(Email):
    """Mail through an SMTP server, looked for in the folder of sent mail when the outcome is unknown: grade B.

    With ``file_sent`` the connector files the copy itself, once the server has taken the mail. A process
    that dies in between leaves a sent mail without a copy, so a missing copy then proves nothing: it is
    asked again, and in the end a person is. Without ``file_sent`` the server must file copies by itself.
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
        self.sent_password = sent.password  # here too, so that words are scrubbed of it

    send = mutation(shows=mail.SHOWS, redact=mail.REDACT, settle=timedelta(minutes=2))(mail.send)

    def deliver(self, call: Call, message: mail.MailMessage) -> dict[str, Any]:
        """Hand the letter to the server, then file a copy where that is ours to do."""
        raw = self._encode(call, message)
        result = self._deliver_encoded(call, message, raw)
        return result | {"filed": self._file(call, raw)} if self.file_sent else result

    def _file(self, call: Call, raw: bytes) -> bool:
        """File a copy, if it can be done in part of the time that is left. The mail is sent either way."""
        ends_at = time.monotonic() + min(_LONGEST_FILING, call.remaining.total_seconds() / 2)
        try:
            self.sent.file(raw, ends_at)
        except SentFolderError as error:
            log.warning("a mail was sent, but no copy could be filed: %s", self.scrub(str(error)))
            return False
        return True

    @send.reconcile
    def find_sent(self, call: Call, **_: Any) -> Verdict:
        """Look for the copy. One proves that the mail was sent; none proves something only if the server files."""
        try:
            is_there = self.sent.has_message(mail.local_id(call.idempotency_key), call.ends_at)
        except SentFolderError as error:
            return Retry(f"the folder of sent mail could not be searched: {self.scrub(str(error))}")
        if is_there:
            result = {"message_id": mail.message_id(call.idempotency_key, self.sender.domain), "reply": ""}
            return Applied(result | {"filed": True} if self.file_sent else result)
        if self.file_sent:
            return Retry(
                f"there is no copy in {self.sent.folder!r}, which proves nothing: copies are filed after sending, "
                "and this one may be missing although the mail was sent"
            )
        return NotFound(f"the server filed no copy in {self.sent.folder!r}")
