"""Functions and triggers of the schema: the clock, the ids, and what no statement may do.

A trigger here costs nothing on the hot path: its WHEN clause names the forbidden move, so the body
runs only to refuse it.
"""

import re
from dataclasses import fields

from sqlalchemy.dialects import postgresql

from pipeline.domain.renames import NameKind
from pipeline.domain.states import PHASES, DeliveryStatus, MutationOutcome, MutationStatus, RunStatus
from pipeline.domain.values import NewEvent
from pipeline.store import facts, schema
from pipeline.store.predicates import BEFORE_PREPARED, DONE_DELIVERY, RESOLVED_MUTATION, UNOWNED_DELIVERY, sql_list

_PHASES = "ARRAY[" + ", ".join(f"'{phase}'" for phase in PHASES) + "]"

#: A run whose mutation has one of these statuses keeps its inputs.
_KEEPS_INPUTS = sql_list(
    MutationStatus.APPLIED, MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE
)
_IS_SKIPPED = f"r.mutation_outcome = '{MutationOutcome.SKIPPED}'"

COMMIT_OWNS_INPUTS = "commit_owns_inputs"

CLOCK = """
CREATE FUNCTION pipeline.clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$
  SELECT transaction_timestamp()
       + coalesce(nullif(current_setting('pipeline.clock_offset', true), ''), '0')::interval
$$
"""

#: Two bits turn an id of version 4 into one of version 7. Postgres inlines a function of one expression.
UUID7 = """
CREATE FUNCTION pipeline.uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS $$
  SELECT encode(set_bit(set_bit(
    overlay(uuid_send(gen_random_uuid())
            PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
            FROM 1 FOR 6),
    52, 1), 53, 1), 'hex')::uuid
$$
"""

EVENT_IDS = "CREATE SEQUENCE pipeline.event_ids AS bigint"

NEXT_EVENT_ID = """
CREATE FUNCTION pipeline.next_event_id() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT CASE WHEN pg_current_xact_id() IS NULL THEN NULL ELSE nextval('pipeline.event_ids') END
$$
"""

#: Hold the subscriptions of a workflow until the transaction ends, then read them. A volatile function takes a new
#: snapshot for each of its statements: a publisher that waited for a deploy sees what the deploy has changed. A former
#: name leads to the present one (``topic``); ``name`` is as the publisher gave it.
ROUTES = f"""
CREATE FUNCTION pipeline.routes(of text, names text[])
RETURNS TABLE (workflow text, name text, topic text, is_retired boolean, schema_digest text, handlers integer[])
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  present text := of;
  renamed text;
BEGIN
  LOOP
    PERFORM pg_advisory_xact_lock_shared(hashtext('pipeline.subscriptions'), hashtext(present));
    renamed := (SELECT n.name FROM pipeline.renames n
                WHERE n.kind = '{NameKind.WORKFLOW}' AND n.workflow = '' AND n.former = present);
    EXIT WHEN renamed IS NULL;
    present := renamed;
  END LOOP;
  RETURN QUERY SELECT t.workflow, g.name, t.name, t.retired, t.schema_digest, ARRAY(
      SELECT s.handler_id FROM pipeline.subscriptions s WHERE s.workflow = t.workflow AND s.topic = t.name)
    FROM unnest(names) AS g(name)
    LEFT JOIN pipeline.renames n ON n.kind = '{NameKind.TOPIC}' AND n.workflow = present AND n.former = g.name
    JOIN pipeline.topics t ON t.workflow = present AND t.name = coalesce(n.name, g.name);
END
$$
"""

#: The columns that a publisher gives, with their types: a field of ``NewEvent`` is a column of the same name.
_GIVEN = {each.name: schema.events.c[each.name].type.compile(postgresql.dialect()) for each in fields(NewEvent)}  # type: ignore[no-untyped-call]
_GIVEN_COLUMNS = ", ".join(["n integer", *(f"{name} {kind}" for name, kind in _GIVEN.items())])
EVENT_COLUMNS = f"run uuid, {_GIVEN_COLUMNS}"
_INSERTED = ", ".join(_GIVEN)
#: A record reads the JSON value null as no value.
_SELECTED = ", ".join(
    f"coalesce(g.{name}, 'null')" if kind == "JSONB" else "g.routed" if name == "topic" else f"g.{name}"
    for name, kind in _GIVEN.items()
)

