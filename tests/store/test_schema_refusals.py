"""What the database refuses by itself, one case per sentence of the schema.

Every case starts from a row that transitions reached and writes without them. The write is rolled
back, so the invariants hold afterwards. A constraint without a case fails the last test here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from pipeline.background import doctor
from pipeline.domain.access import LoginSource, Rights, Role
from pipeline.domain.acts import BulkAct, NewPreview, ProposedAct, state_token
from pipeline.domain.failures import FailureKind
from pipeline.domain.states import Phase
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.store.schema import metadata
from pipeline.transitions import access, breakers, bulk, resolution, workflows
from tests import factories as make
from tests.support import schema_catalog

Given = Callable[[Database], dict[str, Any]]

_RELEASE = text("UPDATE pipeline.deliveries SET status = 'pending', run_id = NULL WHERE event_id = :event")


def fresh(db: Database) -> dict[str, Any]:
    """A workflow with one pending event."""
    make.a_workflow(db)
    (event,) = make.some_events(db, "m-1")
    return {"event": event, "handler": make.a_delivery(db, event).handler_id}


def run_in(phase: Phase, **options: Any) -> Given:
    def given(db: Database) -> dict[str, Any]:
        keys = fresh(db)
        run = make.a_run(db, phase, **options)
        return {**keys, "run": run.id, "mutation": run.mutation_id, "session": run.session_id}

    return given


def stopped_in(phase: Phase, kind: FailureKind = FailureKind.LOGIC) -> Given:
    def given(db: Database) -> dict[str, Any]:
        keys = run_in(phase)(db)
        make.stopped(db, make.the_run(db, keys["run"]), kind)
        return keys

    return given


def chained(db: Database) -> dict[str, Any]:
    """A workflow in maintenance, and the chained act that says so."""
    keys = in_maintenance(db)
    doctor.chain(db)
    return keys


def carried_forward(db: Database) -> dict[str, Any]:
    """A run that stopped after its mutation, and the run that carries it forward."""
    make.a_workflow(db, failures=make.NO_PAUSE)
    (event,) = make.some_events(db, "m-1")
    stopped = make.stopped(db, make.a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    retry = make.carried_forward(db, stopped)
    return {"event": event, "run": stopped.id, "retry": retry.id}


def in_maintenance(db: Database) -> dict[str, Any]:
    """A workflow in maintenance with an open task, paused by an operator meanwhile."""
    keys = fresh(db)
    with db.transaction() as tx:
        workflows.enter_maintenance(tx, "billing", "division by zero")
        workflows.pause(tx, "billing", make.SOMEBODY)
    return keys


pending, preparing, prepared = run_in(Phase.PENDING), run_in(Phase.PREPARING), run_in(Phase.PREPARED)


def previewed(db: Database) -> dict[str, Any]:
    """A frozen preview, an answer of the API and a saved view."""
    new = NewPreview(
        act=BulkAct.SKIP, created_by="ada", workflows=(), request={}, items=({"subject": "1"},), refused={}, left_out={}
    )
    with db.transaction() as tx:
        bulk.freeze(tx, new)
        access.begin_request(tx, "ada", "k", "h")
        access.save_view(tx, "ada", "mine", page="inbox", query="")
    return {}


def proposed(db: Database) -> dict[str, Any]:
    """An answer that waits for a second person."""
    keys = run_in(Phase.MUTATING)(db)
    with db.transaction() as tx:
        state = state_token(work.mutations(tx, [keys["mutation"]])[0])
        resolution.propose(tx, keys["mutation"], ProposedAct.HAPPENED, {}, make.SOMEBODY, state=state)
    return keys


def held_back(db: Database) -> dict[str, Any]:
    """An operation whose breaker is open."""
    with db.transaction() as tx:
        breakers.open_by_operator(tx, ("mail", "send"), make.SOMEBODY)
    return {}


def logged_in(db: Database) -> dict[str, Any]:
    """A login that was opened with an API token."""
    rights, hour = Rights(role=Role.VIEWER), timedelta(hours=1)
    with db.transaction() as tx:
        secret = access.NewSecret(secret_hash="a", name="ada", rights=rights, lifetime=hour)
        token = access.create_token(tx, secret, "pl_a", make.SOMEBODY)
        access.open_login(tx, secret, LoginSource.TOKEN, token.id)
    return {}


mutating, mutated = run_in(Phase.MUTATING), run_in(Phase.MUTATED)
emitting, committed = run_in(Phase.EMITTING), run_in(Phase.COMMITTED)
unapproved = run_in(Phase.MUTATING, needs_approval=True)
in_doubt = blocked = stopped_in(Phase.MUTATING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row reached by transitions, a write that no transition makes, and the constraint that refuses it."""

    refused_by: str
    given: Given
    write: str


