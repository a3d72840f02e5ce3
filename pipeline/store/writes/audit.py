"""Writes of the audit."""

from pipeline.store.database import Command

INSERT_AUDIT = Command("""
INSERT INTO pipeline.audit (actor, act, workflow, run_id, mutation_id, event_id, reason, evidence)
VALUES (:actor, :act, :workflow, :run_id, :mutation_id, :event_id, :reason, CAST(:evidence AS jsonb))
""")
