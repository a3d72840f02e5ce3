"""Who changed an outcome, when and why. Written in the transaction of the act itself."""

import json
from typing import Any

from pipeline.domain.values import Person
from pipeline.store import workflows as store
from pipeline.store.database import Transaction


def record(tx: Transaction, by: Person, act: str, **subject: Any) -> None:
    """Keep who did what to which workflow, run, mutation or event, with their words and evidence."""
    tx.run(
        store.INSERT_AUDIT,
        actor=by.name,
        act=act,
        workflow=subject.get("workflow"),
        run_id=subject.get("run_id"),
        mutation_id=subject.get("mutation_id"),
        event_id=subject.get("event_id"),
        reason=by.reason,
        evidence=json.dumps(by.evidence) if by.evidence is not None else None,
    )
