"""A workflow for tests of the command line: its mail is never answered, and nobody can be asked about it."""

from datetime import timedelta
from typing import Any

from pipeline import Call, Connector, Workflow, mutation, read


class Mail(Connector):
    """An outside system in the dark."""

    name = "mail"

    @read
    def folders(self) -> list[str]:
        """A look."""
        return []

    @mutation(timeout=timedelta(seconds=1), keyed=True, redact=["body"], shows="Mail to {to}")
    def send(self, call: Call, *, to: str, body: str = "") -> None:
        """Goes out, perhaps."""
        del self, call, to, body
        raise TimeoutError("no answer")


mail = Mail()
counter = Workflow("counter", on_uncertain="contain", concurrency=4)
letters = counter.topic("letters")


@counter.effect(letters)
def post(ctx: Any, letter: Any) -> Any:
    """One letter, one mail."""
    return ctx.mail.send(to=letter.payload["to"], body="secret words")