#: Insert the rows of ``given`` as events and hand each to the consumers that ``routes`` names for its topic. ``routes``
#: has waited for a deploy that changes them; nothing is numbered, locked or written before.
#: A repeat of a message id is a no-op, within the cohort as well. One unknown topic refuses them all.
#: Ids follow the caller's order; rows are written in the order of their names, so that two publishers
#: of the same events cannot wait for each other in a circle.
INSERT_EVENTS = f"""
unknown AS (
  SELECT DISTINCT g.workflow, g.topic FROM given g
  WHERE NOT EXISTS (SELECT FROM routes t WHERE t.workflow = g.workflow AND t.name = g.topic)
), numbered AS MATERIALIZED (
  SELECT g.*, pipeline.next_event_id() AS id
  FROM (SELECT x.*, t.topic AS routed FROM given x JOIN routes t ON t.workflow = x.workflow AND t.name = x.topic
        WHERE NOT EXISTS (SELECT FROM unknown) ORDER BY x.run, x.n) g
), fresh AS (
  INSERT INTO pipeline.events (id, workflow, caused_by, created_by_run_id, {_INSERTED})
  SELECT g.id, g.workflow, coalesce(g.caused_by, '{{}}'), g.run, {_SELECTED}
  FROM numbered g ORDER BY g.workflow, g.routed, g.message_id, g.id
  ON CONFLICT (workflow, topic, message_id) DO NOTHING
  RETURNING id, workflow, topic, message_id, key, created_by_run_id
), delivered AS (
  INSERT INTO pipeline.deliveries (event_id, handler_id, topic, key)
  SELECT f.id, s.handler_id, f.topic, f.key FROM fresh f
  JOIN (SELECT DISTINCT workflow, topic, handlers FROM routes) t ON t.workflow = f.workflow AND t.topic = f.topic,
  unnest(t.handlers) AS s(handler_id)
)"""

#: Each statement sees what is committed when it begins. Postgres treats the second as the first.
LEVELS_WITH_NEW_SNAPSHOTS = ("read committed", "read uncommitted")

#: ``topics`` is what the publisher has checked its payloads by, maybe long ago. Nothing is written unless each of them
#: still has this name and this schema, in a transaction that sees what is committed now. A topic that is gone from the
#: newest code is unknown to a publisher. Runs of older code may still publish to it.
INSERT_NEW = f"""
WITH known AS MATERIALIZED (
  SELECT * FROM jsonb_to_recordset(CAST(:topics AS jsonb)) AS k(name text, schema_digest text)
), routes AS MATERIALIZED (
  SELECT t.* FROM pipeline.routes(CAST(:workflow AS text), ARRAY(SELECT name FROM known)) t
  JOIN known k ON k.name = t.topic AND k.schema_digest = t.schema_digest
  WHERE t.workflow = :workflow AND t.name = t.topic AND NOT t.is_retired
    AND current_setting('transaction_isolation') IN {LEVELS_WITH_NEW_SNAPSHOTS}
), given AS (
  SELECT CAST(NULL AS uuid) AS run, g.*, CAST(:workflow AS text) AS workflow, CAST(NULL AS bigint[]) AS caused_by
  FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS g({_GIVEN_COLUMNS})
  WHERE (SELECT count(*) FROM routes) = (SELECT count(*) FROM known)
),{INSERT_EVENTS}
SELECT f.id, f.topic, f.message_id, true AS is_new FROM fresh f
UNION ALL SELECT NULL, '', '', false WHERE (SELECT count(*) FROM routes) <> (SELECT count(*) FROM known)
"""

