"""Looks that could not be taken, or told nothing: put off and remembered, and given to a person after too long."""

from datetime import timedelta
from typing import Any

from sqlalchemy import Row

from pipeline.domain.ids import MutationId
from pipeline.domain.values import Person
from pipeline.execution import audit, mutations
from pipeline.store import ledger
from pipeline.store import mutations as store
from pipeline.store.database import Transaction

_AGAIN = timedelta(seconds=30)  #: until somebody else may try
_LONG = timedelta(hours=1)  #: without a look, and a person is asked
_SWEEP = "reconcile"
_LEFT, _ASKED_AGAIN = "mutation.left", "mutation.try_again"


def leave(tx: Transaction, row: Row[Any], why: str) -> None:
    """Put off a look at a doubt that this process cannot take; an hour after the last real one, ask a person.

    That a look was left is kept with the number of looks so far: while the number stays, nobody has looked.
    One that came too early is not in the number: that it put the next off to the end of the quiet period tells it.
    """
    mutation_id = MutationId(row.id)
    last = ledger.last_act(tx, row.id, [_LEFT, _ASKED_AGAIN])
    since = None if last is None and row.reconcile_attempts else row.doubted_at
    if last is not None:
        is_same = last.act == _LEFT and last.evidence["looks"] == row.reconcile_attempts
        was_early = row.next_reconcile_at == row.quiet_until
        since = last.at if is_same and not was_early else None
    if since is not None and tx.clock() - since > _LONG:
        mutations.escalate(tx, [mutation_id], why)
        return
    if last is None or since is None:
        by = Person(name=_SWEEP, reason=why, evidence={"looks": row.reconcile_attempts})
        audit.record(tx, by, _LEFT, workflow=row.workflow, run_id=row.run_id, mutation_id=row.id)
    mutations.postpone(tx, mutation_id, after=_AGAIN)


def untold(tx: Transaction, mutation_id: MutationId) -> None:
    """A look of the watch came back and told nothing: it is not counted, and the one that is booked takes its place."""
    tx.run(store.UNTOLD, id=mutation_id)


def unwatch(tx: Transaction, row: Row[Any], why: str) -> None:
    """End the watch of a mutation that nobody can look for any more, and keep why."""
    mutations.watched(tx, MutationId(row.id), None)
    by = Person(name=_SWEEP, reason=why)
    audit.record(tx, by, "mutation.unwatched", workflow=row.workflow, run_id=row.run_id, mutation_id=row.id)
