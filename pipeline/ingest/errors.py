"""What goes wrong with a stream.

QueueError          Redis failed, or a stream cannot be used as asked
├── NoStreamError   Redis is well, and has no such stream or group
└── PoisonError     entries that nobody can use as they are
LockedError         another transaction holds the message ids of a batch
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.domain.errors import PipelineError
from pipeline.domain.text import printable_text

if TYPE_CHECKING:
    from pipeline.ingest.queue import QueueMessage

Pairs = tuple[tuple[bytes, bytes], ...]
_MOST_NAMED = 5


class QueueError(PipelineError):
    """Redis failed, or a stream cannot be used as asked. Nothing was tried again."""


class NoStreamError(QueueError):
    """There is no such stream or group, or the key holds something else. A name is wrong, or somebody removed it."""


class LockedError(PipelineError):
    """Another transaction has held the message ids of a batch for too long. The batch stays pending."""


@dataclass(frozen=True, slots=True)
class PoisonEntry:
    """One entry that cannot be used: its id, its fields as they are, and why."""

    id: str
    fields: Pairs = field(repr=False)  #: in their order, repeated names included
    problem: str
    is_gone: bool = False  #: trimmed or deleted before it was acknowledged: nobody can use it any more

    def __post_init__(self) -> None:
        object.__setattr__(self, "problem", printable_text(self.problem))


class PoisonError(QueueError):
    """Entries that cannot be used as they are. They stay pending until somebody parks them.

    ``messages`` are the good ones that came with them: they belong to the caller now, and are lost to
    everybody until they go stale if the caller drops them.
    """

    def __init__(self, stream: str, entries: Sequence[PoisonEntry], messages: "Sequence[QueueMessage]" = ()) -> None:
        self.stream, self.entries, self.messages = stream, tuple(entries), tuple(messages)
        named = "; ".join(f"{entry.id}: {entry.problem}" for entry in self.entries[:_MOST_NAMED])
        more = f"; and {len(self.entries) - _MOST_NAMED} more" if len(self.entries) > _MOST_NAMED else ""
        super().__init__(f"{self._count} cannot be used ({named}{more}). {self._advice}")

    @property
    def summary(self) -> str:
        """The same without names, for a place where each entry was named before."""
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
        words = []
        if kept:
            subject = "It stays" if len(self.entries) == 1 else f"{kept} {'stays' if kept == 1 else 'stay'}"
            words.append(f"{subject} pending: correct what sends {what}, then park {what} with `pipeline ingest park`.")
        if gone:
            lost = "is lost" if gone == 1 else "are lost"
            words.append(f"{gone} {lost}, trimmed before anybody was done: have it sent again, and trim later.")
        return " ".join(words)
