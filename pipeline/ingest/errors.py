"""What goes wrong with a stream.

QueueError          Redis failed, or a stream cannot be used as asked
└── PoisonError     entries that nobody can use as they are; they stay pending
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.domain.errors import PipelineError

if TYPE_CHECKING:
    from pipeline.ingest.queue import QueueMessage

_MOST_NAMED = 5


class QueueError(PipelineError):
    """Redis failed, or a stream cannot be used as asked. Nothing was tried again."""


@dataclass(frozen=True, slots=True)
class PoisonEntry:
    """One entry that cannot be used: its id, its fields as they are, and why."""

    id: str
    fields: Mapping[bytes, bytes] = field(repr=False)
    problem: str


class PoisonError(QueueError):
    """Entries that cannot be used as they are. They stay pending until somebody parks them.

    ``messages`` are the good ones that came with them: they belong to the caller now, and are lost to
    everybody until they go stale if the caller drops them.
    """

    def __init__(self, stream: str, entries: Sequence[PoisonEntry], messages: "Sequence[QueueMessage]" = ()) -> None:
        self.stream, self.entries, self.messages = stream, tuple(entries), tuple(messages)
        named = "; ".join(f"{entry.id}: {entry.problem}" for entry in self.entries[:_MOST_NAMED])
        more = f"; and {len(self.entries) - _MOST_NAMED} more" if len(self.entries) > _MOST_NAMED else ""
        super().__init__(
            f"{len(self.entries)} entries of stream {stream!r} cannot be used ({named}{more}). They stay pending. "
            "Correct what sends them, then park them with `pipeline ingest park`."
        )
