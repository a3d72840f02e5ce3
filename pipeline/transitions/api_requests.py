"""Answers that the HTTP API keeps, so that a request with the same Idempotency-Key is executed once."""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.domain.payloads import checked_name
from pipeline.store.database import Transaction
from pipeline.store.reads import requests
from pipeline.store.schema import ApiRequestRow
from pipeline.store.writes import api_requests as request_store


def begin(tx: Transaction, caller: str, key: str, request_hash: str) -> ApiRequestRow | None:
    """Begin a request under a key. Return the earlier request if the key is in use; None: the caller executes it."""
    given = checked_name(key, what="Idempotency-Key")
    tx.execute(request_store.DELETE_OLD_REQUESTS)
    if tx.first(request_store.BEGIN_REQUEST, caller=caller, key=given, request_hash=request_hash) is not None:
        return None
    return requests.api_request(tx, caller, given)


def save_answer(tx: Transaction, caller: str, key: str, *, status: int, answer: Mapping[str, Any]) -> None:
    """Keep the answer for repeats of the request."""
    tx.execute(request_store.SAVE_ANSWER, caller=caller, key=key, status=status, answer=json.dumps(dict(answer)))


def forget(tx: Transaction, caller: str, key: str) -> None:
    """Free the key of a request that changed nothing."""
    tx.execute(request_store.FORGET_REQUEST, caller=caller, key=key)