def runs_set(rule: str, given: Given, change: str) -> Case:
    return Case(refused_by=f"runs_{rule}", given=given, write=f"UPDATE pipeline.runs SET {change} WHERE id = :run")


def ledger_set(rule: str, given: Given, change: str) -> Case:
    write = f"UPDATE pipeline.mutations SET {change} WHERE id = :mutation"
    return Case(refused_by=f"mutations_{rule}", given=given, write=write)


def delivery_set(rule: str, given: Given, change: str) -> Case:
    write = f"UPDATE pipeline.deliveries SET {change} WHERE event_id = :event"
    return Case(refused_by=f"deliveries_{rule}", given=given, write=write)


def workflow_set(rule: str, change: str) -> Case:
    return Case(refused_by=f"workflows_{rule}", given=fresh, write=f"UPDATE pipeline.workflows SET {change}")


def handler_set(rule: str, change: str) -> Case:
    return Case(refused_by=f"handlers_{rule}", given=fresh, write=f"UPDATE pipeline.handlers SET {change}")


def session_set(rule: str, change: str) -> Case:
    write = f"UPDATE pipeline.sessions SET {change} WHERE id = :session"
    return Case(refused_by=f"sessions_{rule}", given=pending, write=write)


def doubled(rule: str, given: Given, table: str, **but: str) -> Case:
    """Insert a copy of a row that is there, with the named columns changed."""
    columns = [column.name for column in metadata.tables[f"pipeline.{table}"].columns if column.computed is None]
    values = ", ".join(but.get(column, column) for column in columns)
    into = f"INSERT INTO pipeline.{table} ({', '.join(columns)}) OVERRIDING SYSTEM VALUE"
    return Case(refused_by=rule, given=given, write=f"{into} SELECT {values} FROM pipeline.{table} LIMIT 1")


