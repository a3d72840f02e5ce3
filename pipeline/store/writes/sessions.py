"""Guarded writes of sessions."""

from pipeline.domain.states import RunStatus
from pipeline.domain.workflows import SessionResult
from pipeline.store.database import Command, Statement
from pipeline.store.predicates import KEEPS_SESSION_OPEN
from pipeline.store.rows import SessionIdRow
from pipeline.store.schema import SessionRow

#: A part of a statement that holds the workflow's lock: the handler that starts goes behind the others.
TURN = """turn AS (
  UPDATE pipeline.workflows
  SET turns = array_append(array_remove(turns, CAST(:handler_id AS integer)), CAST(:handler_id AS integer))
  WHERE name = :workflow AND CAST(:handler_id AS integer) <> coalesce(turns[cardinality(turns)], 0)
)"""


def session_parts(condition: str) -> str:
    """Return parts of a statement that holds the workflow's lock: ``session`` is the open session of the workflow.

    One is opened if none is open and the condition is true.
    """
    return f"""opened AS (
  INSERT INTO pipeline.sessions (workflow) SELECT CAST(:workflow AS text) WHERE {condition}
  ON CONFLICT (workflow) WHERE finished_at IS NULL DO NOTHING RETURNING id
), session AS MATERIALIZED (
  SELECT id FROM opened UNION ALL
  SELECT id FROM pipeline.sessions WHERE workflow = :workflow AND finished_at IS NULL LIMIT 1
)"""


#: For a run that continues after its approval.
OPEN_SESSION = Statement[SessionIdRow](f"WITH {session_parts('true')} SELECT id FROM session")

#: The run takes its cost with it, out of the session that ended while it waited for approval.
JOIN_SESSION = Command("""
WITH joined AS (
  UPDATE pipeline.runs r SET session_id = :session_id FROM pipeline.runs old
  WHERE r.id = :run_id AND old.id = r.id RETURNING old.session_id AS left_id, r.cost
)
UPDATE pipeline.sessions s SET cost = s.cost - j.cost FROM joined j
WHERE s.id = j.left_id AND s.id <> :session_id AND s.finished_at IS NOT NULL AND j.cost IS NOT NULL
""")

#: Lock the workflows of sessions. One that another transaction holds is left out, with its session: the next pass comes
#: back to it, and no other waits.
LOCK_WORKFLOWS_OF_SESSIONS = Statement[SessionIdRow]("""
SELECT s.id FROM pipeline.sessions s JOIN pipeline.workflows w ON w.name = s.workflow
WHERE s.id = ANY(CAST(:ids AS uuid[])) AND s.finished_at IS NULL
ORDER BY w.name FOR NO KEY UPDATE OF w SKIP LOCKED
""")

#: Locked after its runs and before the session is ended: a run that retention deletes meanwhile is then counted once.
LOCK_SESSIONS = Statement[SessionIdRow]("""
SELECT id FROM pipeline.sessions WHERE id = ANY(CAST(:ids AS uuid[])) AND finished_at IS NULL
ORDER BY id FOR NO KEY UPDATE
""")

MAX_COUNTED_RUNS = 10_000


def _session_total(number: str) -> str:
    """Return the SQL of a number of a session's runs. It is NULL if there are too many to read under the lock."""
    read = f"SELECT status, cost FROM pipeline.runs WHERE session_id = s.id LIMIT {MAX_COUNTED_RUNS} + 1"
    return f"(SELECT CASE WHEN count(*) <= {MAX_COUNTED_RUNS} THEN {number} END FROM ({read}) r)"


#: Retention adds the runs that it deleted to their session.
_RUN_COUNT = _session_total(f"coalesce(s.run_count, 0) + count(*) FILTER (WHERE r.status = '{RunStatus.COMMITTED}')")
_RUN_COST = _session_total("coalesce(sum(r.cost) + coalesce(s.cost, 0), s.cost)")
END_SESSIONS = Statement[SessionRow](f"""
UPDATE pipeline.sessions s
SET finished_at = pipeline.clock(), result = '{SessionResult.FAILED}', error = x.error, run_count = {_RUN_COUNT},
  cost = {_RUN_COST}
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS x(session_id uuid, error text)
WHERE s.id = x.session_id AND s.finished_at IS NULL RETURNING s.*
""")
FINISH_SESSIONS = Statement[SessionRow](f"""
UPDATE pipeline.sessions s
SET finished_at = pipeline.clock(), result = '{SessionResult.COMPLETED}', run_count = {_RUN_COUNT}, cost = {_RUN_COST}
WHERE s.id = ANY(CAST(:ids AS uuid[])) AND s.finished_at IS NULL
  AND EXISTS (SELECT FROM pipeline.runs r WHERE r.session_id = s.id)
  AND NOT EXISTS (SELECT FROM pipeline.runs r
    WHERE r.workflow = s.workflow AND r.session_id = s.id AND {KEEPS_SESSION_OPEN})
RETURNING s.*
""")
