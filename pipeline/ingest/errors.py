"""Errors of streams.

QueueError          Redis failed, or a stream cannot be used as requested
├── QueueTimeoutError   Redis did not reply in time; the consumer engine takes it as a timeout
├── NoStreamError   Redis works, and has no such stream or group
└── PoisonError     entries that cannot be used as they are
LockedError         another transaction holds the message ids of a batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.domain.errors import PipelineError
from pipeline.text import printable_text

if TYPE_CHECKING:
    from pipeline.ingest.queue import QueueMessage

Pairs = tuple[tuple[bytes, bytes], ...]
_MOST_NAMED = 5


class QueueError(PipelineError):
    """Redis failed, or a stream cannot be used as requested. Nothing was retried."""


class QueueTimeoutError(QueueError, TimeoutError):
    """Redis did not reply in time. Nothing was retried."""


class NoStreamError(QueueError):
    """The stream or group does not exist, or the key holds another type.

    The name is wrong, or the stream was removed.
    """


class LockedError(PipelineError):
    """Another transaction held the message ids of a batch for too long. The batch stays pending."""


@dataclass(frozen=True, slots=True)
class PoisonEntry:
    """One entry that cannot be used: its id, its raw fields, and the problem."""

    id: str
    fields: Pairs = field(repr=False)  #: in order, repeated names included
    problem: str
    is_gone: bool = False  #: trimmed or deleted before it was acknowledged: it is lost

    def __post_init__(self) -> None:
        object.__setattr__(self, "problem", printable_text(self.problem))


class PoisonError(QueueError):
    """Entries that cannot be used as they are. They stay pending until an operator parks them.

    ``messages`` are the good entries of the same batch. They belong to the caller now. If the caller
    drops them, no consumer gets them until they are stale.
    """

    def __init__(self, stream: str, entries: Sequence[PoisonEntry], messages: "Sequence[QueueMessage]" = ()) -> None:
        self.stream, self.entries, self.messages = stream, tuple(entries), tuple(messages)
        named = "; ".join(f"{entry.id}: {entry.problem}" for entry in self.entries[:_MOST_NAMED])
        more = f"; and {len(self.entries) - _MOST_NAMED} more" if len(self.entries) > _MOST_NAMED else ""
        super().__init__(f"{self._count} cannot be used ({named}{more}). {self._advice}")

    @property
    def summary(self) -> str:
        """The message without entry ids, for a caller that has logged each entry."""
        return f"{self._count} cannot be used. {self._advice}"

    @property
    def _count(self) -> str:
        count = len(self.entries)
        return f"{count} {'entry' if count == 1 else 'entries'} of stream {self.stream!r}"

    @property
    def _advice(self) -> str:
        gone = sum(entry.is_gone for entry in self.entries)
        kept = len(self.entries) - gone
        what = "it" if kept == 1 else "them"
        sentences = []
        if kept:
            subject = "It stays" if len(self.entries) == 1 else f"{kept} {'stays' if kept == 1 else 'stay'}"
            sentences.append(f"{subject} pending: correct the producer, then park {what} with `pipeline ingest park`.")
        if gone:
            lost = "is lost" if gone == 1 else "are lost"
            sentences.append(f"{gone} {lost}, trimmed before the acknowledgement: send again, and trim later.")
        return " ".join(sentences)