#: A payload may be rewritten only while no run can have seen it: not offered, not reserved, and no run
#: that sees everything is choosing. A consumer that is idle after it saw the old payload is due again.
#: Each event is found by its name: OFFSET keeps the planner from joining all events of the workflow. Those that were
#: seen are taken out by EXCEPT: a NOT IN is a hash only while the planner expects few of them. A payload is found in an
#: object by the id of its event. ``fresh`` are new, and as they were given.
REPLACE_UNSEEN = f"""
WITH given AS (
  SELECT g.* FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS g({_GIVEN_COLUMNS})
), target AS (
  SELECT e.id, coalesce(g.payload, 'null') AS payload, g.title FROM given g
  CROSS JOIN LATERAL (
    SELECT id FROM pipeline.events
    WHERE workflow = CAST(:workflow AS text) AND topic = g.topic AND message_id = g.message_id OFFSET 0) e
  WHERE e.id NOT IN (SELECT unnest(CAST(:fresh AS bigint[])))
), locked AS (
  SELECT d.event_id, d.status = '{DeliveryStatus.PENDING}' AND d.offered_to IS NULL AND NOT EXISTS (
    SELECT FROM pipeline.runs r WHERE r.workflow = :workflow AND r.handler_id = d.handler_id
      AND r.finished_at IS NULL AND r.offered IS NULL AND r.phase IN {BEFORE_PREPARED}) AS is_unseen
  FROM pipeline.deliveries d WHERE d.event_id = ANY(ARRAY(SELECT id FROM target))
  ORDER BY d.event_id FOR UPDATE OF d
), rewritten AS (
  UPDATE pipeline.events e SET
    payload = (SELECT jsonb_object_agg(id, payload) FROM target) -> CAST(e.id AS text),
    title = coalesce((SELECT jsonb_object_agg(id, title) FROM target) ->> CAST(e.id AS text), e.title)
  WHERE e.id = ANY(ARRAY(SELECT id FROM target EXCEPT SELECT l.event_id FROM locked l WHERE NOT l.is_unseen))
  RETURNING e.id, e.topic, e.message_id
), renewed AS (
  UPDATE pipeline.deliveries d SET xid = pg_current_xact_id(), declined = false
  WHERE d.event_id = ANY(ARRAY(SELECT id FROM rewritten))
)
SELECT w.id, w.topic, w.message_id, false AS is_new FROM rewritten w ORDER BY w.id
"""


def _with_variables(sql: str, **variables: str) -> str:
    """Write a statement for the body of a function: each ``:name`` becomes a variable of the function."""
    for name, variable in variables.items():
        sql = sql.replace(f":{name}", variable)
    return sql.strip()


#: A function that runs with the rights of the schema's owner. It looks nothing up in a schema of its caller.
DEFINER = "SECURITY DEFINER SET search_path = pg_catalog, pg_temp"

#: Publish, for roles that may neither read nor write a table. One row per event that was published or replaced. A row
#: without an id: nothing was written, because a topic is not as ``topics`` has it. What only a run may say of an event
#: (its origin) is not taken, nor is a clock that another role has moved. With ``is_replacing`` no run of the workflow
#: is created between the read and the write.
PUBLISH = f"""
CREATE FUNCTION pipeline.publish(to_workflow text, known_topics jsonb, given_events jsonb, is_replacing boolean)
RETURNS TABLE (id bigint, topic text, message_id text, is_new boolean)
LANGUAGE plpgsql VOLATILE {DEFINER} AS $$
#variable_conflict use_column
DECLARE
  answer record;
  fresh_ids bigint[] := '{{}}';
BEGIN
  IF session_user <> current_user THEN
    PERFORM set_config('pipeline.clock_offset', '', true);
  END IF;
  IF is_replacing AND current_setting('transaction_isolation') IN {LEVELS_WITH_NEW_SNAPSHOTS} THEN
    PERFORM FROM pipeline.routes(to_workflow, '{{}}');
    PERFORM FROM pipeline.workflows w WHERE w.name = to_workflow FOR NO KEY UPDATE;
  END IF;
  FOR answer IN
{_with_variables(INSERT_NEW, workflow="to_workflow", topics="known_topics", rows="given_events")}
  LOOP
    id := answer.id; topic := answer.topic; message_id := answer.message_id; is_new := answer.is_new;
    RETURN NEXT;
    IF id IS NULL THEN
      RETURN;
    END IF;
    fresh_ids := fresh_ids || id;
  END LOOP;
  IF is_replacing THEN
    RETURN QUERY
{_with_variables(REPLACE_UNSEEN, workflow="to_workflow", rows="given_events", fresh="fresh_ids")};
  END IF;
END
$$
"""


