"""Create the schema: tables, indexes, and the functions and triggers that refuse forbidden writes.

Databases of versions 0001 to 0009 come from before the first release; ``pipeline db upgrade`` refuses them.
"""

from alembic import op

revision = "0100"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = (
    """
CREATE FUNCTION pipeline.clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$
  SELECT transaction_timestamp()
       + coalesce(nullif(current_setting('pipeline.clock_offset', true), ''), '0')::interval
$$
    """,
    """
CREATE FUNCTION pipeline.uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS $$
  SELECT encode(set_bit(set_bit(
    overlay(uuid_send(gen_random_uuid())
            PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
            FROM 1 FOR 6),
    52, 1), 53, 1), 'hex')::uuid
$$
    """,
    """
CREATE SEQUENCE pipeline.event_ids AS bigint
    """,
    """
CREATE FUNCTION pipeline.next_event_id() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT CASE WHEN pg_current_xact_id() IS NULL THEN NULL ELSE nextval('pipeline.event_ids') END
$$
    """,
    """
CREATE FUNCTION pipeline.oldest_compatible_code() RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '0100' $$
    """,
    """
CREATE TABLE pipeline.workflows (
    name TEXT NOT NULL,
    version INTEGER DEFAULT 1 NOT NULL,
    fingerprint TEXT DEFAULT '' NOT NULL,
    known_fingerprints TEXT[] DEFAULT '{}' NOT NULL,
    desired TEXT DEFAULT 'active' NOT NULL,
    maintenance BOOLEAN DEFAULT false NOT NULL,
    maintenance_reason TEXT,
    maintenance_since TIMESTAMP WITH TIME ZONE,
    concurrency INTEGER DEFAULT 1 NOT NULL,
    on_uncertain TEXT DEFAULT 'pause' NOT NULL,
    on_logic_error TEXT DEFAULT 'maintenance' NOT NULL,
    on_exhausted TEXT DEFAULT 'block' NOT NULL,
    keep_done INTERVAL,
    keep_ledger INTERVAL,
    archives BOOLEAN DEFAULT false NOT NULL,
    codec_secret JSONB,
    turns INTEGER[] DEFAULT '{}' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT workflows_pk PRIMARY KEY (name),
    CONSTRAINT workflows_desired_known CHECK (desired IN ('active', 'paused')),
    CONSTRAINT workflows_on_uncertain_known CHECK (on_uncertain IN ('pause', 'contain')),
    CONSTRAINT workflows_on_logic_error_known CHECK (on_logic_error IN ('maintenance', 'quarantine')),
    CONSTRAINT workflows_on_exhausted_known CHECK (on_exhausted IN ('block', 'quarantine')),
    CONSTRAINT workflows_concurrency_positive CHECK (concurrency >= 1),
    CONSTRAINT workflows_maintenance_has_since CHECK (maintenance = (maintenance_since IS NOT NULL)),
    CONSTRAINT workflows_ledger_outlives_done CHECK ((keep_ledger IS NOT NULL) <= coalesce(keep_ledger >= keep_done, false))
)
    """,
    """
CREATE INDEX workflows_maintenance ON pipeline.workflows (name) WHERE maintenance
    """,
    """
CREATE TABLE pipeline.topics (
    workflow TEXT NOT NULL,
    name TEXT NOT NULL,
    uid UUID DEFAULT pipeline.uuid7() NOT NULL,
    schema JSONB,
    is_encrypted BOOLEAN DEFAULT false NOT NULL,
    schema_digest TEXT GENERATED ALWAYS AS (coalesce(md5(schema::text), '') || CASE WHEN is_encrypted THEN ' ' || uid::text ELSE '' END) STORED NOT NULL,
    retired BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT topics_pk PRIMARY KEY (workflow, name)
)
    """,
    """
CREATE TABLE pipeline.renames (
    kind TEXT NOT NULL,
    workflow TEXT NOT NULL,
    former TEXT NOT NULL,
    name TEXT NOT NULL,
    renamed_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT renames_kind_known CHECK (kind IN ('workflow', 'topic', 'handler')),
    CONSTRAINT renames_pk PRIMARY KEY (kind, workflow, former)
)
    """,
    """
CREATE TABLE pipeline.handlers (
    id INTEGER GENERATED ALWAYS AS IDENTITY,
    uid UUID DEFAULT pipeline.uuid7() NOT NULL,
    workflow TEXT NOT NULL,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    batch INTEGER DEFAULT 1 NOT NULL,
    ordered BOOLEAN DEFAULT false NOT NULL,
    after_failed_mutation TEXT DEFAULT 'prepare' NOT NULL,
    failure_policy JSONB DEFAULT '{}' NOT NULL,
    publishes TEXT[] DEFAULT '{}' NOT NULL,
    retired BOOLEAN DEFAULT false NOT NULL,
    state JSONB,
    wake_at TIMESTAMP WITH TIME ZONE,
    schedule TEXT,
    next_run_at TIMESTAMP WITH TIME ZONE,
    retry_at TIMESTAMP WITH TIME ZONE,
    unclaimed_since TIMESTAMP WITH TIME ZONE,
    consecutive_failures INTEGER DEFAULT 0 NOT NULL,
    failing_since TIMESTAMP WITH TIME ZONE,
    failing_events BIGINT[],
    idle_snapshot pg_snapshot,
    idle_at TIMESTAMP WITH TIME ZONE,
    low_watermark BIGINT DEFAULT 0 NOT NULL,
    horizon BIGINT,
    horizon_xmax xid8,
    CONSTRAINT handlers_pk PRIMARY KEY (id),
    CONSTRAINT handlers_workflow_name_once UNIQUE (workflow, name),
    CONSTRAINT handlers_kind_known CHECK (kind IN ('consumer', 'producer')),
    CONSTRAINT handlers_after_failed_mutation_known CHECK (after_failed_mutation IN ('prepare', 'mutate')),
    CONSTRAINT handlers_batch_positive CHECK (batch >= 1),
    CONSTRAINT handlers_horizon_complete CHECK ((horizon IS NULL) = (horizon_xmax IS NULL)),
    CONSTRAINT handlers_workflow_fk FOREIGN KEY(workflow) REFERENCES pipeline.workflows (name)
)
    """,
    """
CREATE INDEX handlers_slot ON pipeline.handlers (next_run_at) WHERE next_run_at IS NOT NULL
    """,
    """
CREATE INDEX handlers_wake ON pipeline.handlers (wake_at) WHERE wake_at IS NOT NULL
    """,
    """
CREATE TABLE pipeline.subscriptions (
    workflow TEXT NOT NULL,
    topic TEXT NOT NULL,
    handler_id INTEGER NOT NULL,
    backfill_until BIGINT,
    backfill_after TEXT DEFAULT '' NOT NULL,
    CONSTRAINT subscriptions_pk PRIMARY KEY (workflow, topic, handler_id),
    CONSTRAINT subscriptions_handler_id_fk FOREIGN KEY(handler_id) REFERENCES pipeline.handlers (id)
)
    """,
    """
CREATE INDEX subscriptions_backfill ON pipeline.subscriptions (workflow, topic, handler_id) WHERE backfill_until IS NOT NULL
    """,
    """
CREATE TABLE pipeline.events (
    id BIGINT DEFAULT pipeline.next_event_id() NOT NULL,
    workflow TEXT NOT NULL,
    topic TEXT NOT NULL,
    message_id TEXT NOT NULL,
    key TEXT,
    title TEXT,
    payload JSONB NOT NULL,
    caused_by BIGINT[] DEFAULT '{}' NOT NULL,
    created_by_run_id UUID,
    traceparent TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT events_pk PRIMARY KEY (id),
    CONSTRAINT events_workflow_topic_message_id_once UNIQUE (workflow, topic, message_id)
)
    """,
    """
CREATE INDEX events_created_by ON pipeline.events (created_by_run_id) WHERE created_by_run_id IS NOT NULL
    """,
    """
CREATE TABLE pipeline.deliveries (
    event_id BIGINT NOT NULL,
    handler_id INTEGER NOT NULL,
    topic TEXT NOT NULL,
    status TEXT DEFAULT 'pending' NOT NULL,
    run_id UUID,
    offered_to UUID,
    key TEXT,
    key_offered BOOLEAN GENERATED ALWAYS AS (key IS NOT NULL AND offered_to IS NOT NULL) STORED NOT NULL,
    available_at TIMESTAMP WITH TIME ZONE,
    failures SMALLINT DEFAULT 0 NOT NULL,
    declined BOOLEAN DEFAULT false NOT NULL,
    suspect BOOLEAN DEFAULT false NOT NULL,
    slice_limit INTEGER,
    group_size INTEGER,
    narrowing_declined BOOLEAN DEFAULT false NOT NULL,
    failing_since TIMESTAMP WITH TIME ZONE,
    error TEXT,
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    CONSTRAINT deliveries_pk PRIMARY KEY (event_id, handler_id),
    CONSTRAINT deliveries_status_known CHECK (status IN ('pending', 'reserved', 'consumed', 'skipped', 'quarantined')),
    CONSTRAINT deliveries_reserved_has_owner CHECK ((status IN ('reserved', 'consumed')) <= (run_id IS NOT NULL)),
    CONSTRAINT deliveries_open_has_no_owner CHECK ((status IN ('pending', 'quarantined')) <= (run_id IS NULL)),
    CONSTRAINT deliveries_only_pending_is_offered CHECK ((offered_to IS NOT NULL) <= (status = 'pending')),
    CONSTRAINT deliveries_slice_limit_positive CHECK (slice_limit >= 1),
    CONSTRAINT deliveries_group_has_several CHECK (group_size >= 2),
    CONSTRAINT deliveries_sliced_in_one_way
      CHECK (num_nonnulls(slice_limit, group_size) + narrowing_declined::integer <= 1)
)
 WITH (fillfactor = 50)
    """,
    """
CREATE INDEX deliveries_declined ON pipeline.deliveries (handler_id, declined, event_id) WHERE status = 'pending' AND declined
    """,
    """
CREATE INDEX deliveries_delayed ON pipeline.deliveries (handler_id, available_at) WHERE status = 'pending' AND available_at IS NOT NULL
    """,
    """
CREATE INDEX deliveries_failed ON pipeline.deliveries (handler_id) WHERE failing_since IS NOT NULL AND status IN ('pending', 'reserved')
    """,
    """
CREATE INDEX deliveries_held_keys ON pipeline.deliveries (handler_id, key, event_id) WHERE key IS NOT NULL AND status IN ('pending', 'reserved') AND (status = 'reserved' OR key_offered OR available_at IS NOT NULL)
    """,
    """
CREATE INDEX deliveries_pending ON pipeline.deliveries (handler_id, event_id) WHERE status = 'pending'
    """,
    """
CREATE INDEX deliveries_pending_of_topic ON pipeline.deliveries (handler_id, topic, event_id) WHERE status = 'pending'
    """,
    """
CREATE INDEX deliveries_quarantined ON pipeline.deliveries (handler_id, event_id) WHERE status = 'quarantined'
    """,
    """
CREATE INDEX deliveries_reserved ON pipeline.deliveries (handler_id, event_id) WHERE status = 'reserved'
    """,
    """
CREATE INDEX deliveries_unseen ON pipeline.deliveries (handler_id, xid) WHERE status = 'pending'
    """,
    """
CREATE TABLE pipeline.sessions (
    id UUID DEFAULT pipeline.uuid7() NOT NULL,
    workflow TEXT NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    finished_at TIMESTAMP WITH TIME ZONE,
    result TEXT,
    error TEXT,
    run_count INTEGER,
    cost NUMERIC,
    CONSTRAINT sessions_pk PRIMARY KEY (id),
    CONSTRAINT sessions_result_known CHECK (result IN ('completed', 'failed')),
    CONSTRAINT sessions_finished_has_result CHECK ((finished_at IS NULL) = (result IS NULL)),
    CONSTRAINT sessions_workflow_fk FOREIGN KEY(workflow) REFERENCES pipeline.workflows (name)
)
    """,
    """
CREATE UNIQUE INDEX sessions_one_open ON pipeline.sessions (workflow) WHERE finished_at IS NULL
    """,
    """
CREATE TABLE pipeline.runs (
    id UUID DEFAULT pipeline.uuid7() NOT NULL,
    workflow TEXT NOT NULL,
    handler_id INTEGER NOT NULL,
    session_id UUID NOT NULL,
    phase TEXT DEFAULT 'pending' NOT NULL,
    status TEXT DEFAULT 'active' NOT NULL,
    mutation_outcome TEXT DEFAULT '' NOT NULL,
    mutation_id UUID,
    offered BIGINT[],
    event_ids BIGINT[] DEFAULT '{}' NOT NULL,
    prepare_result JSONB,
    output_state JSONB,
    error TEXT,
    error_type TEXT,
    error_frames TEXT,
    retry_of UUID,
    retry_pending BOOLEAN DEFAULT false NOT NULL,
    retry_at TIMESTAMP WITH TIME ZONE,
    attempt INTEGER DEFAULT 1 NOT NULL,
    fence BIGINT DEFAULT 0 NOT NULL,
    lease_expires_at TIMESTAMP WITH TIME ZONE,
    lease_duration INTERVAL,
    worker TEXT,
    dispatched_at TIMESTAMP WITH TIME ZONE,
    snapshot pg_snapshot,
    traceparent TEXT,
    cost NUMERIC,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE,
    finished_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT runs_pk PRIMARY KEY (id),
    CONSTRAINT runs_phase_known CHECK (phase IN ('pending', 'preparing', 'prepared', 'mutating', 'mutated', 'emitting', 'committed')),
    CONSTRAINT runs_status_known CHECK (status IN ('active', 'paused:transient', 'paused:approval', 'paused:reconciliation', 'failed:logic', 'failed:internal', 'committed', 'crashed')),
    CONSTRAINT runs_mutation_outcome_known CHECK (mutation_outcome IN ('', 'success', 'failure', 'skipped')),
    CONSTRAINT runs_committed_together CHECK ((phase = 'committed') = (status = 'committed')),
    CONSTRAINT runs_finished_unless_moving CHECK ((finished_at IS NULL) = (status = 'active' OR (status = 'paused:approval' AND phase = 'mutating'))),
    CONSTRAINT runs_outcome_when_mutated CHECK ((mutation_outcome <> '') <= (phase IN ('mutated', 'emitting', 'committed'))),
    CONSTRAINT runs_failed_mutation_ends CHECK ((mutation_outcome = 'failure') <= (phase NOT IN ('emitting', 'committed'))),
    CONSTRAINT runs_only_active_is_leased CHECK ((lease_expires_at IS NOT NULL) <= (status = 'active')),
    CONSTRAINT runs_only_stopped_is_retried CHECK (retry_pending <= (finished_at IS NOT NULL AND status <> 'committed')),
    CONSTRAINT runs_cost_is_not_negative CHECK (cost >= 0)
)
 WITH (fillfactor = 60)
    """,
    """
CREATE INDEX runs_open ON pipeline.runs (workflow, handler_id) WHERE finished_at IS NULL
    """,
    """
CREATE UNIQUE INDEX runs_retry_once ON pipeline.runs (retry_of) WHERE retry_of IS NOT NULL
    """,
    """
CREATE INDEX runs_retry_pending ON pipeline.runs (workflow, id) WHERE retry_pending
    """,
    """
CREATE INDEX runs_session ON pipeline.runs (session_id)
    """,
    """
CREATE TABLE pipeline.mutations (
    id UUID DEFAULT pipeline.uuid7() NOT NULL,
    run_id UUID NOT NULL,
    workflow TEXT NOT NULL,
    connector TEXT NOT NULL,
    operation TEXT NOT NULL,
    params JSONB NOT NULL,
    request_hash TEXT NOT NULL,
    effect_id UUID NOT NULL,
    idempotency_key TEXT NOT NULL,
    status TEXT NOT NULL,
    reconcilable BOOLEAN NOT NULL,
    keyed BOOLEAN DEFAULT false NOT NULL,
    key_lifetime INTERVAL,
    key_expires_at TIMESTAMP WITH TIME ZONE,
    refused BOOLEAN DEFAULT false NOT NULL,
    settle INTERVAL NOT NULL,
    timeout INTERVAL NOT NULL,
    result JSONB,
    error TEXT,
    attempts INTEGER DEFAULT 0 NOT NULL,
    approved_by TEXT,
    approved_at TIMESTAMP WITH TIME ZONE,
    sent_at TIMESTAMP WITH TIME ZONE,
    send_deadline TIMESTAMP WITH TIME ZONE,
    quiet_until TIMESTAMP WITH TIME ZONE,
    reconcile_attempts INTEGER DEFAULT 0 NOT NULL,
    next_reconcile_at TIMESTAMP WITH TIME ZONE,
    resolved_by TEXT,
    resolved_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    doubted_at TIMESTAMP WITH TIME ZONE,
    reconcile_deferred_since TIMESTAMP WITH TIME ZONE,
    monitor_after INTERVAL,
    next_monitor_at TIMESTAMP WITH TIME ZONE,
    monitor_attempts SMALLINT DEFAULT 0 NOT NULL,
    found_late_at TIMESTAMP WITH TIME ZONE,
    late_result JSONB,
    acknowledged_by TEXT,
    headline TEXT DEFAULT '' NOT NULL,
    message_ids TEXT[] DEFAULT '{}' NOT NULL,
    message_count INTEGER DEFAULT 0 NOT NULL,
    four_eyes_value NUMERIC,
    CONSTRAINT mutations_pk PRIMARY KEY (id),
    CONSTRAINT mutations_run_id_once UNIQUE (run_id),
    CONSTRAINT mutations_status_known CHECK (status IN ('pending', 'in_flight', 'applied', 'failed', 'needs_reconcile', 'indeterminate')),
    CONSTRAINT mutations_resolved_by_known CHECK (resolved_by IN ('call', 'reconcile', 'operator', 'operator_skip', 'void')),
    CONSTRAINT mutations_resolved_has_resolver CHECK ((status IN ('applied', 'failed')) = (resolved_by IS NOT NULL)),
    CONSTRAINT mutations_resolver_has_time CHECK ((resolved_by IS NULL) = (resolved_at IS NULL)),
    CONSTRAINT mutations_reconcile_has_time CHECK ((status = 'needs_reconcile') = (next_reconcile_at IS NOT NULL)),
    CONSTRAINT mutations_only_reconcilable_is_reconciled CHECK ((status = 'needs_reconcile') <= reconcilable),
    CONSTRAINT mutations_only_failed_is_monitored CHECK ((next_monitor_at IS NOT NULL) <= (status = 'failed' AND reconcilable)),
    CONSTRAINT mutations_only_found_late_is_acknowledged CHECK ((acknowledged_by IS NOT NULL) <= (found_late_at IS NOT NULL)),
    CONSTRAINT mutations_only_failed_is_found_late CHECK ((found_late_at IS NOT NULL) <= (status = 'failed')),
    CONSTRAINT mutations_only_failed_is_refused CHECK (refused <= (status = 'failed' AND sent_at IS NOT NULL)),
    CONSTRAINT mutations_only_keyed_has_lifetime CHECK ((key_lifetime IS NOT NULL) <= keyed),
    CONSTRAINT mutations_sent_has_deadline CHECK ((sent_at IS NULL) = (send_deadline IS NULL)),
    CONSTRAINT mutations_sent_has_quiet_period CHECK ((sent_at IS NULL) = (quiet_until IS NULL)),
    CONSTRAINT mutations_unresolved_was_sent CHECK ((status IN ('in_flight', 'needs_reconcile', 'indeterminate', 'applied')) <= (sent_at IS NOT NULL)),
    CONSTRAINT mutations_run_id_fk FOREIGN KEY(run_id) REFERENCES pipeline.runs (id)
)
    """,
    """
CREATE INDEX mutations_found_late ON pipeline.mutations (id) WHERE found_late_at IS NOT NULL
    """,
    """
CREATE INDEX mutations_failed_effect ON pipeline.mutations (effect_id) WHERE status = 'failed'
    """,
    """
CREATE INDEX mutations_key ON pipeline.mutations (idempotency_key)
    """,
    """
CREATE INDEX mutations_approved ON pipeline.mutations (approved_at) WHERE approved_at IS NOT NULL
    """,
    """
CREATE INDEX mutations_monitor_due ON pipeline.mutations (next_monitor_at) WHERE next_monitor_at IS NOT NULL
    """,
    """
CREATE INDEX mutations_open ON pipeline.mutations (workflow, id) WHERE status IN ('pending', 'in_flight', 'needs_reconcile', 'indeterminate')
    """,
    """
CREATE INDEX mutations_reconcile_due ON pipeline.mutations (next_reconcile_at) WHERE status = 'needs_reconcile'
    """,
    """
CREATE TABLE pipeline.blocks (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    workflow TEXT NOT NULL,
    run_id UUID NOT NULL,
    kind TEXT NOT NULL,
    reason TEXT NOT NULL,
    since TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    closed_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT blocks_pk PRIMARY KEY (id),
    CONSTRAINT blocks_kind_known CHECK (kind IN ('approval', 'internal', 'reconciliation')),
    CONSTRAINT blocks_workflow_fk FOREIGN KEY(workflow) REFERENCES pipeline.workflows (name),
    CONSTRAINT blocks_run_id_fk FOREIGN KEY(run_id) REFERENCES pipeline.runs (id)
)
    """,
    """
CREATE UNIQUE INDEX blocks_open ON pipeline.blocks (run_id, kind) WHERE closed_at IS NULL
    """,
    """
CREATE INDEX blocks_open_of_workflow ON pipeline.blocks (workflow) WHERE closed_at IS NULL
    """,
    """
CREATE INDEX blocks_run ON pipeline.blocks (run_id)
    """,
    """
CREATE TABLE pipeline.audit (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    actor TEXT NOT NULL,
    act TEXT NOT NULL,
    claimed BOOLEAN DEFAULT false NOT NULL,
    workflow TEXT,
    run_id UUID,
    mutation_id UUID,
    event_id BIGINT,
    reason TEXT DEFAULT '' NOT NULL,
    evidence JSONB,
    CONSTRAINT audit_pk PRIMARY KEY (id)
)
    """,
    """
CREATE INDEX audit_event ON pipeline.audit (event_id) WHERE event_id IS NOT NULL
    """,
    """
CREATE INDEX audit_workflow ON pipeline.audit (workflow, id) WHERE workflow IS NOT NULL
    """,
    """
CREATE INDEX audit_prunes ON pipeline.audit (id) WHERE act = 'audit.prune'
    """,
    """
CREATE TABLE pipeline.audit_links (
    audit_id BIGINT NOT NULL,
    position BIGINT,
    row_hash TEXT,
    hash TEXT,
    chained_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT audit_links_pk PRIMARY KEY (audit_id),
    CONSTRAINT audit_links_chained_or_waits CHECK (num_nonnulls(position, row_hash, hash, chained_at) IN (0, 4))
)
    """,
    """
CREATE UNIQUE INDEX audit_links_chain ON pipeline.audit_links (position) WHERE position IS NOT NULL
    """,
    """
CREATE INDEX audit_links_waiting ON pipeline.audit_links (audit_id) WHERE position IS NULL
    """,
    """
CREATE INDEX audit_mutation ON pipeline.audit (mutation_id) WHERE mutation_id IS NOT NULL
    """,
    """
CREATE INDEX audit_run ON pipeline.audit (run_id) WHERE run_id IS NOT NULL
    """,
    """
CREATE TABLE pipeline.maintenance_tasks (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    workflow TEXT NOT NULL,
    reason TEXT NOT NULL,
    opened_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    closed_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT maintenance_tasks_pk PRIMARY KEY (id),
    CONSTRAINT maintenance_tasks_workflow_fk FOREIGN KEY(workflow) REFERENCES pipeline.workflows (name)
)
    """,
    """
CREATE UNIQUE INDEX maintenance_tasks_one_open ON pipeline.maintenance_tasks (workflow) WHERE closed_at IS NULL
    """,
    """
CREATE TABLE pipeline.sweeps (
    name TEXT NOT NULL,
    last_run_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    report JSONB,
    CONSTRAINT sweeps_pk PRIMARY KEY (name)
)
    """,
    """
CREATE TABLE pipeline.workers (
    name TEXT NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    pool TEXT NOT NULL,
    concurrency INTEGER NOT NULL,
    queues TEXT[] NOT NULL,
    workflows JSONB NOT NULL,
    code_version TEXT NOT NULL,
    package_version TEXT NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    seen_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT workers_pk PRIMARY KEY (name)
)
    """,
    """
CREATE TABLE pipeline.samples (
    workflow TEXT NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    span INTERVAL NOT NULL,
    published INTEGER NOT NULL,
    committed INTEGER NOT NULL,
    stopped INTEGER NOT NULL,
    mutated INTEGER NOT NULL,
    uncertain INTEGER NOT NULL,
    backlog INTEGER NOT NULL,
    oldest_at TIMESTAMP WITH TIME ZONE,
    unresolved INTEGER NOT NULL,
    CONSTRAINT samples_pk PRIMARY KEY (workflow, at)
)
    """,
    """
CREATE INDEX samples_at ON pipeline.samples (at)
    """,
    """
CREATE TABLE pipeline.notices (
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    delivered_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT notices_pk PRIMARY KEY (kind, subject)
)
    """,
    """
CREATE TABLE pipeline.breakers (
    connector TEXT NOT NULL,
    operation TEXT NOT NULL,
    reason TEXT NOT NULL,
    opened_by TEXT,
    opened_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    probe_every INTERVAL NOT NULL,
    probe_at TIMESTAMP WITH TIME ZONE,
    closed_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT breakers_pk PRIMARY KEY (connector, operation)
)
    """,
    """
CREATE TABLE pipeline.operations (
    connector TEXT NOT NULL,
    operation TEXT NOT NULL,
    is_mutation BOOLEAN NOT NULL,
    params_schema JSONB,
    result_schema JSONB,
    redact TEXT[] NOT NULL,
    shown TEXT[] NOT NULL,
    shows TEXT NOT NULL,
    look_up TEXT NOT NULL,
    keyed BOOLEAN NOT NULL,
    key_lifetime INTERVAL,
    can_reconcile BOOLEAN NOT NULL,
    can_fetch BOOLEAN NOT NULL,
    timeout INTERVAL NOT NULL,
    settle INTERVAL NOT NULL,
    value TEXT NOT NULL,
    four_eyes_above NUMERIC,
    registered_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT operations_pk PRIMARY KEY (connector, operation)
)
    """,
    """
CREATE TABLE pipeline.cursors (
    name TEXT NOT NULL,
    position TEXT NOT NULL,
    CONSTRAINT cursors_pk PRIMARY KEY (name)
)
    """,
    """
CREATE TABLE pipeline.archive (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    workflow TEXT,
    archived_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    content JSONB NOT NULL,
    CONSTRAINT archive_pk PRIMARY KEY (kind, id)
)
    """,
    """
CREATE TABLE pipeline.proposals (
    id UUID DEFAULT pipeline.uuid7() NOT NULL,
    mutation_id UUID NOT NULL,
    act TEXT NOT NULL,
    answer JSONB NOT NULL,
    state TEXT NOT NULL,
    proposed_by TEXT NOT NULL,
    reason TEXT NOT NULL,
    proposed_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    confirmed_by TEXT,
    closed_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT proposals_pk PRIMARY KEY (id),
    CONSTRAINT proposals_confirmed_is_closed CHECK ((confirmed_by IS NOT NULL) <= (closed_at IS NOT NULL)),
    CONSTRAINT proposals_confirmed_by_another CHECK (confirmed_by <> proposed_by),
    CONSTRAINT proposals_act_known CHECK (act IN ('happened', 'did_not_happen', 'approve'))
)
    """,
    """
CREATE UNIQUE INDEX proposals_open ON pipeline.proposals (mutation_id) WHERE closed_at IS NULL
    """,
    """
CREATE TABLE pipeline.bulk_previews (
    id UUID DEFAULT pipeline.uuid7() NOT NULL,
    act TEXT NOT NULL,
    created_by TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    workflows TEXT[] NOT NULL,
    request JSONB NOT NULL,
    items JSONB NOT NULL,
    item_count INTEGER NOT NULL,
    left_out JSONB DEFAULT '{}' NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    committed_by TEXT,
    committed_at TIMESTAMP WITH TIME ZONE,
    progress_at TIMESTAMP WITH TIME ZONE,
    done_count INTEGER DEFAULT 0 NOT NULL,
    updated JSONB DEFAULT '[]' NOT NULL,
    refused JSONB DEFAULT '{}' NOT NULL,
    finished_at TIMESTAMP WITH TIME ZONE,
    discarded_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT bulk_previews_pk PRIMARY KEY (id),
    CONSTRAINT bulk_previews_committed_by_name CHECK ((committed_at IS NULL) = (committed_by IS NULL)),
    CONSTRAINT bulk_previews_finished_was_committed CHECK ((finished_at IS NOT NULL) <= (committed_at IS NOT NULL)),
    CONSTRAINT bulk_previews_committed_or_discarded CHECK (num_nonnulls(committed_at, discarded_at) <= 1),
    CONSTRAINT bulk_previews_done_within_items CHECK (done_count BETWEEN 0 AND item_count),
    CONSTRAINT bulk_previews_act_known CHECK (act IN ('happened', 'did_not_happen', 'skip', 'try_again', 'approve', 'reject', 'import', 'release_event', 'skip_event'))
)
    """,
    """
CREATE INDEX bulk_previews_created ON pipeline.bulk_previews (created_at)
    """,
    """
CREATE TABLE pipeline.api_requests (
    caller TEXT NOT NULL,
    key TEXT NOT NULL,
    request_hash TEXT NOT NULL,
    begun_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    status INTEGER,
    answer JSONB,
    CONSTRAINT api_requests_pk PRIMARY KEY (caller, key)
)
    """,
    """
CREATE INDEX api_requests_begun ON pipeline.api_requests (begun_at)
    """,
    """
CREATE TABLE pipeline.saved_views (
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    page TEXT NOT NULL,
    query TEXT NOT NULL,
    saved_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT saved_views_pk PRIMARY KEY (owner, name)
)
    """,
    """
CREATE TABLE pipeline.access_tokens (
    id UUID DEFAULT pipeline.uuid7() NOT NULL,
    secret_hash TEXT NOT NULL,
    hint TEXT NOT NULL,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    can_see_payloads BOOLEAN NOT NULL,
    workflows TEXT[],
    created_by TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    last_used_at TIMESTAMP WITH TIME ZONE,
    revoked_at TIMESTAMP WITH TIME ZONE,
    revoked_by TEXT,
    CONSTRAINT access_tokens_pk PRIMARY KEY (id),
    CONSTRAINT access_tokens_revoker_of_revoked CHECK ((revoked_at IS NULL) = (revoked_by IS NULL)),
    CONSTRAINT access_tokens_role_known CHECK (role IN ('viewer', 'publisher', 'operator', 'admin')),
    CONSTRAINT access_tokens_secret_hash_once UNIQUE (secret_hash)
)
    """,
    """
CREATE TABLE pipeline.logins (
    id UUID DEFAULT pipeline.uuid7() NOT NULL,
    secret_hash TEXT NOT NULL,
    source TEXT NOT NULL,
    token_id UUID,
    name TEXT NOT NULL,
    role TEXT NOT NULL,
    can_see_payloads BOOLEAN NOT NULL,
    workflows TEXT[],
    created_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    opened_at TIMESTAMP WITH TIME ZONE,
    seen_at TIMESTAMP WITH TIME ZONE,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT logins_pk PRIMARY KEY (id),
    CONSTRAINT logins_seen_if_open CHECK ((opened_at IS NULL) = (seen_at IS NULL)),
    CONSTRAINT logins_token_of_source CHECK ((token_id IS NOT NULL) = (source = 'token')),
    CONSTRAINT logins_source_known CHECK (source IN ('token', 'link', 'oidc')),
    CONSTRAINT logins_role_known CHECK (role IN ('viewer', 'publisher', 'operator', 'admin')),
    CONSTRAINT logins_secret_hash_once UNIQUE (secret_hash),
    CONSTRAINT logins_token_id_fk FOREIGN KEY(token_id) REFERENCES pipeline.access_tokens (id)
)
    """,
    """
CREATE INDEX logins_by_expiry ON pipeline.logins (expires_at)
    """,
    """
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
                WHERE n.kind = 'workflow' AND n.workflow = '' AND n.former = present);
    EXIT WHEN renamed IS NULL;
    present := renamed;
  END LOOP;
  RETURN QUERY SELECT t.workflow, g.name, t.name, t.retired, t.schema_digest, ARRAY(
      SELECT s.handler_id FROM pipeline.subscriptions s WHERE s.workflow = t.workflow AND s.topic = t.name)
    FROM unnest(names) AS g(name)
    LEFT JOIN pipeline.renames n ON n.kind = 'topic' AND n.workflow = present AND n.former = g.name
    JOIN pipeline.topics t ON t.workflow = present AND t.name = coalesce(n.name, g.name);
END
$$
    """,
    """
CREATE FUNCTION pipeline.publish(to_workflow text, known_topics jsonb, given_events jsonb, is_replacing boolean)
RETURNS TABLE (id bigint, topic text, message_id text, is_new boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
  answer record;
  fresh_ids bigint[] := '{}';
BEGIN
  IF session_user <> current_user THEN
    PERFORM set_config('pipeline.clock_offset', '', true);
  END IF;
  IF is_replacing AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
    PERFORM FROM pipeline.routes(to_workflow, '{}');
    PERFORM FROM pipeline.workflows w WHERE w.name = to_workflow FOR NO KEY UPDATE;
  END IF;
  FOR answer IN
WITH known AS MATERIALIZED (
  SELECT * FROM jsonb_to_recordset(CAST(known_topics AS jsonb)) AS k(name text, schema_digest text)
), routes AS MATERIALIZED (
  SELECT t.* FROM pipeline.routes(CAST(to_workflow AS text), ARRAY(SELECT name FROM known)) t
  JOIN known k ON k.name = t.topic AND k.schema_digest = t.schema_digest
  WHERE t.workflow = to_workflow AND t.name = t.topic AND NOT t.is_retired
    AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
), given AS (
  SELECT CAST(NULL AS uuid) AS run, g.*, CAST(to_workflow AS text) AS workflow, CAST(NULL AS bigint[]) AS caused_by
  FROM jsonb_to_recordset(CAST(given_events AS jsonb)) AS g(n integer, topic TEXT, message_id TEXT, key TEXT, title TEXT, payload JSONB, traceparent TEXT)
  WHERE (SELECT count(*) FROM routes) = (SELECT count(*) FROM known)
),
unknown AS (
  SELECT DISTINCT g.workflow, g.topic FROM given g
  WHERE NOT EXISTS (SELECT FROM routes t WHERE t.workflow = g.workflow AND t.name = g.topic)
), numbered AS MATERIALIZED (
  SELECT g.*, pipeline.next_event_id() AS id
  FROM (SELECT x.*, t.topic AS routed FROM given x JOIN routes t ON t.workflow = x.workflow AND t.name = x.topic
        WHERE NOT EXISTS (SELECT FROM unknown) ORDER BY x.run, x.n) g
), fresh AS (
  INSERT INTO pipeline.events (id, workflow, caused_by, created_by_run_id, topic, message_id, key, title, payload, traceparent)
  SELECT g.id, g.workflow, coalesce(g.caused_by, '{}'), g.run, g.routed, g.message_id, g.key, g.title, coalesce(g.payload, 'null'), g.traceparent
  FROM numbered g ORDER BY g.workflow, g.routed, g.message_id, g.id
  ON CONFLICT (workflow, topic, message_id) DO NOTHING
  RETURNING id, workflow, topic, message_id, key, created_by_run_id
), delivered AS (
  INSERT INTO pipeline.deliveries (event_id, handler_id, topic, key)
  SELECT f.id, s.handler_id, f.topic, f.key FROM fresh f
  JOIN (SELECT DISTINCT workflow, topic, handlers FROM routes) t ON t.workflow = f.workflow AND t.topic = f.topic,
  unnest(t.handlers) AS s(handler_id)
)
SELECT f.id, f.topic, f.message_id, true AS is_new FROM fresh f
UNION ALL SELECT NULL, '', '', false WHERE (SELECT count(*) FROM routes) <> (SELECT count(*) FROM known)
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
WITH given AS (
  SELECT g.* FROM jsonb_to_recordset(CAST(given_events AS jsonb)) AS g(n integer, topic TEXT, message_id TEXT, key TEXT, title TEXT, payload JSONB, traceparent TEXT)
), target AS (
  SELECT e.id, coalesce(g.payload, 'null') AS payload, g.title FROM given g
  CROSS JOIN LATERAL (
    SELECT id FROM pipeline.events
    WHERE workflow = CAST(to_workflow AS text) AND topic = g.topic AND message_id = g.message_id OFFSET 0) e
  WHERE e.id NOT IN (SELECT unnest(CAST(fresh_ids AS bigint[])))
), locked AS (
  SELECT d.event_id, d.status = 'pending' AND d.offered_to IS NULL AND NOT EXISTS (
    SELECT FROM pipeline.runs r WHERE r.workflow = to_workflow AND r.handler_id = d.handler_id
      AND r.finished_at IS NULL AND r.offered IS NULL AND r.phase IN ('pending', 'preparing')) AS is_unseen
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
SELECT w.id, w.topic, w.message_id, false AS is_new FROM rewritten w ORDER BY w.id;
  END IF;
END
$$
    """,
    """
CREATE FUNCTION pipeline.prune_runs(from_position uuid, page_limit integer, shortest_kept interval)
RETURNS TABLE (dropped bigint, seen bigint, "position" text, is_young boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
  IF session_user <> current_user THEN
    PERFORM set_config('pipeline.clock_offset', '', true);
  END IF;
  PERFORM set_config('pipeline.is_pruning', 'on', true);
  RETURN QUERY
WITH page AS MATERIALIZED (
  SELECT r.id, r.created_at AS at, w.keep_done, w.keep_ledger, w.archives
  FROM pipeline.runs r LEFT JOIN pipeline.workflows w ON w.name = r.workflow
  WHERE r.id > CAST(from_position AS uuid) ORDER BY r.id LIMIT page_limit
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
      WHERE d.run_id = r.id OR (m.id IS NOT NULL AND d.status NOT IN ('consumed', 'skipped')))
), unblocked AS (
  DELETE FROM pipeline.blocks b USING gone g WHERE b.run_id = g.id
), settled AS (
  DELETE FROM pipeline.mutations m USING gone g WHERE m.run_id = g.id RETURNING m.*
), dropped AS (
  DELETE FROM pipeline.runs r USING gone g WHERE r.id = g.id RETURNING r.*
), numbered AS (
  SELECT session_id, count(*) FILTER (WHERE status = 'committed') AS runs, sum(cost) AS cost
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

SELECT (SELECT count(*) FROM dropped) AS dropped, count(*) AS seen, max(CAST(p.id AS text)) AS position,
  coalesce(max(p.at) > pipeline.clock() - CAST(shortest_kept AS interval), true) AS is_young
FROM page p;
  PERFORM set_config('pipeline.is_pruning', '', true);
END
$$
    """,
    """
CREATE FUNCTION pipeline.prune_audit(from_position bigint, page_limit integer, shortest_kept interval)
RETURNS TABLE (dropped bigint, seen bigint, "position" bigint, is_young boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
  IF session_user <> current_user THEN
    PERFORM set_config('pipeline.clock_offset', '', true);
  END IF;
  PERFORM set_config('pipeline.is_pruning', 'on', true);
  RETURN QUERY
WITH page AS MATERIALIZED (
  SELECT a.id, a.at, a.mutation_id, w.keep_ledger, w.archives
  FROM pipeline.audit a LEFT JOIN pipeline.workflows w ON w.name = coalesce((
    SELECT n.name FROM pipeline.renames n
    WHERE n.kind = 'workflow' AND n.workflow = '' AND n.former = a.workflow), a.workflow)
  WHERE a.id > CAST(from_position AS bigint) ORDER BY a.id LIMIT page_limit
), dropped AS (
  DELETE FROM pipeline.audit a USING page p
  WHERE a.id = p.id AND p.at < pipeline.clock() - p.keep_ledger
    AND NOT EXISTS (SELECT FROM pipeline.mutations m WHERE m.id = p.mutation_id)
  RETURNING a.*
), recorded AS (
  INSERT INTO pipeline.audit (actor, act, evidence)
  SELECT 'retention', 'audit.prune', jsonb_build_object('ids', jsonb_agg(x.id ORDER BY x.id))
  FROM dropped x HAVING count(*) > 0
), archived AS (
  INSERT INTO pipeline.archive (kind, id, workflow, content)
  SELECT 'audit', CAST(x.id AS text), x.workflow, to_jsonb(x)
  FROM dropped x JOIN page p ON p.id = x.id AND p.archives
)

SELECT (SELECT count(*) FROM dropped) AS dropped, count(*) AS seen, max(p.id) AS position,
  coalesce(max(p.at) > pipeline.clock() - CAST(shortest_kept AS interval), true) AS is_young
FROM page p;
  PERFORM set_config('pipeline.is_pruning', '', true);
END
$$
    """,
    """
CREATE FUNCTION pipeline.audit_row_hash(act_id bigint) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT encode(sha256(convert_to(jsonb_build_array(a.id, (extract(epoch FROM a.at) * 1000000)::bigint, a.actor,
    a.act, a.claimed, a.workflow, a.run_id, a.mutation_id, a.event_id, a.reason, a.evidence)::text, 'UTF8')), 'hex')
  FROM pipeline.audit a WHERE a.id = act_id
$$
    """,
    """
CREATE FUNCTION pipeline.link_hash(before text, row_hash text, "position" bigint, chained_at timestamptz) RETURNS text
LANGUAGE sql STABLE AS $$
  SELECT encode(sha256(convert_to(concat_ws('/', before, row_hash, "position",
    (extract(epoch FROM chained_at) * 1000000)::bigint), 'UTF8')), 'hex')
$$
    """,
    """
CREATE FUNCTION pipeline.chain_audit(max_acts integer)
RETURNS TABLE ("position" bigint, hash text, acts bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
    """,
    """
CREATE FUNCTION pipeline.await_link() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  INSERT INTO pipeline.audit_links (audit_id) VALUES (NEW.id);
  RETURN NULL;
END
$$
    """,
    """
REVOKE EXECUTE ON FUNCTION pipeline.publish(text, jsonb, jsonb, boolean) FROM PUBLIC
    """,
    """
REVOKE EXECUTE ON FUNCTION pipeline.prune_runs(uuid, integer, interval) FROM PUBLIC
    """,
    """
REVOKE EXECUTE ON FUNCTION pipeline.prune_audit(bigint, integer, interval) FROM PUBLIC
    """,
    """
REVOKE EXECUTE ON FUNCTION pipeline.chain_audit(integer) FROM PUBLIC
    """,
    """
CREATE FUNCTION pipeline.handler_facts(names text[], is_locking boolean)
RETURNS TABLE (workflow text, desired text, maintenance boolean, concurrency integer, blocks bigint, active_runs bigint, turns integer[], has_waiting boolean, id integer, name text, kind text, retry_at timestamptz, wake_at timestamptz, next_run_at timestamptz, batch integer, ordered boolean, low_watermark bigint, has_unseen boolean, retryable text[], slice_limit integer, is_unclaimed boolean, has_probe_run boolean, now timestamptz)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
  IF is_locking THEN
    PERFORM FROM pipeline.workflows w WHERE w.name = ANY(names) ORDER BY w.name FOR NO KEY UPDATE;
  END IF;
  RETURN QUERY SELECT w.workflow, w.desired, w.maintenance, w.concurrency, w.blocks, w.active_runs, w.turns, w.has_waiting,
  h.id AS id,
  h.name AS name,
  h.kind AS kind,
  h.retry_at AS retry_at,
  h.wake_at AS wake_at,
  h.next_run_at AS next_run_at,
  h.batch AS batch,
  h.ordered AS ordered,
  h.low_watermark AS low_watermark,
  (CASE WHEN h.idle_snapshot IS NULL OR pg_snapshot_xmax(h.idle_snapshot) > pg_snapshot_xmax(pg_current_snapshot()) THEN (
    SELECT true FROM pipeline.deliveries d
    WHERE d.handler_id = ANY(ARRAY[CAST(h.id AS integer)]) AND d.status = 'pending' AND d.offered_to IS NULL AND d.event_id > h.low_watermark AND NOT d.declined
      AND (d.available_at IS NULL OR d.available_at <= pipeline.clock())
      AND (NOT h.ordered OR d.key IS NULL OR (NOT EXISTS (
      SELECT FROM pipeline.deliveries o
      WHERE o.handler_id = d.handler_id AND o.key = d.key AND o.status IN ('pending', 'reserved')
        AND (o.status = 'reserved' OR o.key_offered OR o.available_at IS NOT NULL)
        AND o.event_id <> d.event_id
        AND (o.status = 'reserved' OR o.key_offered
             OR (o.event_id < d.event_id AND o.available_at > pipeline.clock())))
    AND NOT coalesce(d.key = ANY(ARRAY(
      SELECT (SELECT s.key FROM pipeline.deliveries s
              WHERE s.event_id = i.event_id AND s.handler_id = h.id AND s.status = 'skipped')
      FROM (
        SELECT event_ids, mutation_outcome FROM pipeline.runs
        WHERE workflow = h.workflow AND handler_id = h.id AND finished_at IS NULL
        UNION ALL
        SELECT event_ids, mutation_outcome FROM pipeline.runs
        WHERE workflow = h.workflow AND handler_id = h.id AND retry_pending
      ) r CROSS JOIN LATERAL unnest(r.event_ids) AS i(event_id)
        WHERE r.mutation_outcome = 'skipped')), false)
    AND NOT EXISTS (SELECT FROM pipeline.subscriptions b
      WHERE b.workflow = h.workflow AND b.handler_id = h.id AND b.backfill_until IS NOT NULL)))
      AND (w.concurrency = 1 OR (NOT h.ordered OR d.key IS NULL OR d.event_id <= coalesce(CAST((
      SELECT jsonb_object_agg(k.key, k.last_id) FROM (
        SELECT o.key, (array_agg(o.event_id ORDER BY o.event_id))[h.batch] AS last_id FROM (
          SELECT d.key, d.event_id FROM pipeline.deliveries d
          WHERE d.handler_id = ANY(ARRAY[CAST(h.id AS integer)]) AND d.status = 'pending' AND d.declined
            AND d.offered_to IS NULL AND d.key IS NOT NULL
          ORDER BY d.handler_id, d.declined, d.event_id OFFSET 0
        ) o
        GROUP BY o.key HAVING count(*) >= h.batch
      ) k) ->> d.key AS bigint), 9223372036854775807)))
      AND (w.concurrency = 1 OR (NOT h.ordered OR (SELECT true FROM pipeline.subscriptions s
      WHERE s.workflow = (SELECT o.workflow FROM pipeline.handlers o WHERE o.id = d.handler_id)
        AND s.topic = d.topic AND s.handler_id = d.handler_id) IS NOT NULL))
    ORDER BY d.handler_id, d.event_id LIMIT 1)
  ELSE (
    SELECT true FROM pipeline.deliveries d
    WHERE d.handler_id = h.id AND d.status = 'pending' AND d.offered_to IS NULL AND d.xid >= pg_snapshot_xmin(h.idle_snapshot)
      AND d.xid < pg_snapshot_xmax(pg_current_snapshot()) AND NOT pg_visible_in_snapshot(d.xid, h.idle_snapshot)
      AND NOT d.declined AND (d.available_at IS NULL OR d.available_at <= pipeline.clock())
    ORDER BY d.xid LIMIT 1)
  END IS NOT NULL OR (
    SELECT true FROM pipeline.deliveries d
    WHERE d.handler_id = h.id AND d.status = 'pending' AND d.offered_to IS NULL AND d.available_at > h.idle_at
      AND d.available_at <= pipeline.clock()
    ORDER BY d.available_at LIMIT 1) IS NOT NULL) AS has_unseen,
  ARRAY(
    SELECT CAST(r.id AS text) FROM pipeline.runs r
    WHERE r.workflow = h.workflow AND r.retry_pending AND r.handler_id = h.id AND (r.retry_at IS NULL OR r.retry_at <= pipeline.clock())
      AND coalesce((
      SELECT m.status IN ('applied', 'failed') FROM pipeline.mutations m WHERE m.id = r.mutation_id), true)
    ORDER BY r.id LIMIT 1000) AS retryable,
  CASE WHEN w.concurrency = 1 OR h.wake_at IS NOT NULL THEN (
    SELECT coalesce(d.slice_limit, d.group_size) FROM pipeline.deliveries d
    WHERE d.handler_id = ANY(ARRAY[CAST(h.id AS integer)]) AND d.status = 'pending' AND d.offered_to IS NULL AND d.event_id > h.low_watermark AND NOT d.declined
      AND (d.available_at IS NULL OR d.available_at <= pipeline.clock()) AND (NOT h.ordered OR d.key IS NULL OR (NOT EXISTS (
      SELECT FROM pipeline.deliveries o
      WHERE o.handler_id = d.handler_id AND o.key = d.key AND o.status IN ('pending', 'reserved')
        AND (o.status = 'reserved' OR o.key_offered OR o.available_at IS NOT NULL)
        AND o.event_id <> d.event_id
        AND (o.status = 'reserved' OR o.key_offered
             OR (o.event_id < d.event_id AND o.available_at > pipeline.clock())))
    AND NOT coalesce(d.key = ANY(ARRAY(
      SELECT (SELECT s.key FROM pipeline.deliveries s
              WHERE s.event_id = i.event_id AND s.handler_id = h.id AND s.status = 'skipped')
      FROM (
        SELECT event_ids, mutation_outcome FROM pipeline.runs
        WHERE workflow = h.workflow AND handler_id = h.id AND finished_at IS NULL
        UNION ALL
        SELECT event_ids, mutation_outcome FROM pipeline.runs
        WHERE workflow = h.workflow AND handler_id = h.id AND retry_pending
      ) r CROSS JOIN LATERAL unnest(r.event_ids) AS i(event_id)
        WHERE r.mutation_outcome = 'skipped')), false)
    AND NOT EXISTS (SELECT FROM pipeline.subscriptions b
      WHERE b.workflow = h.workflow AND b.handler_id = h.id AND b.backfill_until IS NOT NULL)))
    ORDER BY d.handler_id, d.event_id LIMIT 1) END AS slice_limit,
  (h.unclaimed_since IS NOT NULL) AS is_unclaimed,
  (h.unclaimed_since IS NOT NULL AND (
    SELECT true FROM pipeline.runs r WHERE r.workflow = h.workflow AND r.handler_id = h.id AND r.finished_at IS NULL
      AND r.status = 'active' LIMIT 1) IS NOT NULL) AS has_probe_run,
  pipeline.clock() AS now
FROM (SELECT w.name AS workflow,
  w.desired AS desired,
  w.maintenance AS maintenance,
  w.concurrency AS concurrency,
  (SELECT count(*) FROM pipeline.blocks b WHERE b.workflow = w.name AND b.closed_at IS NULL) AS blocks,
  (SELECT count(*) FROM pipeline.runs r
    WHERE r.workflow = w.name AND r.finished_at IS NULL AND r.status = 'active'
      AND r.handler_id <> ALL(ARRAY(
      SELECT h.id FROM pipeline.handlers h WHERE h.workflow = w.name AND h.retired))) AS active_runs,
  w.turns AS turns,
  (w.concurrency = 1 AND (
    SELECT true FROM pipeline.runs r
    WHERE r.workflow = w.name AND r.retry_pending AND coalesce((
      SELECT m.status IN ('applied', 'failed') FROM pipeline.mutations m WHERE m.id = r.mutation_id), true) AND (
      SELECT NOT h.retired AND NOT h.unclaimed_since IS NOT NULL FROM pipeline.handlers h WHERE h.id = r.handler_id)
    UNION ALL
    SELECT true FROM pipeline.runs r
    WHERE r.workflow = w.name AND r.finished_at IS NULL AND r.status = 'paused:approval'
      AND r.handler_id <> ALL(ARRAY(
      SELECT h.id FROM pipeline.handlers h WHERE h.workflow = w.name AND h.retired)) LIMIT 1) IS NOT NULL) AS has_waiting FROM pipeline.workflows w WHERE w.name = ANY(names) OFFSET 0) w
CROSS JOIN LATERAL (SELECT * FROM pipeline.handlers c WHERE c.workflow = w.workflow AND NOT c.retired OFFSET 0) h
ORDER BY w.workflow, h.name;
END
$$
    """,
    """
CREATE FUNCTION pipeline.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation',
    CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
END
$$
    """,
    """
CREATE FUNCTION pipeline.require_inputs(run uuid, owned bigint, expected integer) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
  IF owned <> expected THEN
    RAISE EXCEPTION 'run % owns % of its % reserved events', run, owned, expected
      USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'commit_owns_inputs', DETAIL = run::text,
        HINT = format('owner of %s of its %s reserved events', owned, expected);
  END IF;
  RETURN owned;
END
$$
    """,
    """
CREATE FUNCTION pipeline.refuse_release() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF EXISTS (
    SELECT FROM pipeline.runs r JOIN pipeline.mutations m ON m.id = r.mutation_id
    WHERE r.id = OLD.run_id AND m.status IN ('applied', 'in_flight', 'needs_reconcile', 'indeterminate')
  ) THEN
    RAISE EXCEPTION 'event % stays reserved: its run % holds an applied or unresolved mutation',
      OLD.event_id, OLD.run_id USING ERRCODE = 'integrity_constraint_violation',
      CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
  END IF;
  RETURN NEW;
END
$$
    """,
    """
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
    """,
    """
CREATE FUNCTION pipeline.refuse_skip() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM pipeline.runs r WHERE r.id = OLD.run_id AND r.mutation_outcome = 'skipped') THEN
    RAISE EXCEPTION 'event % stays reserved: no operator skipped the mutation of its run %',
      OLD.event_id, OLD.run_id USING ERRCODE = 'integrity_constraint_violation',
      CONSTRAINT = TG_NAME, TABLE = TG_TABLE_NAME, SCHEMA = TG_TABLE_SCHEMA;
  END IF;
  RETURN NEW;
END
$$
    """,
    """
CREATE TRIGGER runs_phase_only_grows BEFORE UPDATE OF phase ON pipeline.runs FOR EACH ROW
WHEN (array_position(ARRAY['pending', 'preparing', 'prepared', 'mutating', 'mutated', 'emitting', 'committed'], NEW.phase) < array_position(ARRAY['pending', 'preparing', 'prepared', 'mutating', 'mutated', 'emitting', 'committed'], OLD.phase))
EXECUTE FUNCTION pipeline.refuse('the phase of a run only grows')
    """,
    """
CREATE TRIGGER runs_stopped_stays_stopped BEFORE UPDATE OF status ON pipeline.runs FOR EACH ROW
WHEN (OLD.finished_at IS NOT NULL AND NEW.status <> OLD.status)
EXECUTE FUNCTION pipeline.refuse('a finished run keeps its status; a new run does the rest')
    """,
    """
CREATE TRIGGER mutations_resolved_stays_resolved BEFORE UPDATE OF status ON pipeline.mutations FOR EACH ROW
WHEN (OLD.status IN ('applied', 'failed') AND NEW.status <> OLD.status)
EXECUTE FUNCTION pipeline.refuse('a resolved mutation keeps its status')
    """,
    """
CREATE TRIGGER deliveries_done_stays_done BEFORE UPDATE OF status ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status IN ('consumed', 'skipped') AND NEW.status <> OLD.status)
EXECUTE FUNCTION pipeline.refuse('a consumed or skipped event is never delivered again')
    """,
    """
CREATE TRIGGER deliveries_release_guarded BEFORE UPDATE OF status ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status = 'reserved' AND NEW.status IN ('pending', 'quarantined'))
EXECUTE FUNCTION pipeline.refuse_release()
    """,
    """
CREATE TRIGGER deliveries_transfer_guarded BEFORE UPDATE OF run_id ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status = 'reserved' AND NEW.run_id <> OLD.run_id)
EXECUTE FUNCTION pipeline.refuse_transfer()
    """,
    """
CREATE TRIGGER deliveries_skip_guarded BEFORE UPDATE OF status ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status = 'reserved' AND NEW.status = 'skipped')
EXECUTE FUNCTION pipeline.refuse_skip()
    """,
    """
CREATE TRIGGER deliveries_open_not_deleted BEFORE DELETE ON pipeline.deliveries FOR EACH ROW
WHEN (OLD.status IN ('pending', 'reserved', 'quarantined'))
EXECUTE FUNCTION pipeline.refuse('an event that is not done is never deleted')
    """,
    """
CREATE TRIGGER audit_final BEFORE UPDATE OR TRUNCATE ON pipeline.audit FOR EACH STATEMENT
WHEN (true)
EXECUTE FUNCTION pipeline.refuse('an act in the audit is never changed')
    """,
    """
CREATE TRIGGER audit_kept BEFORE DELETE ON pipeline.audit FOR EACH STATEMENT
WHEN (current_setting('pipeline.is_pruning', true) IS DISTINCT FROM 'on')
EXECUTE FUNCTION pipeline.refuse('an act in the audit is deleted by retention only')
    """,
    """
CREATE TRIGGER mutations_kept BEFORE DELETE OR TRUNCATE ON pipeline.mutations FOR EACH STATEMENT
WHEN (current_setting('pipeline.is_pruning', true) IS DISTINCT FROM 'on')
EXECUTE FUNCTION pipeline.refuse('a mutation is deleted by retention only')
    """,
    """
CREATE TRIGGER audit_links_kept BEFORE DELETE OR TRUNCATE ON pipeline.audit_links FOR EACH STATEMENT
WHEN (true)
EXECUTE FUNCTION pipeline.refuse('a link of the audit is never deleted')
    """,
    """
CREATE TRIGGER audit_links_final BEFORE UPDATE ON pipeline.audit_links FOR EACH ROW
WHEN (OLD.position IS NOT NULL)
EXECUTE FUNCTION pipeline.refuse('a link of the audit is never changed')
    """,
    """
CREATE TRIGGER audit_awaits_link AFTER INSERT ON pipeline.audit FOR EACH ROW
EXECUTE FUNCTION pipeline.await_link()
    """,
)

TABLES = (
    "proposals",
    "operations",
    "saved_views",
    "api_requests",
    "bulk_previews",
    "logins",
    "access_tokens",
    "archive",
    "cursors",
    "breakers",
    "notices",
    "workers",
    "samples",
    "sweeps",
    "maintenance_tasks",
    "audit_links",
    "audit",
    "blocks",
    "mutations",
    "runs",
    "sessions",
    "deliveries",
    "events",
    "subscriptions",
    "handlers",
    "renames",
    "topics",
    "workflows",
)
FUNCTIONS = (
    "refuse_skip",
    "refuse_transfer",
    "refuse_release",
    "require_inputs",
    "refuse",
    "handler_facts",
    "await_link",
    "chain_audit",
    "link_hash",
    "audit_row_hash",
    "prune_audit",
    "prune_runs",
    "publish",
    "routes",
    "oldest_compatible_code",
    "next_event_id",
    "uuid7",
    "clock",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"DROP TABLE pipeline.{table}")
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION pipeline.{function}")
    op.execute("DROP SEQUENCE pipeline.event_ids")
