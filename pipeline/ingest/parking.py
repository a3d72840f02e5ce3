"""Setting entries aside by hand: a copy in another stream, and the original is no longer pending."""

import re
from typing import Any

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.queue import RedisStreamsQueue

SUFFIX = ":parked"


def park(queue: RedisStreamsQueue, entry_id: str, *, to: str | None = None, reason: str = "") -> str:
    """Copy a pending entry to the parking stream, then acknowledge it; return the copy's id.

    If it fails in between there is a copy and the entry is still pending: parking it again makes a second copy,
    and nothing is lost. The copy has the entry's own fields and three more that say where it came from and why.
    An entry that was trimmed from the stream is parked without its fields: they are gone.
    """
    config = queue.config
    target = to or f"{config.stream}{SUFFIX}"
    if target == config.stream:
        raise InvalidInputError(f"Stream {target!r} cannot be its own parking place. Nothing was parked.")
    if not re.fullmatch(r"\d+-\d+", entry_id):
        raise InvalidInputError(f"{entry_id!r} is not the id of an entry; expected one such as 1700000000000-0.")
    with queue.asking("park an entry"):
        found: Any = queue.client.xpending_range(config.stream, config.group, entry_id, entry_id, 1)
        if not found:
            raise InvalidInputError(
                f"Entry {entry_id} is not pending for group {config.group!r} of stream {config.stream!r}; expected one "
                "that is, as `pipeline ingest backlog` lists them. Nothing was parked."
            )
        entries: Any = queue.client.xrange(config.stream, entry_id, entry_id)
        fields = dict(entries[0][1]) if entries else {}
        fields |= {b"parked_from": f"{config.stream} {entry_id}", b"parked_for": config.group, b"parked_reason": reason}
        copy: Any = queue.client.xadd(target, fields)
        queue.client.xack(config.stream, config.group, entry_id)
    return str(copy.decode())