PRUNER, AUDIT_PRUNED = "retention", "audit.prune"


def page_summary(last: str) -> str:
    """What a page tells of itself; ``last`` is the SQL of its greatest id."""
    return f"""
SELECT (SELECT count(*) FROM dropped) AS dropped, count(*) AS seen, {last} AS position,
  coalesce(max(p.at) > pipeline.clock() - CAST(:shortest AS interval), true) AS is_young
FROM page p
"""


#: A run goes after its inputs and after its retry; with a mutation, when the ledger lets go. A mutation stays while an
#: input of it is open, also one that it released: the refusals in the ledger count the keys of a repeat.
#: A session that is still open gets the number and the cost of its deleted runs added.
_PRUNE_RUNS = f"""
WITH page AS MATERIALIZED (
  SELECT r.id, r.created_at AS at, w.keep_done, w.keep_ledger, w.archives
  FROM pipeline.runs r LEFT JOIN pipeline.workflows w ON w.name = r.workflow
  WHERE r.id > CAST(:position AS uuid) ORDER BY r.id LIMIT :limit
), gone AS MATERIALIZED (
  SELECT r.id, p.archives FROM page p JOIN pipeline.runs r ON r.id = p.id
  LEFT JOIN pipeline.mutations m ON m.id = r.mutation_id
  WHERE r.finished_at < pipeline.clock() - CASE WHEN m.id IS NULL THEN p.keep_done ELSE p.keep_ledger END
    AND NOT r.retry_pending
    AND (m.id IS NULL OR (m.resolved_at < pipeline.clock() - p.keep_ledger AND m.next_monitor_at IS NULL
      AND (m.found_late_at IS NULL OR m.acknowledged_by IS NOT NULL)))
    AND NOT EXISTS (SELECT FROM pipeline.blocks b WHERE b.run_id = r.id AND b.closed_at IS NULL)
    AND NOT EXISTS (SELECT FROM pipeline.runs c WHERE c.retry_of = r.id)
    AND NOT EXISTS (
      SELECT FROM unnest(r.event_ids) AS i(event_id)
      JOIN pipeline.deliveries d ON d.event_id = i.event_id AND d.handler_id = r.handler_id
      WHERE d.run_id = r.id OR (m.id IS NOT NULL AND d.status NOT IN {DONE_DELIVERY}))
), unblocked AS (
  DELETE FROM pipeline.blocks b USING gone g WHERE b.run_id = g.id
), settled AS (
  DELETE FROM pipeline.mutations m USING gone g WHERE m.run_id = g.id RETURNING m.*
), dropped AS (
  DELETE FROM pipeline.runs r USING gone g WHERE r.id = g.id RETURNING r.*
), numbered AS (
  SELECT session_id, count(*) FILTER (WHERE status = '{RunStatus.COMMITTED}') AS runs, sum(cost) AS cost
  FROM dropped GROUP BY session_id
), open AS (
  SELECT s.id FROM pipeline.sessions s WHERE s.finished_at IS NULL AND s.id IN (SELECT session_id FROM numbered)
  ORDER BY s.id FOR NO KEY UPDATE
), counted AS (
  UPDATE pipeline.sessions s SET run_count = coalesce(s.run_count, 0) + n.runs,
    cost = CASE WHEN n.cost IS NULL THEN s.cost ELSE coalesce(s.cost, 0) + n.cost END
  FROM numbered n JOIN open o ON o.id = n.session_id WHERE s.id = o.id
), archived AS (
  INSERT INTO pipeline.archive (kind, id, workflow, content)
  SELECT 'run', CAST(x.id AS text), x.workflow, to_jsonb(x) || jsonb_build_object('mutation', to_jsonb(s))
  FROM dropped x JOIN gone g ON g.id = x.id AND g.archives LEFT JOIN settled s ON s.run_id = x.id
)
{page_summary("max(CAST(p.id AS text))")}"""

