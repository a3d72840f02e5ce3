"""Check an act of an operator before it is committed: one mutation, many, or with a second person. Pure: no I/O.

An operator forms an answer on what was shown. The answer carries the token of that state, and is refused if the
mutation is in another state when the answer is written. ``If-Match`` of HTTP means the same.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import MutationStatus

_DIGITS = 8  #: of a hash, in a token


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One part of a token: what it is about, and its text in the token."""

    name: str
    text: str
    hashed: str | None = None  #: the value whose hash the text is


def state_token(row: Any) -> str:
    """Return the token of the state of a ledger row. Two states with the same token are the same for an answer.

    - status, attempts and reconcile attempts are in it as they are;
    - request, error (the last verdict), approval, resolution and late effect as hashes;
    - times of attempts to come and of leases are not in it: they say nothing about the outcome.
    """
    return ".".join(part.text for part in _parts(row)).rstrip(".")


def state_changes(token: str, row: Any) -> tuple[str, ...]:
    """Describe what has changed since the state of the token. Empty: the mutation is still in it."""
    now = list(_parts(row))
    seen = token.split(".")
    if seen[0] not in set(MutationStatus) or len(seen) > len(now):
        raise InvalidInputError(
            f"{token!r} is no state of a mutation; expected one that `pipeline mutations ID --json` shows as `state`."
        )
    seen += [""] * (len(now) - len(seen))
    return tuple(_change(part, was) for part, was in zip(now, seen, strict=True) if part.text != was)


def _change(part: _Part, was: str) -> str:
    if part.hashed is None:
        return f"{part.name} was {was or 'not given'}, is {part.text}"
    return f"{part.name} changed, is {part.hashed or 'none'}"


def _parts(row: Any) -> Iterator[_Part]:
    yield _Part(name="status", text=str(row.status))
    yield _Part(name="attempts", text=str(row.attempts))
    yield _Part(name="reconcile attempts", text=str(row.reconcile_attempts))
    yield _hashed("request", row.request_hash)
    yield _hashed("error", row.error)
    yield _hashed("approval", row.approved_by, row.approved_at)
    yield _hashed("resolution", row.resolved_by, row.resolved_at)
    yield _hashed("late effect", row.acknowledged_by, row.found_late_at)


def _hashed(name: str, *values: str | datetime | None) -> _Part:
    """Return a part as a hash, which is empty if there is no value. The time zone of a connection does not matter."""
    texts = [each.astimezone(UTC).isoformat() if isinstance(each, datetime) else each for each in values]
    known = [each for each in texts if each is not None]
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:_DIGITS] if known else ""
    return _Part(name=name, text=digest, hashed=" ".join(known))


class BulkAct(StrEnum):
    """What is done to each item of a bulk preview."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    SKIP = "skip"
    TRY_AGAIN = "try_again"
    APPROVE = "approve"
    REJECT = "reject"
    IMPORT = "import"  #: resolve each mutation as the provider's export says
    RELEASE_EVENT = "release_event"  #: offer quarantined events again
    SKIP_EVENT = "skip_event"  #: never offer quarantined events to their consumers


EVENT_ACTS = frozenset({BulkAct.RELEASE_EVENT, BulkAct.SKIP_EVENT})
MAX_ITEMS = 10_000  #: of one preview
PREVIEW_LIFETIME = timedelta(hours=1)  #: after it a preview is not committed any more
#: After a pause this long the process that ran a commit is taken for dead, and the commit may be taken over.
COMMIT_PAUSE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPreview:
    """A frozen preview: the exact items, each with the state in which it was shown."""

    act: BulkAct
    created_by: str
    workflows: tuple[str, ...]
    request: Mapping[str, Any]  #: what the operator asked for, for people
    items: tuple[Mapping[str, Any], ...]
    refused: Mapping[str, str]  #: of each item that would be refused: why
    left_out: Mapping[str, int]  #: of what is not in the preview: how many, by reason


class ProposedAct(StrEnum):
    """An answer that states a result or lets a request be sent."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    APPROVE = "approve"
