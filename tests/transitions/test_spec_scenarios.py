"""The fourteen walk-throughs of EXECUTION, each by its number, on a real Postgres."""

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import Backoff, FailurePolicy
from pipeline.domain.states import MutationOutcome, Phase, PhaseTask, RunStatus
from pipeline.domain.values import NewEvent, PreparedRun, RunOutput
from pipeline.domain.workflows import BlockKind, DesiredStatus, WorkflowStatus, workflow_status
from pipeline.store.database import Database
from pipeline.store.reads import ledger, work
from pipeline.transitions import resolution, runs, starts, workflows
from tests.factories import (
    LEASE,
    OUT,
    SOMEBODY,
    TIMEOUT,
    a_run,
    a_workflow,
    applied,
    carried_forward,
    committed,
    event_status,
    held,
    refused,
    some_events,
    stopped,
    the_mutation,
    the_run,
)
from tests.support.rule import rule
from tests.support.table_reads import open_session, session_of, status_of, workflow_row


@rule("X-S1")
def test_scenario_1_a_logic_error_in_prepare_releases_inputs_and_enters_maintenance(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.PREPARING))
    assert (run.status, run.phase) == (RunStatus.FAILED_LOGIC, Phase.PREPARING)
    assert event_status(db, event) == "pending"
    assert session_of(db, run).result == "failed"
    assert workflow_row(db).maintenance
    assert status_of(db) is WorkflowStatus.ACTIVE
    with db.transaction() as tx:
        assert not starts.start(tx, "billing", "send").runs
    end_maintenance(db)
    assert not the_run(db, run.id).retry_pending
    fresh = a_run(db, Phase.PREPARED)
    assert fresh.event_ids == [event]


@rule("X-S2")
def test_scenario_2_a_logic_error_in_next_keeps_inputs_and_is_retried_after_the_fix(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING))
    assert (run.status, run.phase) == (RunStatus.FAILED_LOGIC, Phase.EMITTING)
    assert run.retry_pending
    assert event_status(db, event) == "reserved"
    end_maintenance(db)
    retry = carried_forward(db, run)
    assert (retry.phase, retry.retry_of, retry.event_ids) == (Phase.EMITTING, run.id, [event])
    assert retry.prepare_result == run.prepare_result
    assert not the_run(db, run.id).retry_pending
    done = committed(db, retry)
    assert done.status == RunStatus.COMMITTED
    assert event_status(db, event) == "consumed"


@rule("X-S3")
def test_scenario_3_a_transient_error_in_prepare_is_followed_by_a_fresh_run_after_a_pause(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.PREPARING), FailureKind.TRANSIENT)
    assert run.status == RunStatus.PAUSED_TRANSIENT
    assert not run.retry_pending
    assert event_status(db, event) == "pending"
    assert status_of(db) is WorkflowStatus.ACTIVE
    with db.transaction() as tx:
        (facts,) = [row for row in work.handler_facts(tx, "billing") if row.name == "send"]
        assert facts.retry_at == run.finished_at + FailurePolicy().backoff.base
    assert a_run(db, Phase.PREPARED).event_ids == [event]


@rule("X-S4")
def test_scenario_4_a_transient_error_in_next_is_retried_after_a_pause(db: Database) -> None:
    a_workflow(db, failures=FailurePolicy(backoff=Backoff(base=LEASE / 2)))
    (event,) = some_events(db, "m1")
    run = stopped(db, a_run(db, Phase.EMITTING), FailureKind.TRANSIENT)
    assert run.status == RunStatus.PAUSED_TRANSIENT
    assert run.retry_pending
    with db.transaction() as tx:
        assert starts.retry(tx, [run.id]).runs == ()
    db.advance_clock(LEASE)
    committed(db, carried_forward(db, run))
    assert event_status(db, event) == "consumed"