#: An act stays at least as long as the mutation it is about. Acts that belong to no workflow stay.
#: What is deleted is named in an act of its own, which is chained as all are.
_PRUNE_AUDIT = f"""
WITH page AS MATERIALIZED (
  SELECT a.id, a.at, a.mutation_id, w.keep_ledger, w.archives
  FROM pipeline.audit a LEFT JOIN pipeline.workflows w ON w.name = coalesce((
    SELECT n.name FROM pipeline.renames n
    WHERE n.kind = '{NameKind.WORKFLOW}' AND n.workflow = '' AND n.former = a.workflow), a.workflow)
  WHERE a.id > CAST(:position AS bigint) ORDER BY a.id LIMIT :limit
), dropped AS (
  DELETE FROM pipeline.audit a USING page p
  WHERE a.id = p.id AND p.at < pipeline.clock() - p.keep_ledger
    AND NOT EXISTS (SELECT FROM pipeline.mutations m WHERE m.id = p.mutation_id)
  RETURNING a.*
), recorded AS (
  INSERT INTO pipeline.audit (actor, act, evidence)
  SELECT '{PRUNER}', '{AUDIT_PRUNED}', jsonb_build_object('ids', jsonb_agg(x.id ORDER BY x.id))
  FROM dropped x HAVING count(*) > 0
), archived AS (
  INSERT INTO pipeline.archive (kind, id, workflow, content)
  SELECT 'audit', CAST(x.id AS text), x.workflow, to_jsonb(x)
  FROM dropped x JOIN page p ON p.id = x.id AND p.archives
)
{page_summary("max(p.id)")}"""


def _pruning_function(name: str, id_type: str, position_type: str, sql: str) -> str:
    body = _with_variables(sql, position="from_position", limit="page_limit", shortest="shortest_kept")
    return f"""
CREATE FUNCTION pipeline.{name}(from_position {id_type}, page_limit integer, shortest_kept interval)
RETURNS TABLE (dropped bigint, seen bigint, "position" {position_type}, is_young boolean)
LANGUAGE plpgsql VOLATILE {DEFINER} AS $$
#variable_conflict use_column
BEGIN
  IF session_user <> current_user THEN
    PERFORM set_config('pipeline.clock_offset', '', true);
  END IF;
  PERFORM set_config('pipeline.is_pruning', 'on', true);
  RETURN QUERY
{body};
  PERFORM set_config('pipeline.is_pruning', '', true);
END
$$
"""


#: Retention, for a role that may delete neither mutations nor acts: it deletes what workflows no longer keep.
PRUNE_RUNS = _pruning_function("prune_runs", "uuid", "text", _PRUNE_RUNS)
PRUNE_AUDIT = _pruning_function("prune_audit", "bigint", "bigint", _PRUNE_AUDIT)

#: Only a function that is retention sets it. The owner of the schema can set it too: see the guide on access.
_IS_NOT_PRUNING = "current_setting('pipeline.is_pruning', true) IS DISTINCT FROM 'on'"

AUDIT_FINAL = """
CREATE TRIGGER audit_final BEFORE UPDATE OR TRUNCATE ON pipeline.audit FOR EACH STATEMENT
WHEN (true)
EXECUTE FUNCTION pipeline.refuse('an act in the audit is never changed')
"""

AUDIT_KEPT = f"""
CREATE TRIGGER audit_kept BEFORE DELETE ON pipeline.audit FOR EACH STATEMENT
WHEN ({_IS_NOT_PRUNING})
EXECUTE FUNCTION pipeline.refuse('an act in the audit is deleted by retention only')
"""

