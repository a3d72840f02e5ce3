"""Breakers: an operation whose outcomes are mostly unknown starts no new mutation until a probe succeeds.

Every mutation with an unknown outcome may need an operator. Runs that would send one wait before
anything is in the ledger. Now and then one of them is let through, as a probe.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from uuid import UUID

from pipeline.domain.policies import BreakerPolicy
from pipeline.domain.values import Actor
from pipeline.store.database import Transaction
from pipeline.store.reads import ledger
from pipeline.store.rows import DispatchableRunRow
from pipeline.store.writes import breakers as breaker_store
from pipeline.transitions import audit

OperationName = tuple[str, str]  #: connector and operation


class Admission(StrEnum):
    """What an open breaker lets through."""

    NONE = "none"
    ONE = "one"  #: the probe


def admit(tx: Transaction, names: Collection[OperationName]) -> dict[OperationName, Admission]:
    """The open breakers among these operations. A caller that gets ``ONE`` has taken the probe."""
    found = {(row.connector, row.operation): row for row in ledger.open_breakers(tx)}
    return {
        name: Admission.ONE if found[name].is_due and _take_probe(tx, name) else Admission.NONE
        for name in sorted(set(names) & set(found))
    }


def open_if_unknown(tx: Transaction, name: OperationName, policy: BreakerPolicy, mutation_id: UUID) -> bool:
    """Open the breaker if too many of the last outcomes are unknown, such as this one. Returns whether it did."""
    connector, operation = name
    row = tx.first(
        breaker_store.OPEN_IF_UNKNOWN,
        mutation_id=mutation_id,
        connector=connector,
        operation=operation,
        share=policy.unknown_share,
        at_least=policy.min_unknown,
        last=policy.last_calls,
        window=policy.window,
        probe_every=policy.probe_every,
    )
    if row is not None:
        tx.log_on_commit("breaker.opened", connector=connector, operation=operation, reason=row.reason)
    return row is not None


def close_after_probe(tx: Transaction, name: OperationName) -> None:
    """Close the breaker after a successful probe, unless an operator opened it."""
    _close(tx, name, by_operator=False)


def open_by_operator(tx: Transaction, name: OperationName, by: Actor) -> None:
    """Stop new mutations of an operation for an operator, until an operator closes the breaker."""
    connector, operation = name
    tx.first(breaker_store.OPEN, connector=connector, operation=operation, reason=by.reason or "", opened_by=by.name)
    audit.record(tx, by, f"breaker.open {connector}.{operation}")
    tx.log_on_commit("breaker.opened", connector=connector, operation=operation, reason=by.reason, actor=by.name)


def close_by_operator(tx: Transaction, name: OperationName, by: Actor) -> bool:
    """Close a breaker for an operator. Return whether it was open."""
    was_open = _close(tx, name, by_operator=True)
    if was_open:
        audit.record(tx, by, f"breaker.close {'.'.join(name)}")
    return was_open


def redispatch_waiting(tx: Transaction, *, limit: int = 1_000) -> Sequence[DispatchableRunRow]:
    """Mark runs that may wait for a breaker as undispatched, and return them.

    The caller redispatches them now; if the broker is down, the next tick does. What a run requests is not recorded
    before it is sent, so runs of other operations may be among them.
    """
    return sorted(tx.all(breaker_store.REDISPATCH_WAITING, limit=limit), key=lambda row: row.id)


def _close(tx: Transaction, name: OperationName, *, by_operator: bool) -> bool:
    connector, operation = name
    row = tx.first(breaker_store.CLOSE, connector=connector, operation=operation, by_operator=by_operator)
    if row is not None:
        tx.log_on_commit("breaker.closed", connector=connector, operation=operation)
    return row is not None


def _take_probe(tx: Transaction, name: OperationName) -> bool:
    connector, operation = name
    return tx.first(breaker_store.TAKE_PROBE, connector=connector, operation=operation) is not None
