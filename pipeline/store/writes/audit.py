"""Writes of the audit."""

from sqlalchemy import text

INSERT_AUDIT = text("""
INSERT INTO pipeline.audit (actor, act, workflow, run_id, mutation_id, event_id, reason, evidence)
VALUES (:actor, :act, :workflow, :run_id, :mutation_id, :event_id, :reason, CAST(:evidence AS jsonb))
""")
