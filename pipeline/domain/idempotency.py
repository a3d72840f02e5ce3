"""Name the effect that a request asks for, and the idempotency key that it is sent under. Pure: no I/O.

The key is made of the inputs and of the ledger alone. So the same request for the same inputs has the same key in
every run, and after a failover that lost the newest ledger row. It changes only where the ledger says so.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class SentKey:
    """The key that a mutation was sent under."""

    key: str
    keyed: bool  #: the outside system honours keys
    expires_at: datetime | None  #: until when it keeps this one; None: not declared


def effect_id(handler: UUID, inputs: Iterable[Sequence[str]], request_hash: str) -> UUID:
    """Return the id of the effect that a handler asks for with this request for these inputs.

    - ``handler`` is the handler's uid. It belongs to one handler of one installation, and a rename keeps it.
    - ``inputs`` are the uids of the topics and the message ids of the pinned events, in any order. A rename keeps the
      uid. A message id names a fact, so an event that was lost and is published again is the same input. The event's
      own id is reused after a restore.
    - ``request_hash`` is the hash of the exact request.
    """
    written = json.dumps([str(handler), sorted([*each] for each in inputs), request_hash])
    return UUID(bytes=hashlib.sha256(written.encode()).digest()[:16])


def idempotency_key(effect: UUID, used_up: int) -> str:
    """Return the key of an effect of which so many keys are used up. ``store/writes/mutations.py`` writes the same.

    A key is used up by a refusal of the request. It stays in use after a weak verdict: "not found", or an operator's
    "did not happen". If the outside system honours no keys, or has forgotten this one, any failure uses it up.
    """
    return f"{effect}:{used_up}"


def is_one_effect(sent: SentKey, repeat_key: str | None, repeat_sent_at: datetime | None) -> bool:
    """Whether a mutation and its repeat can only have had one effect together: the key was honoured for both."""
    if not sent.keyed or repeat_key != sent.key or repeat_sent_at is None:
        return False
    return sent.expires_at is None or repeat_sent_at < sent.expires_at
