"""Send one mail a day with everything that happened, at six in the evening (UTC).

The outside system is a stand-in: a folder of mails, each named by its idempotency key.

    pipeline dev examples.digest
    pipeline publish digest comments.written '{"author": "Ada", "text": "Well done"}' --message-id comment:1
"""

import os
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline import Applied, Call, Connector, NotFound, PrepareResult, Verdict, Workflow, mutation

OUTBOX = Path(os.environ.get("DIGEST_OUTBOX", "outbox"))
SENT_AT = time(18)


class Comment(BaseModel):
    """The payload that the forum publishes."""

    author: str
    text: str


class Mail(Connector):
    """Send mails into a folder."""

    name = "mail"

    @mutation(timeout=timedelta(seconds=10), settle=timedelta(0), shows="Digest of {day}")
    def send(self, call: Call, *, day: str, lines: list[str]) -> None:
        """Write the mail. A second mail with the same key would double its lines."""
        OUTBOX.mkdir(parents=True, exist_ok=True)
        with (OUTBOX / call.idempotency_key.replace(":", "_")).open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    @send.reconcile
    def find(self, call: Call, *, day: str, lines: list[str]) -> Verdict:
        """Find out whether the mail was written."""
        file = OUTBOX / call.idempotency_key.replace(":", "_")
        return Applied() if file.exists() and file.stat().st_size else NotFound()


def next_mail(now: datetime) -> datetime:
    """Return when the next mail is due."""
    today = datetime.combine(now.date(), SENT_AT, now.tzinfo)
    return today if now < today else today + timedelta(days=1)


mail = Mail()
digest = Workflow("digest")  # one run at a time: it sees everything that is pending
written = digest.topic("comments.written", schema=Comment)


@digest.consumer(subscribes=[written])
class SendDigest:
    """Wait until six, then send everything that was written before."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the comments whose mail is due, or ask to be called again when it is."""
        pending = ctx.peek(written, limit=1000)
        due = [event for event in pending if next_mail(event.created_at) <= ctx.now]
        if not due:
            return PrepareResult.nothing(wake_at=next_mail(ctx.now) if pending else None)
        lines = [f"{event.payload.author}: {event.payload.text}" for event in due]
        return PrepareResult(reserve=due, data={"day": str(next_mail(due[-1].created_at).date()), "lines": lines})

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for one mail."""
        return ctx.mail.send(**prepared.data)

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish nothing."""
