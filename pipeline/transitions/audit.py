"""Who changed an outcome, when and why. Written in the transaction of the act itself."""

import json
from typing import Any

from pipeline.domain.values import Actor
from pipeline.store.codecs import sealed_evidence
from pipeline.store.database import Transaction
from pipeline.store.schema import MutationRow
from pipeline.store.writes import housekeeping


def record(tx: Transaction, by: Actor, act: str, **subject: Any) -> None:
    """Keep who did what to which workflow, run, mutation or event, with reason and evidence."""
    evidence = sealed_evidence(tx, subject.get("workflow"), subject.get("mutation_id"), by.evidence)
    tx.execute(
        housekeeping.INSERT_AUDIT,
        actor=by.name,
        act=act,
        claimed=by.is_claimed,
        workflow=subject.get("workflow"),
        run_id=subject.get("run_id"),
        mutation_id=subject.get("mutation_id"),
        event_id=subject.get("event_id"),
        reason=by.reason,
        evidence=json.dumps(evidence) if evidence is not None else None,
    )


def subject_of(mutation: MutationRow) -> dict[str, Any]:
    """Return the fields by which an audit row names a mutation."""
    return {"workflow": mutation.workflow, "run_id": mutation.run_id, "mutation_id": mutation.id}
