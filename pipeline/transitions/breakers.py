"""Breakers: an operation whose outcomes are mostly unknown starts no new mutation until a probe succeeds.

Every mutation sent into the dark becomes a question for somebody. Runs that would send one wait
before anything is in the ledger; one of them is let through now and then to see whether the answer
comes back.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from uuid import UUID

from pipeline.domain.policies import BreakerPolicy
from pipeline.domain.values import Actor
from pipeline.store.database import Transaction
from pipeline.store.reads import ledger
from pipeline.store.rows import RunRow
from pipeline.store.writes import breakers as breaker_store
from pipeline.transitions import audit

OperationName = tuple[str, str]  #: connector and operation


class Admission(StrEnum):
    """What an open breaker lets through."""

    NONE = "none"
    ONE = "one"  #: the probe


def admit(tx: Transaction, names: Collection[OperationName]) -> dict[OperationName, Admission]:
    """The open breakers among these operations. Whoever is told ``ONE`` has taken the probe."""
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
    """A probe was answered: close the breaker, unless a person opened it."""
    _close(tx, name, by_operator=False)


def open_by_operator(tx: Transaction, name: OperationName, by: Actor) -> None:
    """A person stops new mutations of an operation, until a person lets them go on."""
    connector, operation = name
    tx.first(breaker_store.OPEN, connector=connector, operation=operation, reason=by.reason or "", opened_by=by.name)
    audit.record(tx, by, f"breaker.open {connector}.{operation}")
    tx.log_on_commit("breaker.opened", connector=connector, operation=operation, reason=by.reason, actor=by.name)


def close_by_operator(tx: Transaction, name: OperationName, by: Actor) -> bool:
    """A person lets mutations of an operation go on. Returns whether its breaker was open."""
    was_open = _close(tx, name, by_operator=True)
    if was_open:
        audit.record(tx, by, f"breaker.close {'.'.join(name)}")
    return was_open


def redispatch_waiting(tx: Transaction, *, limit: int = 1_000) -> Sequence[RunRow]:
    """Runs that may have waited behind a breaker: ring for them. If nobody hears it, the next tick rings, without the
    usual silence. What a run asks for is not written down before it is sent, so others may be among them."""
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
