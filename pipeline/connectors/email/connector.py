"""Send mail over SMTP, and reconcile by a folder of sent mail.

``Email`` relies on the reply of the SMTP server. Without a reply the outcome stays unknown.
``EmailWithSent`` searches the folder of sent mail for the Message-ID. A copy proves that the mail was sent. A missing
copy proves that it was not sent only if the server files copies by itself.
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
from pipeline.connectors.sdk import HIDDEN, Call, mutation
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.reconciliation import Applied, NotFound, Retry, Verdict

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


class Email(mail.Mailer):
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
            self.sender = mail.Mailbox.parse(sender)
        except ValueError as error:
            raise InvalidInputError(f"The sender {sender!r} cannot be used: {error}.") from None

    send = mutation(shows=mail.SHOWS, redact=mail.REDACT)(mail.send)

    def deliver(self, call: Call, message: mail.MailMessage) -> dict[str, Any]:
        """Send the mail to all recipients or to none. The result has the server's reply."""
        return self._deliver_encoded(call, message, self._encode(call, message))

    def _encode(self, call: Call, message: mail.MailMessage) -> bytes:
        return mail.encode_message(message, call, sender=self.sender, domain=self.sender.domain)

    def _deliver_encoded(self, call: Call, message: mail.MailMessage, raw: bytes) -> dict[str, Any]:
        def redact(text: str) -> str:
            for address in message.bcc_only:
                text = re.sub(re.escape(address), HIDDEN, text, flags=re.IGNORECASE)
            return self.scrub(text)

        envelope = Envelope(
            sender=self.sender.address, recipients=message.recipients, raw=raw, bcc_only=message.bcc_only
        )
        reply = deliver(self.server, self._login, envelope, call, redact)
        return {"message_id": mail.message_id(call.idempotency_key, self.sender.domain), "reply": reply}


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

    send = mutation(shows=mail.SHOWS, redact=mail.REDACT, settle=timedelta(minutes=2))(mail.send)

    def deliver(self, call: Call, message: mail.MailMessage) -> dict[str, Any]:
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
