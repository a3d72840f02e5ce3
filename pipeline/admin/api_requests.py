"""Answers that the HTTP API keeps for a day, so that a repeated request is not executed again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.store.database import Database
from pipeline.transitions import api_requests as transitions


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRequest:
    """The request that was made under the same key."""

    request_hash: str
    status: int | None  #: None while it runs
    answer: Mapping[str, Any]


def begin(db: Database, caller: str, key: str, request_hash: str) -> EarlierRequest | None:
    """Begin a request under a key. Return the earlier request if the key is in use; None: execute it."""
    with db.transaction() as tx:
        row = transitions.begin(tx, caller, key, request_hash)
    if row is None:
        return None
    return EarlierRequest(request_hash=row.request_hash, status=row.status, answer=row.answer or {})


def save_answer(db: Database, caller: str, key: str, *, status: int, answer: Mapping[str, Any]) -> None:
    """Keep the answer for repeats of the request."""
    with db.transaction() as tx:
        transitions.save_answer(tx, caller, key, status=status, answer=answer)


def forget(db: Database, caller: str, key: str) -> None:
    """Free the key of a request that changed nothing."""
    with db.transaction() as tx:
        transitions.forget(tx, caller, key)
