"""Messages that workers refused. They are in the broker, so the process that has Celery hands in how to reach them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from pipeline.domain.errors import NotFoundError
from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.transitions import audit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A refused message, without its payloads."""

    id: str
    kind: str  #: unpublishable, unreadable, invalid, unknown task or no task
    reason: str
    workflow: str
    events: int
    message_ids: tuple[str, ...]
    task: str
    content_type: str
    size: int  #: bytes


class DeadLetters(Protocol):
    """Reach the dead letters of a broker."""

    def count(self) -> int:
        """Return how many messages were refused; 0 if the broker does not answer."""

    def letters(self) -> list[DeadLetter]:
        """List every refused message."""

    def send_back(self, ids: Collection[str]) -> list[DeadLetter]:
        """Send messages to the workers again. Return those that were found; one that no worker can take stays."""

    def drop(self, ids: Collection[str]) -> list[DeadLetter]:
        """Delete messages. Return those that were found."""


CanSee = Callable[[str], bool]  #: whether the workflow of a message is in the scope of the operator


def send_back(db: Database, letters: DeadLetters, letter_id: str, by: Actor, *, can_see: CanSee) -> DeadLetter:
    """Send a message to the workers again for an operator, and keep the act in the audit."""
    _require_in_scope(letters, letter_id, can_see)
    return _found(db, letters.send_back({letter_id}), letter_id, by, "dead_letter.send_back")


def drop(db: Database, letters: DeadLetters, letter_id: str, by: Actor, *, can_see: CanSee) -> DeadLetter:
    """Delete a message for an operator, and keep the act in the audit. It was the only copy of its events."""
    _require_in_scope(letters, letter_id, can_see)
    return _found(db, letters.drop({letter_id}), letter_id, by, "dead_letter.drop")


def _require_in_scope(letters: DeadLetters, letter_id: str, can_see: CanSee) -> None:
    """Refuse a message of a workflow out of scope as if it did not exist. Its sender chose the id, so it may be two."""
    if not all(can_see(each.workflow) for each in letters.letters() if each.id == letter_id):
        raise NotFoundError("refused message", letter_id, hint="Nothing was changed.")


def _found(db: Database, found: list[DeadLetter], letter_id: str, by: Actor, act: str) -> DeadLetter:
    if not found:
        raise NotFoundError("refused message", letter_id, hint="Nothing was changed.")
    evidence = {"message": letter_id, "message_ids": list(found[0].message_ids[:100])}
    who = replace(by, evidence=evidence)
    with db.transaction() as tx:
        audit.record(tx, who, act, workflow=found[0].workflow or None)
    return found[0]