LEDGER_KEPT = f"""
CREATE TRIGGER mutations_kept BEFORE DELETE OR TRUNCATE ON pipeline.mutations FOR EACH STATEMENT
WHEN ({_IS_NOT_PRUNING})
EXECUTE FUNCTION pipeline.refuse('a mutation is deleted by retention only')
"""

LINKS_KEPT = """
CREATE TRIGGER audit_links_kept BEFORE DELETE OR TRUNCATE ON pipeline.audit_links FOR EACH STATEMENT
WHEN (true)
EXECUTE FUNCTION pipeline.refuse('a link of the audit is never deleted')
"""

LINKS_FINAL = """
CREATE TRIGGER audit_links_final BEFORE UPDATE ON pipeline.audit_links FOR EACH ROW
WHEN (OLD.position IS NOT NULL)
EXECUTE FUNCTION pipeline.refuse('a link of the audit is never changed')
"""

#: An act waits to be chained, whoever wrote it.
AWAIT_LINK = f"""
CREATE FUNCTION pipeline.await_link() RETURNS trigger LANGUAGE plpgsql {DEFINER} AS $$
BEGIN
  INSERT INTO pipeline.audit_links (audit_id) VALUES (NEW.id);
  RETURN NULL;
END
$$
"""

AUDIT_AWAITS_LINK = """
CREATE TRIGGER audit_awaits_link AFTER INSERT ON pipeline.audit FOR EACH ROW
EXECUTE FUNCTION pipeline.await_link()
"""

#: All of an act, in an encoding that no setting of a session changes.
AUDIT_ROW_HASH = """
CREATE FUNCTION pipeline.audit_row_hash(act_id bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT encode(sha256(convert_to(jsonb_build_array(a.id, (extract(epoch FROM a.at) * 1000000)::bigint, a.actor,
    a.act, a.claimed, a.workflow, a.run_id, a.mutation_id, a.event_id, a.reason, a.evidence)::text, 'UTF8')), 'hex')
  FROM pipeline.audit a WHERE a.id = act_id
$$
"""

#: A link depends on all before it.
LINK_HASH = """
CREATE FUNCTION pipeline.link_hash(before text, row_hash text, "position" bigint, chained_at timestamptz) RETURNS text
LANGUAGE sql STABLE AS $$
  SELECT encode(sha256(convert_to(concat_ws('/', before, row_hash, "position",
    (extract(epoch FROM chained_at) * 1000000)::bigint), 'UTF8')), 'hex')
$$
"""

#: Chain acts that are committed, in the order of their ids. An act that commits late is chained behind the others.
#: A second caller waits for the first.
CHAIN_AUDIT = f"""
CREATE FUNCTION pipeline.chain_audit(max_acts integer)
RETURNS TABLE ("position" bigint, hash text, acts bigint)
LANGUAGE plpgsql VOLATILE {DEFINER} AS $$
#variable_conflict use_variable
DECLARE
  act record;
BEGIN
  IF session_user <> current_user THEN
    PERFORM set_config('pipeline.clock_offset', '', true);
  END IF;
  PERFORM pg_advisory_xact_lock(hashtext('pipeline.audit'));
  SELECT s.position, s.hash INTO position, hash FROM pipeline.audit_links s
  WHERE s.position IS NOT NULL ORDER BY s.position DESC LIMIT 1;
  position := coalesce(position, 0);
  hash := coalesce(hash, '');
  acts := 0;
  FOR act IN
    SELECT a.id, pipeline.audit_row_hash(a.id) AS row_hash, pipeline.clock() AS now
    FROM pipeline.audit_links s JOIN pipeline.audit a ON a.id = s.audit_id
    WHERE s.position IS NULL ORDER BY s.audit_id LIMIT max_acts
  LOOP
    position := position + 1;
    hash := pipeline.link_hash(hash, act.row_hash, position, act.now);
    acts := acts + 1;
    UPDATE pipeline.audit_links s SET position = position, row_hash = act.row_hash, hash = hash, chained_at = act.now
    WHERE s.audit_id = act.id;
  END LOOP;
  RETURN NEXT;
END
$$
"""


