"""The transition tables describe the statements exactly: nothing more, nothing less.

Each path is run on a real Postgres and every change of phase and status is written down; the set
of changes seen must be the set of changes declared.
"""

from typing import Any

from sqlalchemy import text

from pipeline.background import rescuer
from pipeline.domain.failures import FailureKind
from pipeline.domain.policies import FailurePolicy
from pipeline.domain.states import (
    DELIVERY_TRANSITIONS,
    INITIAL_PHASES,
    MUTATION_TRANSITIONS,
    PHASE_TRANSITIONS,
    RUN_STATUS_TRANSITIONS,
    Evidence,
    Phase,
    PhaseTask,
)
from pipeline.domain.values import FailedMutation, PreparedRun, RunOutput
from pipeline.store.database import Database, Statement
from pipeline.transitions import events, mutations, reconciliation, resolution, runs, starts, workflows
from tests.factories import (
    LEASE,
    SOMEBODY,
    TIMEOUT,
    a_run,
    a_workflow,
    applied,
    carried_forward,
    committed,
    held,
    refused,
    some_events,
    stopped,
    the_run,
)

#: Writes down every change, and every birth of a run, beside the tables under test.
_WATCH = """
CREATE TABLE public.seen (what text, old text, new text);
CREATE FUNCTION public.watch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_TABLE_NAME = 'runs' AND TG_OP = 'INSERT' THEN
    INSERT INTO public.seen VALUES ('birth', NULL, NEW.phase);
  ELSIF TG_TABLE_NAME = 'runs' THEN
    INSERT INTO public.seen SELECT 'phase', OLD.phase, NEW.phase WHERE OLD.phase <> NEW.phase;
    INSERT INTO public.seen SELECT 'run', OLD.status, NEW.status WHERE OLD.status <> NEW.status;
  ELSE
    INSERT INTO public.seen SELECT TG_TABLE_NAME, OLD.status, NEW.status WHERE OLD.status <> NEW.status;
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER INSERT OR UPDATE ON pipeline.runs FOR EACH ROW EXECUTE FUNCTION public.watch();
CREATE TRIGGER watch AFTER UPDATE ON pipeline.mutations FOR EACH ROW EXECUTE FUNCTION public.watch();
CREATE TRIGGER watch AFTER UPDATE ON pipeline.deliveries FOR EACH ROW EXECUTE FUNCTION public.watch();
"""
_UNWATCH = "DROP TABLE public.seen; DROP FUNCTION public.watch() CASCADE"


def test_the_functions_make_exactly_the_transitions_that_the_tables_declare(db: Database) -> None:
    with db.transaction() as tx:
        tx.execute(text(_WATCH))
    try:
        for number, road in enumerate(ROADS):
            a_workflow(db, f"w{number}", failures=FailurePolicy(max_failures=10))
            road(db, f"w{number}")
        seen = _seen(db)
    finally:
        with db.transaction() as tx:
            tx.execute(text(_UNWATCH))
    assert seen["birth"] == {(None, phase.value) for phase in INITIAL_PHASES}
    assert seen["phase"] == _declared(PHASE_TRANSITIONS)
    assert seen["run"] == _declared(RUN_STATUS_TRANSITIONS)
    assert seen["mutations"] == _declared(MUTATION_TRANSITIONS)
    assert seen["deliveries"] == _declared(DELIVERY_TRANSITIONS)


def _seen(db: Database) -> dict[str, set[tuple[str | None, str]]]:
    with db.transaction() as tx:
        rows = tx.all(Statement[Any]("SELECT DISTINCT what, old, new FROM public.seen"))
    return {what: {(row.old, row.new) for row in rows if row.what == what} for what in {row.what for row in rows}}


def _declared(moves: Any) -> set[tuple[str, str]]:
    return {(old.value, new.value) for old, targets in moves.items() for new in targets}


def goes_well(db: Database, workflow: str) -> None:
    some_events(db, "m", workflow=workflow)
    a_run(db, Phase.COMMITTED, workflow=workflow)


def asks_for_nothing(db: Database, workflow: str) -> None:
    some_events(db, "m", workflow=workflow)
    run = a_run(db, Phase.PREPARED, workflow=workflow)
    with db.transaction() as tx:
        run = runs.no_mutation(tx, [held(run)]).only()
    committed(db, run)


def has_nothing_to_do(db: Database, workflow: str) -> None:
    run = a_run(db, Phase.PREPARING, workflow=workflow)
    with db.transaction() as tx:
        run = runs.finish_prepare(tx, [PreparedRun(lease=held(run))]).only()
    committed(db, run)


def produces(db: Database, workflow: str) -> None:
    with db.transaction() as tx:
        (run,) = starts.start(tx, workflow, "poll").runs
        (run,) = runs.claim(tx, PhaseTask.PRODUCE, [run.id], lease_duration=LEASE, worker="w").claimed
        runs.commit_producer(tx, [RunOutput(lease=held(run))]).only()