CASES = (
    # workflows
    workflow_set("desired_known", "desired = 'asleep'"),
    workflow_set("on_uncertain_known", "on_uncertain = 'shrug'"),
    workflow_set("on_logic_error_known", "on_logic_error = 'shrug'"),
    workflow_set("on_exhausted_known", "on_exhausted = 'shrug'"),
    workflow_set("concurrency_positive", "concurrency = 0"),
    workflow_set("ledger_outlives_done", "keep_ledger = '1 day'"),
    workflow_set("ledger_outlives_done", "keep_done = '2 days', keep_ledger = '1 day'"),
    workflow_set("maintenance_has_since", "maintenance = true"),
    workflow_set("maintenance_has_since", "maintenance_since = pipeline.clock()"),
    # handlers
    handler_set("kind_known", "kind = 'spectator'"),
    handler_set("after_failed_mutation_known", "after_failed_mutation = 'give_up'"),
    handler_set("batch_positive", "batch = 0"),
    handler_set("horizon_complete", "horizon = 7, horizon_xmax = NULL"),
    handler_set("horizon_complete", "horizon = NULL, horizon_xmax = '7'"),
    handler_set("workflow_name_once", "name = 'same'"),
    handler_set("workflow_fk", "workflow = 'nowhere'"),
    # deliveries
    delivery_set("status_known", fresh, "status = 'lost'"),
    delivery_set("reserved_has_owner", fresh, "status = 'reserved'"),
    delivery_set("reserved_has_owner", fresh, "status = 'consumed'"),
    delivery_set("reserved_has_owner", prepared, "run_id = NULL"),
    delivery_set("reserved_has_owner", committed, "run_id = NULL"),
    delivery_set("open_has_no_owner", fresh, "run_id = gen_random_uuid()"),
    delivery_set("open_has_no_owner", prepared, "status = 'pending'"),
    delivery_set("open_has_no_owner", prepared, "status = 'quarantined'"),
    delivery_set("only_pending_is_offered", prepared, "offered_to = run_id"),
    delivery_set("slice_limit_positive", fresh, "slice_limit = 0"),
    delivery_set("group_has_several", fresh, "group_size = 1"),
    delivery_set("sliced_in_one_way", fresh, "slice_limit = 2, group_size = 2"),
    delivery_set("sliced_in_one_way", fresh, "slice_limit = 2, narrowing_declined = true"),
    delivery_set("sliced_in_one_way", fresh, "group_size = 2, narrowing_declined = true"),
    delivery_set("done_stays_done", committed, "status = 'pending', run_id = NULL"),
    delivery_set("done_stays_done", committed, "status = 'reserved'"),
    delivery_set("done_stays_done", committed, "status = 'skipped'"),
    *(
        delivery_set("release_guarded", given, f"status = '{status}', run_id = NULL")
        for given in (mutating, in_doubt, stopped_in(Phase.EMITTING), mutated)
        for status in ("pending", "quarantined")
    ),
    *(
        delivery_set("transfer_guarded", given, f"run_id = '{UUID(int=7)}'")
        for given in (prepared, mutating, in_doubt, mutated)
    ),
    *(delivery_set("skip_guarded", given, "status = 'skipped'") for given in (prepared, mutating, mutated)),
    *(
        Case(refused_by="deliveries_open_not_deleted", given=given, write="DELETE FROM pipeline.deliveries")
        for given in (fresh, prepared)
    ),
    # sessions
    session_set("result_known", "result = 'so-so', finished_at = pipeline.clock()"),
    session_set("finished_has_result", "finished_at = pipeline.clock()"),
    session_set("finished_has_result", "result = 'completed'"),
    session_set("workflow_fk", "workflow = 'nowhere'"),
    # runs
    runs_set("phase_known", pending, "phase = 'dreaming'"),
    runs_set("status_known", pending, "status = 'asleep', finished_at = pipeline.clock()"),
    runs_set("mutation_outcome_known", emitting, "mutation_outcome = 'perhaps'"),
    runs_set("committed_together", emitting, "phase = 'committed'"),
    runs_set("committed_together", preparing, "status = 'committed', finished_at = now(), lease_expires_at = NULL"),
    runs_set("finished_unless_moving", preparing, "finished_at = pipeline.clock()"),
    runs_set("finished_unless_moving", preparing, "status = 'crashed', lease_expires_at = NULL"),
    runs_set("finished_unless_moving", preparing, "status = 'paused:approval', lease_expires_at = NULL"),
    runs_set("finished_unless_moving", committed, "finished_at = NULL"),
    runs_set("finished_unless_moving", unapproved, "finished_at = pipeline.clock()"),
    runs_set("outcome_when_mutated", prepared, "mutation_outcome = 'success'"),
    runs_set("outcome_when_mutated", mutating, "mutation_outcome = 'skipped'"),
    runs_set("failed_mutation_ends", emitting, "mutation_outcome = 'failure'"),
    runs_set("failed_mutation_ends", committed, "mutation_outcome = 'failure'"),
    runs_set("only_active_is_leased", stopped_in(Phase.PREPARING), "lease_expires_at = pipeline.clock()"),
    runs_set("only_active_is_leased", committed, "lease_expires_at = pipeline.clock()"),
    runs_set("only_stopped_is_retried", preparing, "retry_pending = true"),
    runs_set("only_stopped_is_retried", committed, "retry_pending = true"),
    runs_set("cost_is_not_negative", committed, "cost = -1"),
    *(
        runs_set("phase_only_grows", run_in(phase), f"phase = '{before}'")
        for before, phase in zip(Phase, list(Phase)[1:], strict=False)
    ),
    runs_set("phase_only_grows", committed, "phase = 'pending', status = 'active', finished_at = NULL"),
    runs_set("stopped_stays_stopped", stopped_in(Phase.PREPARING), "status = 'active', finished_at = NULL"),
    runs_set("stopped_stays_stopped", stopped_in(Phase.PREPARING), "status = 'crashed'"),
    runs_set("stopped_stays_stopped", committed, "status = 'crashed'"),
    # mutations
    ledger_set("status_known", mutating, "status = 'perhaps'"),
    ledger_set("resolved_by_known", mutated, "resolved_by = 'nobody'"),
    ledger_set("resolved_has_resolver", mutating, "status = 'applied'"),
    ledger_set("resolved_has_resolver", mutating, "status = 'failed'"),
    ledger_set("resolved_has_resolver", mutating, "resolved_by = 'call', resolved_at = pipeline.clock()"),
    ledger_set("resolved_has_resolver", mutated, "resolved_by = NULL, resolved_at = NULL"),
    ledger_set("resolver_has_time", mutated, "resolved_at = NULL"),
    ledger_set("resolver_has_time", mutating, "resolved_at = pipeline.clock()"),
    ledger_set("reconcile_has_time", mutating, "status = 'needs_reconcile'"),
    ledger_set("reconcile_has_time", in_doubt, "next_reconcile_at = NULL"),
    ledger_set("reconcile_has_time", mutating, "next_reconcile_at = pipeline.clock()"),
    ledger_set("only_reconcilable_is_reconciled", in_doubt, "reconcilable = false"),
    ledger_set("only_failed_is_monitored", mutating, "next_monitor_at = pipeline.clock()"),
    ledger_set("only_failed_is_monitored", mutated, "next_monitor_at = pipeline.clock()"),
    ledger_set("only_failed_is_found_late", mutated, "found_late_at = pipeline.clock()"),
    ledger_set("only_failed_is_found_late", in_doubt, "found_late_at = pipeline.clock()"),
    ledger_set("only_failed_is_refused", mutated, "refused = true"),
    ledger_set("only_failed_is_refused", in_doubt, "refused = true"),
    ledger_set("only_keyed_has_lifetime", mutating, "keyed = false, key_lifetime = interval '1 day'"),
    ledger_set("only_found_late_is_acknowledged", mutating, "acknowledged_by = 'somebody'"),
    ledger_set("sent_has_deadline", mutating, "send_deadline = NULL"),
    ledger_set("sent_has_deadline", unapproved, "send_deadline = pipeline.clock()"),
    ledger_set("sent_has_quiet_period", mutating, "quiet_until = NULL"),
    ledger_set("sent_has_quiet_period", unapproved, "quiet_until = pipeline.clock()"),
    *(
        ledger_set("unresolved_was_sent", unapproved, change)
        for change in (
            "status = 'in_flight'",
            "status = 'indeterminate'",
            "status = 'needs_reconcile', next_reconcile_at = pipeline.clock()",
            "status = 'applied', resolved_by = 'operator', resolved_at = pipeline.clock()",
        )
    ),
    *(
        ledger_set("resolved_stays_resolved", mutated, f"status = '{status}', resolved_by = NULL, resolved_at = NULL")
        for status in ("in_flight", "needs_reconcile", "indeterminate", "pending")
    ),
    ledger_set("resolved_stays_resolved", mutated, "status = 'failed'"),
    ledger_set("run_id_fk", mutating, "run_id = gen_random_uuid()"),
    # operations held back
    Case(
        refused_by="breakers_pk",
        given=held_back,
        write="INSERT INTO pipeline.breakers SELECT * FROM pipeline.breakers",
    ),
    # callers of the API
    *(
        Case(refused_by=f"{table}_{rule}", given=logged_in, write=f"UPDATE pipeline.{table} SET {change}")
        for table, rule, change in (
            ("access_tokens", "role_known", "role = 'boss'"),
            ("access_tokens", "revoker_of_revoked", "revoked_at = pipeline.clock()"),
            ("logins", "role_known", "role = 'boss'"),
            ("logins", "source_known", "source = 'mood'"),
            ("logins", "seen_if_open", "seen_at = NULL"),
            ("logins", "token_of_source", "token_id = NULL"),
            ("logins", "token_id_fk", "token_id = gen_random_uuid()"),
        )
    ),
    doubled("access_tokens_pk", logged_in, "access_tokens", secret_hash="'b'"),
    doubled("access_tokens_secret_hash_once", logged_in, "access_tokens", id="gen_random_uuid()"),
    doubled("logins_pk", logged_in, "logins", secret_hash="'b'"),
    doubled("logins_secret_hash_once", logged_in, "logins", id="gen_random_uuid()"),
    # what workers record
    Case(
        refused_by="operations_pk",
        given=fresh,
        write="INSERT INTO pipeline.operations (connector, operation, is_mutation, redact, shown, shows, look_up, "
        "keyed, can_reconcile, can_fetch, timeout, settle, value) SELECT 'pay', 'charge', true, '{}', '{}', '', '', "
        "false, false, false, '1s', '1s', '' FROM generate_series(1, 2)",
    ),
    Case(
        refused_by="workers_pk",
        given=fresh,
        write="INSERT INTO pipeline.workers (name, host, pid, pool, concurrency, queues, workflows, code_version, "
        "package_version) SELECT 'w@h:1', 'h', 1, 'prefork', 2, '{}', '{}', '', '' FROM generate_series(1, 2)",
    ),
    Case(
        refused_by="samples_pk",
        given=fresh,
        write="INSERT INTO pipeline.samples (workflow, span, published, committed, stopped, mutated, uncertain, "
        "backlog, unresolved) SELECT 'shop', '1m', 0, 0, 0, 0, 0, 0, 0 FROM generate_series(1, 2)",
    ),
    # former names
    Case(
        refused_by="renames_kind_known",
        given=fresh,
        write="INSERT INTO pipeline.renames (kind, workflow, former, name) VALUES ('mood', '', 'a', 'b')",
    ),
    Case(
        refused_by="renames_pk",
        given=fresh,
        write="INSERT INTO pipeline.renames (kind, workflow, former, name) "
        "VALUES ('topic', 'billing', 'a', 'b'), ('topic', 'billing', 'a', 'c')",
    ),
    # blocks
    Case(refused_by="blocks_kind_known", given=blocked, write="UPDATE pipeline.blocks SET kind = 'mood'"),
    Case(refused_by="blocks_workflow_fk", given=blocked, write="UPDATE pipeline.blocks SET workflow = 'nowhere'"),
    Case(refused_by="blocks_run_id_fk", given=blocked, write="UPDATE pipeline.blocks SET run_id = gen_random_uuid()"),
    # what others point at stays
    Case(refused_by="handlers_workflow_fk", given=fresh, write="DELETE FROM pipeline.workflows"),
    Case(refused_by="subscriptions_handler_id_fk", given=fresh, write="DELETE FROM pipeline.handlers"),
    Case(refused_by="mutations_run_id_fk", given=mutating, write="DELETE FROM pipeline.runs"),
    Case(
        refused_by="maintenance_tasks_workflow_fk",
        given=fresh,
        write="INSERT INTO pipeline.maintenance_tasks (workflow, reason) VALUES ('nowhere', '')",
    ),
    Case(refused_by="bulk_previews_act_known", given=previewed, write="UPDATE pipeline.bulk_previews SET act = 'drop'"),
    Case(
        refused_by="bulk_previews_committed_by_name",
        given=previewed,
        write="UPDATE pipeline.bulk_previews SET committed_at = pipeline.clock()",
    ),
    Case(
        refused_by="bulk_previews_finished_was_committed",
        given=previewed,
        write="UPDATE pipeline.bulk_previews SET finished_at = pipeline.clock()",
    ),
    Case(
        refused_by="bulk_previews_committed_or_discarded",
        given=previewed,
        write="""UPDATE pipeline.bulk_previews SET committed_at = pipeline.clock(), committed_by = 'ada',
                 discarded_at = pipeline.clock()""",
    ),
    Case(
        refused_by="bulk_previews_done_within_items",
        given=previewed,
        write="UPDATE pipeline.bulk_previews SET done_count = 2",
    ),
    Case(refused_by="proposals_act_known", given=proposed, write="UPDATE pipeline.proposals SET act = 'skip'"),
    Case(
        refused_by="proposals_confirmed_is_closed",
        given=proposed,
        write="UPDATE pipeline.proposals SET confirmed_by = 'bob'",
    ),
    Case(
        refused_by="proposals_confirmed_by_another",
        given=proposed,
        write="UPDATE pipeline.proposals SET confirmed_by = proposed_by, closed_at = pipeline.clock()",
    ),
    # at most one
    doubled("proposals_pk", proposed, "proposals", mutation_id="gen_random_uuid()"),
    doubled("proposals_open", proposed, "proposals", id="gen_random_uuid()"),
    doubled("bulk_previews_pk", previewed, "bulk_previews"),
    doubled("api_requests_pk", previewed, "api_requests"),
    doubled("saved_views_pk", previewed, "saved_views"),
    doubled("workflows_pk", fresh, "workflows"),
    doubled("topics_pk", fresh, "topics"),
    doubled("handlers_pk", fresh, "handlers", name="'another'"),
    doubled("handlers_workflow_name_once", fresh, "handlers", id="4711"),
    doubled("subscriptions_pk", fresh, "subscriptions"),
    doubled("events_pk", fresh, "events", message_id="'another'"),
    doubled("events_workflow_topic_message_id_once", fresh, "events", id="4711"),
    doubled("deliveries_pk", fresh, "deliveries"),
    doubled("deliveries_pk", committed, "deliveries", status="'pending'", run_id="NULL"),
    doubled("sessions_pk", pending, "sessions", finished_at="pipeline.clock()", result="'failed'"),
    doubled("sessions_one_open", pending, "sessions", id="gen_random_uuid()"),
    doubled("runs_pk", pending, "runs"),
    doubled("mutations_pk", mutating, "mutations", run_id="gen_random_uuid()"),
    doubled("mutations_run_id_once", mutating, "mutations", id="gen_random_uuid()"),
    doubled("blocks_pk", blocked, "blocks", kind="'internal'"),
    doubled("blocks_open", blocked, "blocks", id="4711"),
    doubled("audit_pk", in_maintenance, "audit"),
    Case(refused_by="audit_final", given=chained, write="UPDATE pipeline.audit SET actor = 'eve'"),
    Case(refused_by="audit_kept", given=chained, write="DELETE FROM pipeline.audit"),
    Case(refused_by="mutations_kept", given=mutating, write="DELETE FROM pipeline.mutations"),
    Case(refused_by="audit_links_kept", given=chained, write="DELETE FROM pipeline.audit_links"),
    Case(refused_by="audit_links_final", given=chained, write="UPDATE pipeline.audit_links SET hash = ''"),
    Case(
        refused_by="audit_links_chained_or_waits",
        given=fresh,
        write="INSERT INTO pipeline.audit_links (audit_id, position) VALUES (1, 1)",
    ),
    doubled("audit_links_pk", chained, "audit_links"),
    doubled("audit_links_chain", chained, "audit_links", audit_id="4711"),
    Case(
        refused_by="sweeps_pk",
        given=fresh,
        write="INSERT INTO pipeline.sweeps (name) VALUES ('tick'), ('tick')",
    ),
    Case(
        refused_by="cursors_pk",
        given=fresh,
        write="INSERT INTO pipeline.cursors (name, position) VALUES ('runs', '1'), ('runs', '2')",
    ),
    Case(
        refused_by="archive_pk",
        given=fresh,
        write="INSERT INTO pipeline.archive (kind, id, content) VALUES ('run', 'x', '{}'), ('run', 'x', '{}')",
    ),
    Case(
        refused_by="notices_pk",
        given=fresh,
        write="INSERT INTO pipeline.notices (kind, subject) VALUES ('blocked', 'x'), ('blocked', 'x')",
    ),
    doubled("maintenance_tasks_pk", in_maintenance, "maintenance_tasks", closed_at="pipeline.clock()"),
    doubled("maintenance_tasks_one_open", in_maintenance, "maintenance_tasks", id="4711"),
    Case(
        refused_by="runs_retry_once",
        given=carried_forward,
        write="""INSERT INTO pipeline.runs (workflow, handler_id, session_id, retry_of)
                 SELECT workflow, handler_id, session_id, retry_of FROM pipeline.runs WHERE id = :retry""",
    ),
)