@rule("X-S5")
def test_scenario_5_an_applied_mutation_continues_to_next_and_commits(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = applied(db, a_run(db, Phase.MUTATING), result={"id": "r-1"})
    assert (run.phase, run.mutation_outcome) == (Phase.MUTATED, MutationOutcome.SUCCESS)
    assert the_mutation(db, run.mutation_id).status == "applied"
    done = committed(db, run)
    assert (done.phase, done.status) == (Phase.COMMITTED, RunStatus.COMMITTED)
    assert event_status(db, event) == "consumed"


@rule("X-S6")
def test_scenario_6_a_refused_mutation_releases_inputs_for_a_fresh_run_after_the_fix(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = refused(db, a_run(db, Phase.MUTATING))
    assert (run.status, run.phase, run.mutation_outcome) == ("failed:logic", Phase.MUTATED, MutationOutcome.FAILURE)
    assert not run.retry_pending
    assert the_mutation(db, run.mutation_id).status == "failed"
    assert event_status(db, event) == "pending"
    assert session_of(db, run).result == "failed"
    end_maintenance(db)
    assert a_run(db, Phase.PREPARED).event_ids == [event]


@rule("X-S7")
def test_scenario_7_a_crash_in_flight_waits_until_an_operator_resolves_it_as_did_not_happen(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    run = a_run(db, Phase.MUTATING, reconcilable=False)
    db.advance_clock(LEASE + TIMEOUT)
    (ended,) = rescuer.recover_crashed_runs(db)
    assert ended.run_id == run.id
    run = the_run(db, run.id)
    assert (run.status, run.retry_pending) == (RunStatus.PAUSED_RECONCILIATION, True)
    assert the_mutation(db, run.mutation_id).status == "indeterminate"
    assert status_of(db) is WorkflowStatus.PAUSED
    assert event_status(db, event) == "reserved"
    with db.transaction() as tx:
        resolution.did_not_happen(tx, run.mutation_id, SOMEBODY)
    run = the_run(db, run.id)
    assert (run.mutation_outcome, run.retry_pending) == (MutationOutcome.FAILURE, False)
    assert event_status(db, event) == "pending"
    assert status_of(db) is WorkflowStatus.ACTIVE
    assert a_run(db, Phase.PREPARED).event_ids == [event]


@rule("X-S8")
def test_scenario_8_a_skipped_mutation_skips_its_events_and_next_still_runs(db: Database) -> None:
    a_workflow(db)
    first, second = some_events(db, "m1", "m2")
    run = a_run(db, Phase.MUTATING, reconcilable=False)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    with db.transaction() as tx:
        resolution.skip(tx, run.mutation_id, SOMEBODY)
    mutation = the_mutation(db, run.mutation_id)
    assert (mutation.status, mutation.resolved_by) == ("failed", "operator_skip")
    assert event_status(db, first) == "skipped"
    assert the_run(db, run.id).mutation_outcome == MutationOutcome.SKIPPED
    assert status_of(db) is WorkflowStatus.ACTIVE
    retry = carried_forward(db, the_run(db, run.id))
    assert (retry.phase, retry.mutation_outcome) == (Phase.EMITTING, MutationOutcome.SKIPPED)
    committed(db, retry)
    assert event_status(db, first) == "skipped"
    assert a_run(db, Phase.PREPARED).event_ids == [second]


@rule("X-S9")
def test_scenario_9_empty_reservations_skip_mutate_and_next_still_runs(db: Database) -> None:
    a_workflow(db)
    run = a_run(db, Phase.PREPARING)
    with db.transaction() as tx:
        prepared = runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only()
        assert runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed == ()
    assert (prepared.phase, prepared.event_ids) == (Phase.PREPARED, [])
    done = committed(db, prepared)
    assert (done.status, done.mutation_outcome) == (RunStatus.COMMITTED, MutationOutcome.NONE)


@rule("X-S10")
def test_scenario_10_a_full_cycle_ends_committed_with_state_outputs_and_an_open_session(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    output = NewEvent(topic=OUT, message_id="receipt:1", payload={"mail": 1})
    run = a_run(db, Phase.EMITTING)
    with db.transaction() as tx:
        emitted = RunOutput(lease=held(run), events=(output,), state={"sent": 1}, has_state=True)
        runs.commit(tx, [emitted]).only()
    assert event_status(db, event) == "consumed"
    assert the_run(db, run.id).output_state == {"sent": 1}
    with db.transaction() as tx:
        handler = work.handler(tx, "billing", "send")
        assert handler is not None
        assert handler.state == {"sent": 1}
    assert open_session(db) is not None
    assert rescuer.recover_unfinished_sessions(db) == 1
    session = session_of(db, run)
    assert (session.result, session.run_count) == ("completed", 1)


@rule("X-S11")
def test_scenario_11_a_crash_leaves_an_active_run_that_recovery_disposes_of_by_the_boundary(db: Database) -> None:
    a_workflow(db, failures=FailurePolicy(max_failures=10))
    expected = {
        Phase.PREPARING: (RunStatus.CRASHED, False, "pending"),
        Phase.MUTATING: (RunStatus.PAUSED_RECONCILIATION, True, "reserved"),
        Phase.EMITTING: (RunStatus.CRASHED, True, "reserved"),
    }
    for phase, (status, retry_pending, event) in expected.items():
        (event_id,) = some_events(db, f"m-{phase}")
        run = a_run(db, phase)
        db.advance_clock(LEASE + TIMEOUT)
        rescuer.recover_crashed_runs(db)
        run = the_run(db, run.id)
        assert (run.status, run.retry_pending) == (status, retry_pending)
        assert event_status(db, event_id) == event
        assert rescuer.recover_crashed_runs(db) == (), "a consistent state has nothing to recover"
        finish_crashed_run(db, run)


@rule("X-S12")
def test_scenario_12_a_producer_that_fails_touches_no_event(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    with db.transaction() as tx:
        (run,) = starts.start(tx, "billing", "poll").runs
        (run,) = runs.claim(tx, PhaseTask.PRODUCE, [run.id], lease_duration=LEASE, worker="w").claimed
    run = stopped(db, run)
    assert (run.status, run.retry_pending) == (RunStatus.FAILED_LOGIC, False)
    assert session_of(db, run).result == "failed"
    assert workflow_row(db).maintenance
    assert event_status(db, event) == "pending"


@rule("X-S13")
def test_scenario_13_an_auth_error_shows_as_error_until_an_operator_resumes(db: Database) -> None:
    a_workflow(db)
    (event,) = some_events(db, "m1")
    before = stopped(db, a_run(db, Phase.PREPARING), FailureKind.AUTH)
    assert (before.status, event_status(db, event)) == (RunStatus.PAUSED_APPROVAL, "pending")
    assert status_of(db) is WorkflowStatus.ERROR
    resumed(db)
    after = stopped(db, a_run(db, Phase.EMITTING), FailureKind.AUTH)
    assert (after.retry_pending, event_status(db, event)) == (True, "reserved")
    assert status_of(db) is WorkflowStatus.ERROR
    resumed(db)
    assert status_of(db) is WorkflowStatus.ACTIVE
    committed(db, carried_forward(db, after))
    assert event_status(db, event) == "consumed"


@rule("X-S14")
def test_scenario_14_the_first_consumer_commits_and_the_second_is_retried(db: Database) -> None:
    a_workflow(db, consumers=("send", "book"))
    (event,) = some_events(db, "m1")
    first = a_run(db, Phase.COMMITTED, handler="send")
    second = stopped(db, a_run(db, Phase.EMITTING, handler="book"))
    assert first.session_id == second.session_id
    assert session_of(db, second).result == "failed"
    assert (event_status(db, event, "send"), event_status(db, event, "book")) == ("consumed", "reserved")
    end_maintenance(db)
    retry = carried_forward(db, second)
    assert retry.session_id != second.session_id
    committed(db, retry)
    assert event_status(db, event, "book") == "consumed"


def test_an_operators_pause_is_not_overruled_by_blocks(db: Database) -> None:
    a_workflow(db)
    some_events(db, "m1")
    stopped(db, a_run(db, Phase.PREPARING), FailureKind.AUTH)
    with db.transaction() as tx:
        workflows.pause(tx, "billing", SOMEBODY)
        kinds = [BlockKind(row.kind) for row in work.open_blocks(tx, "billing")]
    assert workflow_status(DesiredStatus.PAUSED, kinds) is WorkflowStatus.PAUSED
    assert status_of(db) is WorkflowStatus.PAUSED
    resumed(db)
    assert status_of(db) is WorkflowStatus.ACTIVE


def end_maintenance(db: Database) -> None:
    with db.transaction() as tx:
        assert not workflows.open_maintenance_task(tx, "billing"), "it was opened with the failure"
        workflows.exit_maintenance(tx, "billing", SOMEBODY)


def resumed(db: Database) -> None:
    with db.transaction() as tx:
        workflows.resume(tx, "billing", SOMEBODY)


def finish_crashed_run(db: Database, run: object) -> None:
    """Bring whatever is left of a crashed run to its commit, so that the next one starts clean."""
    with db.transaction() as tx:
        for due in ledger.due_mutations(tx):
            resolution.happened(tx, due.id, SOMEBODY)
        retryable = work.retryable_runs(tx, "billing")
    for run_id in retryable:
        committed(db, carried_forward(db, the_run(db, run_id)))
    if not retryable:
        a_run(db, Phase.COMMITTED)