def fails_in_every_way(db: Database, workflow: str) -> None:
    for kind in (FailureKind.TRANSIENT, FailureKind.CRASH, FailureKind.AUTH, FailureKind.INTERNAL, FailureKind.LOGIC):
        some_events(db, f"m-{kind}", workflow=workflow)
        stopped(db, a_run(db, Phase.PREPARED, workflow=workflow), kind)
        with db.transaction() as tx:
            workflows.exit_maintenance(tx, workflow, SOMEBODY)
            workflows.resume(tx, workflow, SOMEBODY)
    committed(db, _carried(db, stopped(db, a_run(db, Phase.EMITTING, workflow=workflow), FailureKind.AUTH), workflow))


def is_refused_and_tried_again(db: Database, workflow: str) -> None:
    a_workflow(db, workflow, after_failed_mutation="mutate")
    some_events(db, "m", workflow=workflow)
    run = refused(db, a_run(db, Phase.MUTATING, workflow=workflow), FailureKind.TRANSIENT)
    db.advance_clock(LEASE)
    carried_forward(db, run)


def is_quarantined_and_handed_back(db: Database, workflow: str) -> None:
    policy = FailurePolicy(quarantine_after=1)
    a_workflow(db, workflow, on_logic_error="quarantine", concurrency=2, failures=policy)
    first, second = some_events(db, "m1", "m2", workflow=workflow)
    stopped(db, a_run(db, Phase.PREPARED, workflow=workflow), FailureKind.LOGIC)
    with db.transaction() as tx:
        events.release(tx, workflow, "send", first, SOMEBODY)
        events.quarantine(tx, workflow, "send", second, SOMEBODY)
        events.skip(tx, workflow, "send", second, SOMEBODY)
        events.skip(tx, workflow, "send", first, SOMEBODY)


def is_resolved_by_an_operator(db: Database, workflow: str) -> None:
    """Every verdict from each of the two states of doubt."""
    for number, escalated in enumerate([False, True]):
        for verdict in (resolution.happened, resolution.did_not_happen, resolution.skip):
            some_events(db, f"m-{number}-{verdict.__name__}", workflow=workflow)
            run = _in_doubt(db, workflow)
            with db.transaction() as tx:
                if escalated:
                    reconciliation.escalate(tx, [run.mutation_id], "asked")
                    resolution.try_again(tx, run.mutation_id, SOMEBODY)
                    reconciliation.escalate(tx, [run.mutation_id], "asked")
                verdict(tx, run.mutation_id, SOMEBODY)
            run = the_run(db, run.id)
            if run.retry_pending:
                committed(db, _carried(db, run, workflow))
            else:
                a_run(db, Phase.COMMITTED, workflow=workflow)
    some_events(db, "m-last", workflow=workflow)
    run = a_run(db, Phase.MUTATING, workflow=workflow, reconcilable=False)
    stopped(db, run, FailureKind.TRANSIENT)


def waits_for_approval(db: Database, workflow: str) -> None:
    some_events(db, "m1", "m2", workflow=workflow)
    run = a_run(db, Phase.MUTATING, workflow=workflow, needs_approval=True)
    with db.transaction() as tx:
        resolution.approve(tx, run.mutation_id, SOMEBODY, request_hash="abc")
        (claimed,) = runs.claim(tx, PhaseTask.MUTATE, [run.id], lease_duration=LEASE, worker="w").claimed
        mutations.send(tx, [held(claimed)]).only()
    committed(db, applied(db, the_run(db, run.id)))
    run = a_run(db, Phase.MUTATING, workflow=workflow, needs_approval=True)
    with db.transaction() as tx:
        resolution.reject(tx, run.mutation_id, SOMEBODY)


def fails_for_good(db: Database, workflow: str) -> None:
    some_events(db, "m", workflow=workflow)
    run = a_run(db, Phase.MUTATING, workflow=workflow)
    with db.transaction() as tx:
        item = FailedMutation(mutation_id=run.mutation_id, error="422", evidence=Evidence.DEFINITE, fence=run.fence)
        mutations.fail(tx, [item]).only()
    stopped(db, the_run(db, run.id), FailureKind.LOGIC)


ROADS = (
    goes_well,
    asks_for_nothing,
    has_nothing_to_do,
    produces,
    fails_in_every_way,
    is_refused_and_tried_again,
    is_quarantined_and_handed_back,
    is_resolved_by_an_operator,
    waits_for_approval,
    fails_for_good,
)


def _in_doubt(db: Database, workflow: str) -> Any:
    run = a_run(db, Phase.MUTATING, workflow=workflow)
    db.advance_clock(LEASE + TIMEOUT)
    rescuer.recover_crashed_runs(db)
    return the_run(db, run.id)


def _carried(db: Database, run: Any, workflow: str) -> Any:
    with db.transaction() as tx:
        workflows.resume(tx, workflow, SOMEBODY)
    return carried_forward(db, run)