def constraint_names(case: Case) -> str:
    return case.refused_by


@pytest.mark.parametrize("case", CASES, ids=constraint_names)
def test_the_database_refuses_what_no_transition_does(db: Database, case: Case) -> None:
    keys = case.given(db)
    with pytest.raises(IntegrityError) as refusal, db.transaction() as tx:
        tx.execute(text(case.write), **{key: value for key, value in keys.items() if f":{key}" in case.write})
    diagnosis: Any = refusal.value.orig
    assert diagnosis.diag.constraint_name == case.refused_by
    assert diagnosis.diag.schema_name == "pipeline"
    assert case.refused_by.startswith(diagnosis.diag.table_name)


def test_every_rule_of_the_schema_has_a_case_that_it_refuses(db: Database) -> None:
    with db.engine.connect() as connection:
        rules = set(schema_catalog.refusals(connection))
    tried = {case.refused_by for case in CASES}
    assert sorted(rules - tried) == [], "rules without a case"
    assert sorted(tried - rules) == [], "cases for rules that are gone"


def test_a_refusal_by_a_trigger_names_what_it_refuses(db: Database) -> None:
    keys = mutating(db)
    words = f"event {keys['event']} stays reserved: its run {keys['run']} holds an applied or unresolved mutation"
    with pytest.raises(IntegrityError, match=words), db.transaction() as tx:
        tx.execute(_RELEASE, event=keys["event"])


def test_an_event_whose_run_has_no_mutation_may_be_released(db: Database) -> None:
    keys = prepared(db)
    with db.engine.connect() as connection:
        assert connection.execute(_RELEASE, {"event": keys["event"]}).rowcount == 1
