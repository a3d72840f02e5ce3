"""Parking: an operator sets an entry aside. It is copied to another stream and acknowledged."""

import re
from typing import Any

from pipeline.domain.errors import InvalidInputError
from pipeline.ingest.errors import Pairs
from pipeline.ingest.queue import RedisStreamsQueue

SUFFIX = ":parked"


def park(queue: RedisStreamsQueue, entry_id: str, *, to: str | None = None, reason: str = "") -> str:
    """Copy a pending entry to the parking stream, acknowledge it, return the copy's id.

    After a failure in between, the copy exists and the entry is still pending. Parking it again makes a
    second copy; nothing is lost. The copy has the entry's fields, in order, and three more: where it came
    from, its group, and the reason. An entry that was trimmed is parked without its fields: they are gone.
    """
    config = queue.config
    target = to or f"{config.stream}{SUFFIX}"
    _check(entry_id, target, config.stream)
    with queue.translate_errors("park an entry"):
        found: Any = queue.client.xpending_range(config.stream, config.group, entry_id, entry_id, 1)
        if not found:
            raise InvalidInputError(
                f"Entry {entry_id} is not pending for group {config.group!r} of stream {config.stream!r}; expected one "
                "that `pipeline ingest backlog` lists. It was not parked."
            )
        entries: Any = queue.client.xrange(config.stream, entry_id, entry_id)
        fields: Pairs = entries[0][1] if entries else ()
        fields += _origin_fields(fields, f"{config.stream} {entry_id}", config.group, reason)
        execute: Any = queue.client.execute_command  # xadd takes a dict, which has each name once
        copy = execute("XADD", target, "*", *(part for pair in fields for part in pair))
        queue.client.xack(config.stream, config.group, entry_id)
    return str(copy.decode())


def _check(entry_id: str, target: str, stream: str) -> None:
    if target == stream:
        raise InvalidInputError(f"Stream {target!r} cannot be its own parking stream. {entry_id} was not parked.")
    if not re.fullmatch(r"[0-9]+-[0-9]+", entry_id):
        raise InvalidInputError(f"{entry_id!a} is not the id of an entry; expected one such as 1700000000000-0.")


def _origin_fields(fields: Pairs, *values: str) -> Pairs:
    """Return three fields with names that the entry lacks. A parked entry has the plain names already."""
    taken, number = {name for name, _ in fields}, 1
    while True:
        prefix = "parked" if number == 1 else f"parked{number}"
        names = [f"{prefix}_{suffix}".encode() for suffix in ("from", "for", "reason")]
        if taken.isdisjoint(names):
            return tuple(zip(names, (value.encode(errors="replace") for value in values), strict=True))
        number += 1
