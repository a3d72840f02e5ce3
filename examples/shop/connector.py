"""The outside system: here a text file. Call your own provider instead."""

import time
from datetime import timedelta
from pathlib import Path

from pipeline import Applied, Call, Connector, NotFound, Verdict, mutation

SENT = Path("sent.txt")


class Messages(Connector):
    """Send mails and text messages."""

    name = "messages"

    @mutation(settle=timedelta(0))
    def mail(self, call: Call, *, to: str, text: str) -> None:
        """Send a mail."""
        send(call, to, text)

    @mail.reconcile
    def find_mail(self, call: Call, *, to: str, text: str) -> Verdict:
        """Find out whether a mail was sent whose answer was lost."""
        was_sent = SENT.exists() and call.idempotency_key in SENT.read_text()
        return Applied() if was_sent else NotFound()

    @mutation()
    def sms(self, call: Call, *, to: str, text: str) -> None:
        """Send a text message. Its provider cannot be asked what it has sent."""
        send(call, to, text)


def send(call: Call, to: str, text: str) -> None:
    """Send a message. For `slow` the answer is late: time to kill the worker."""
    with SENT.open("a") as file:
        file.write(f"{call.idempotency_key} {to}: {text}\n")
    if to == "slow":
        time.sleep(60)
