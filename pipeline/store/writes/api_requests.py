"""Guarded writes of answers that the HTTP API keeps by Idempotency-Key. Only ``transitions`` may import this."""

from pipeline.store.database import Command, Statement
from pipeline.store.schema import ApiRequestRow

#: A key is free after 24 hours. A request that did not end within a minute has lost its process.
BEGIN_REQUEST = Statement[ApiRequestRow]("""
INSERT INTO pipeline.api_requests (caller, key, request_hash) VALUES (:caller, :key, :request_hash)
ON CONFLICT (caller, key) DO UPDATE
SET request_hash = excluded.request_hash, begun_at = excluded.begun_at, status = NULL, answer = NULL
WHERE api_requests.begun_at < pipeline.clock() - interval '24 hours'
  OR api_requests.status IS NULL AND api_requests.request_hash = excluded.request_hash
     AND api_requests.begun_at < pipeline.clock() - interval '1 minute'
RETURNING *
""")

SAVE_ANSWER = Command("""
UPDATE pipeline.api_requests SET status = :status, answer = CAST(:answer AS jsonb)
WHERE caller = :caller AND key = :key AND status IS NULL
""")

#: A request that changed nothing frees its key.
FORGET_REQUEST = Command("""
DELETE FROM pipeline.api_requests WHERE caller = :caller AND key = :key AND status IS NULL
""")

DELETE_OLD_REQUESTS = Command("""
DELETE FROM pipeline.api_requests WHERE (caller, key) IN (
  SELECT caller, key FROM pipeline.api_requests WHERE begun_at < pipeline.clock() - interval '24 hours'
  ORDER BY begun_at LIMIT 100 FOR UPDATE SKIP LOCKED)
""")