def signature(function: str) -> str:
    """Name a function with the types of its parameters, from the statement that creates it."""
    found = re.search(r"CREATE FUNCTION (\S+?)\(([^)]*)\)", function)
    assert found is not None
    types = ", ".join(each.split(maxsplit=1)[1] for each in found[2].split(", ") if each)
    return f"FUNCTION {found[1]}({types})"


#: What runs with the rights of the owner is called by those whom the owner lets.
OWNERS_ONLY = tuple(
    f"REVOKE EXECUTE ON {signature(function)} FROM PUBLIC"
    for function in (PUBLISH, PRUNE_RUNS, PRUNE_AUDIT, CHAIN_AUDIT)
)

_FACTS = ", ".join(f"{name} {fact.type}" for name, fact in {**facts.WORKFLOW_FACTS, **facts.HANDLER_FACTS}.items())

#: The facts of current handlers. With ``is_locking`` the rows of their workflows are locked first. The facts are read
#: in a later snapshot, which shows all that other holders of the lock have committed.
HANDLER_FACTS = f"""
CREATE FUNCTION pipeline.handler_facts(names text[], is_locking boolean)
RETURNS TABLE ({_FACTS})
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
  IF is_locking THEN
    PERFORM FROM pipeline.workflows w WHERE w.name = ANY(names) ORDER BY w.name FOR NO KEY UPDATE;
  END IF;
  RETURN QUERY {facts.handler_facts("names").strip()};
END
$$
"""

REFUSE = """
CREATE FUNCTION pipeline.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation',
    CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
END
$$
"""

#: A commit that does not consume exactly what its run has reserved would lose or repeat an event.
REQUIRE_INPUTS = f"""
CREATE FUNCTION pipeline.require_inputs(run uuid, owned bigint, expected integer) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
  IF owned <> expected THEN
    RAISE EXCEPTION 'run % owns % of its % reserved events', run, owned, expected
      USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = '{COMMIT_OWNS_INPUTS}', DETAIL = run::text,
        HINT = format('owner of %s of its %s reserved events', owned, expected);
  END IF;
  RETURN owned;
END
$$
"""

REFUSE_RELEASE = f"""
CREATE FUNCTION pipeline.refuse_release() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (
    SELECT FROM pipeline.runs r JOIN pipeline.mutations m ON m.id = r.mutation_id
    WHERE r.id = OLD.run_id AND m.status IN {_KEEPS_INPUTS}
  ) THEN
    RAISE EXCEPTION 'event % stays reserved: its run % holds an applied or unresolved mutation',
      OLD.event_id, OLD.run_id USING ERRCODE = 'integrity_constraint_violation',
      CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
  END IF;
  RETURN NEW;
END
$$
"""

REFUSE_TRANSFER = """
CREATE FUNCTION pipeline.refuse_transfer() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM pipeline.runs r WHERE r.id = NEW.run_id AND r.retry_of = OLD.run_id) THEN
    RAISE EXCEPTION 'event % stays with run %: only the retry of that run may take it',
      OLD.event_id, OLD.run_id USING ERRCODE = 'integrity_constraint_violation',
      CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
  END IF;
  RETURN NEW;
END
$$
"""

REFUSE_SKIP = f"""
CREATE FUNCTION pipeline.refuse_skip() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM pipeline.runs r WHERE r.id = OLD.run_id AND {_IS_SKIPPED}) THEN
    RAISE EXCEPTION 'event % stays reserved: no operator skipped the mutation of its run %',
      OLD.event_id, OLD.run_id USING ERRCODE = 'integrity_constraint_violation',
      CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
  END IF;
  RETURN NEW;
END
$$
"""

PHASE_ONLY_GROWS = f"""
CREATE TRIGGER runs_phase_only_grows BEFORE UPDATE OF phase ON pipeline.runs FOR EACH ROW
WHEN (array_position({_PHASES}, NEW.phase) < array_position({_PHASES}, OLD.phase))
EXECUTE FUNCTION pipeline.refuse('the phase of a run only grows')
"""

