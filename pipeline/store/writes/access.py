"""Guarded writes of what callers of the API own. Only ``transitions`` may import this.

A row holds the SHA-256 hash of its secret and never the secret itself.
"""

from pipeline.store.database import Command, Statement
from pipeline.store.schema import AccessTokenRow, ApiRequestRow, LoginRow, SavedViewRow

_RIGHTS = ":name, :role, :can_see_payloads, CAST(:workflows AS text[])"

INSERT_TOKEN = Statement[AccessTokenRow](f"""
INSERT INTO pipeline.access_tokens
  (secret_hash, hint, name, role, can_see_payloads, workflows, created_by, expires_at)
VALUES (:secret_hash, :hint, {_RIGHTS}, :created_by, pipeline.clock() + CAST(:lifetime AS interval))
RETURNING *
""")

REVOKE_TOKEN = Statement[AccessTokenRow]("""
UPDATE pipeline.access_tokens SET revoked_at = pipeline.clock(), revoked_by = :revoked_by
WHERE id = :id AND revoked_at IS NULL RETURNING *
""")

TOUCH_TOKEN = Command("UPDATE pipeline.access_tokens SET last_used_at = pipeline.clock() WHERE id = :id")

INSERT_LOGIN = Statement[LoginRow](f"""
INSERT INTO pipeline.logins
  (secret_hash, source, token_id, name, role, can_see_payloads, workflows, opened_at, seen_at, expires_at)
VALUES (:secret_hash, :source, :token_id, {_RIGHTS},
        CASE WHEN :is_open THEN pipeline.clock() END, CASE WHEN :is_open THEN pipeline.clock() END,
        pipeline.clock() + CAST(:lifetime AS interval))
RETURNING *
""")

#: The link's hash is replaced, so that the link is used once.
OPEN_LINK = Statement[LoginRow]("""
UPDATE pipeline.logins
SET secret_hash = :secret_hash, opened_at = pipeline.clock(), seen_at = pipeline.clock(),
    expires_at = pipeline.clock() + CAST(:lifetime AS interval)
WHERE secret_hash = :link_hash AND opened_at IS NULL AND expires_at > pipeline.clock() RETURNING *
""")

TOUCH_LOGIN = Command("UPDATE pipeline.logins SET seen_at = pipeline.clock() WHERE id = :id")

END_LOGIN = Statement[LoginRow]("DELETE FROM pipeline.logins WHERE secret_hash = :secret_hash RETURNING *")

DELETE_EXPIRED_LOGINS = Command("""
DELETE FROM pipeline.logins WHERE id = ANY(ARRAY(
  SELECT id FROM pipeline.logins WHERE expires_at < pipeline.clock() ORDER BY expires_at LIMIT 1000
  FOR UPDATE SKIP LOCKED))
""")


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


SAVE_VIEW = Statement[SavedViewRow]("""
INSERT INTO pipeline.saved_views (owner, name, page, query) VALUES (:owner, :name, :page, :query)
ON CONFLICT (owner, name) DO UPDATE
SET page = excluded.page, query = excluded.query, saved_at = pipeline.clock()
RETURNING *
""")

DELETE_VIEW = Command("DELETE FROM pipeline.saved_views WHERE owner = :owner AND name = :name")
