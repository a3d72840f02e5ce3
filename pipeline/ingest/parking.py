"""Setting entries aside by hand: a copy in another stream, and the original is no longer pending."""

import re
from typing import Any

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.errors import Pairs
from pipeline.ingest.queue import RedisStreamsQueue

SUFFIX = ":parked"


def park(queue: RedisStreamsQueue, entry_id: str, *, to: str | None = None, reason: str = "") -> str:
    """Copy a pending entry to the parking stream, then acknowledge it; return the copy's id.

    If it fails in between there is a copy and the entry is still pending: parking it again makes a second copy,
    and nothing is lost. The copy has the entry's own fields, in their order, and three more that say where it came
    from and why. An entry that was trimmed from the stream is parked without its fields: they are gone.
    """
    config = queue.config
    target = to or f"{config.stream}{SUFFIX}"
    _check(entry_id, target, config.stream)
    with queue.translate_errors("park an entry"):
        found: Any = queue.client.xpending_range(config.stream, config.group, entry_id, entry_id, 1)
        if not found:
            raise InvalidInputError(
                f"Entry {entry_id} is not pending for group {config.group!r} of stream {config.stream!r}; expected one "
                "that is, as `pipeline ingest backlog` lists them. It was not parked."
            )
        entries: Any = queue.client.xrange(config.stream, entry_id, entry_id)
        fields: Pairs = entries[0][1] if entries else ()
        fields += _origin_fields(fields, f"{config.stream} {entry_id}", config.group, reason)
        ask: Any = queue.client.execute_command  # xadd takes a dict, and a dict has each name once
        copy = ask("XADD", target, "*", *(word for pair in fields for word in pair))
        queue.client.xack(config.stream, config.group, entry_id)
    return str(copy.decode())


def _check(entry_id: str, target: str, stream: str) -> None:
    if target == stream:
        raise InvalidInputError(f"Stream {target!r} cannot be its own parking place. {entry_id} was not parked.")
    if not re.fullmatch(r"[0-9]+-[0-9]+", entry_id):
        raise InvalidInputError(f"{entry_id!a} is not the id of an entry; expected one such as 1700000000000-0.")


def _origin_fields(fields: Pairs, *values: str) -> Pairs:
    """Three fields whose names the entry does not have: one that was parked before has the plain ones."""
    taken, number = {name for name, _ in fields}, 1
    while True:
        prefix = "parked" if number == 1 else f"parked{number}"
        names = [f"{prefix}_{word}".encode() for word in ("from", "for", "reason")]
        if taken.isdisjoint(names):
            return tuple(zip(names, (value.encode(errors="replace") for value in values), strict=True))
        number += 1
