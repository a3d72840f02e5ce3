"""Guarded writes of proposals. The caller holds the lock of the mutation. Only ``transitions`` may import this."""

from pipeline.store.database import Command, Statement
from pipeline.store.schema import ProposalRow

#: A new proposal replaces the open one of its mutation.
REPLACE_PROPOSAL = Statement[ProposalRow]("""
WITH closed AS (
  UPDATE pipeline.proposals SET closed_at = pipeline.clock() WHERE mutation_id = :mutation_id AND closed_at IS NULL
  RETURNING id
)
INSERT INTO pipeline.proposals (mutation_id, act, answer, state, proposed_by, reason)
SELECT :mutation_id, :act, CAST(:answer AS jsonb), :state, :proposed_by, :reason
FROM (SELECT count(*) FROM closed) AS done
RETURNING *
""")

CONFIRM_PROPOSAL = Command("""
UPDATE pipeline.proposals SET closed_at = pipeline.clock(), confirmed_by = :by
WHERE id = :id AND closed_at IS NULL AND proposed_by <> :by
""")