STOPPED_STAYS_STOPPED = """
CREATE TRIGGER runs_stopped_stays_stopped BEFORE UPDATE OF status ON pipeline.runs FOR EACH ROW
WHEN (OLD.finished_at IS NOT NULL AND NEW.status <> OLD.status)
EXECUTE FUNCTION pipeline.refuse('a finished run keeps its status; a new run does the rest')
"""

RESOLVED_STAYS_RESOLVED = f"""
CREATE TRIGGER mutations_resolved_stays_resolved BEFORE UPDATE OF status ON pipeline.mutations FOR EACH ROW
WHEN (OLD.status IN {RESOLVED_MUTATION} AND NEW.status <> OLD.status)
EXECUTE FUNCTION pipeline.refuse('a resolved mutation keeps its status')
"""

DONE_STAYS_DONE = f"""
CREATE TRIGGER deliveries_done_stays_done BEFORE UPDATE OF status ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status IN {DONE_DELIVERY} AND NEW.status <> OLD.status)
EXECUTE FUNCTION pipeline.refuse('a consumed or skipped event is never delivered again')
"""

RELEASE_GUARDED = f"""
CREATE TRIGGER deliveries_release_guarded BEFORE UPDATE OF status ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status = '{DeliveryStatus.RESERVED}' AND NEW.status IN {UNOWNED_DELIVERY})
EXECUTE FUNCTION pipeline.refuse_release()
"""

TRANSFER_GUARDED = f"""
CREATE TRIGGER deliveries_transfer_guarded BEFORE UPDATE OF run_id ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status = '{DeliveryStatus.RESERVED}' AND NEW.run_id <> OLD.run_id)
EXECUTE FUNCTION pipeline.refuse_transfer()
"""

SKIP_GUARDED = f"""
CREATE TRIGGER deliveries_skip_guarded BEFORE UPDATE OF status ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status = '{DeliveryStatus.RESERVED}' AND NEW.status = '{DeliveryStatus.SKIPPED}')
EXECUTE FUNCTION pipeline.refuse_skip()
"""

OPEN_NOT_DELETED = f"""
CREATE TRIGGER deliveries_open_not_deleted BEFORE DELETE ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status IN ('{DeliveryStatus.PENDING}', '{DeliveryStatus.RESERVED}', '{DeliveryStatus.QUARANTINED}'))
EXECUTE FUNCTION pipeline.refuse('an event that is not done is never deleted')
"""

#: The oldest version of the code that this schema still works with. A migration that only adds leaves it as it is.
OLDEST_COMPATIBLE_CODE = """
CREATE FUNCTION pipeline.oldest_compatible_code() RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '0100' $$
"""

BEFORE_TABLES: tuple[str, ...] = (CLOCK, UUID7, EVENT_IDS, NEXT_EVENT_ID, OLDEST_COMPATIBLE_CODE)
AFTER_TABLES: tuple[str, ...] = (
    ROUTES,
    PUBLISH,
    PRUNE_RUNS,
    PRUNE_AUDIT,
    AUDIT_ROW_HASH,
    LINK_HASH,
    CHAIN_AUDIT,
    AWAIT_LINK,
    *OWNERS_ONLY,
    HANDLER_FACTS,
    REFUSE,
    REQUIRE_INPUTS,
    REFUSE_RELEASE,
    REFUSE_TRANSFER,
    REFUSE_SKIP,
    PHASE_ONLY_GROWS,
    STOPPED_STAYS_STOPPED,
    RESOLVED_STAYS_RESOLVED,
    DONE_STAYS_DONE,
    RELEASE_GUARDED,
    TRANSFER_GUARDED,
    SKIP_GUARDED,
    OPEN_NOT_DELETED,
    AUDIT_FINAL,
    AUDIT_KEPT,
    LEDGER_KEPT,
    LINKS_KEPT,
    LINKS_FINAL,
    AUDIT_AWAITS_LINK,
)
