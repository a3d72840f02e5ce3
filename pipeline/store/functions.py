"""Functions and triggers of the schema: the clock, the ids, and what no statement may do.

A trigger here costs nothing on the hot path: its WHEN clause names the forbidden move, so the body
runs only to refuse it.
"""

from pipeline.domain.renames import NameKind
from pipeline.domain.states import PHASES, DeliveryStatus, MutationOutcome, MutationStatus
from pipeline.store import facts
from pipeline.store.predicates import DONE_DELIVERY, RESOLVED_MUTATION, UNOWNED_DELIVERY, sql_list

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

UUID7 = """
CREATE FUNCTION pipeline.uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS $$
  SELECT encode(set_byte(stamped, 6, (get_byte(stamped, 6) & 15) | 112), 'hex')::uuid
  FROM (SELECT overlay(uuid_send(gen_random_uuid())
                       PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                       FROM 1 FOR 6) AS stamped) AS random
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
)
