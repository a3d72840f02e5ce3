"""What a handler that is gone from the code has left behind: a person goes on without it.

Its runs hold no place and nobody waits for them, but their inputs stay reserved until the handler comes back
under its old name or a person ends them.
"""

from pipeline.domain.errors import IllegalTransitionError
from pipeline.domain.ids import EventId
from pipeline.domain.payloads import storable_text
from pipeline.domain.states import MutationStatus, RunStatus
from pipeline.domain.values import Actor
from pipeline.store.database import Transaction
from pipeline.store.rows import RunRow, RunWithMutationRow
from pipeline.store.writes import events as event_store
from pipeline.store.writes import mutations as mutation_store
from pipeline.store.writes import runs as run_store
from pipeline.store.writes import workflows as workflow_store
from pipeline.transitions import audit, events

_NOT_IN_DOUBT = ("pending", "applied", "failed")


def skip(tx: Transaction, workflow: str, handler: str, event_id: EventId, by: Actor) -> None:
    """Go on without an event, and without the run of a retired handler that holds it.

    All inputs of that run go with it: they are consumed if its mutation happened, else skipped; what it had asked
    for and was not sent is void. Refused while nobody knows whether its mutation happened, while its request waits
    for an answer, and while a worker has it.
    """
    key = {"workflow": workflow, "handler": handler, "event_id": event_id}
    found = tx.first(run_store.RUN_OF_RETIRED_HANDLER, **key)
    if found is None:
        events.skip(tx, workflow, handler, event_id, by)
        return
    tx.all(workflow_store.LOCK_WORKFLOWS_OF_RUNS, ids=[str(found.id)])
    run = tx.first(run_store.LOCK_RUN_OF_RETIRED_HANDLER, id=found.id)
    if run is None:
        return  # ended meanwhile, and all its inputs with it
    _refuse_unresolved(run, event_id)
    for row in run_store.execute_ids(tx, mutation_store.VOID, [run.id]):
        tx.log_on_commit("mutation.failed", run_id=run.id, mutation_id=row.id, workflow=workflow, resolved_by="void")
    words = storable_text(by.reason or f"its handler is gone from the code; skipped by {by.name}")
    ended = tx.first(run_store.END_RUN_OF_RETIRED_HANDLER, id=run.id, error=words)
    assert ended is not None
    _end_inputs(tx, ended, happened=run.mutation_status == MutationStatus.APPLIED)
    audit.record(tx, by, "event.skip", workflow=workflow, run_id=run.id, event_id=event_id)
    tx.log_on_commit(
        "run.stopped", run_id=run.id, workflow=workflow, handler=handler, phase=ended.phase, status=ended.status
    )
    tx.log_on_commit("event.skipped", workflow=workflow, handler=handler, event_id=event_id, actor=by.name)


def _end_inputs(tx: Transaction, run: RunRow, *, happened: bool) -> None:
    if happened:
        run_store.execute_ids(tx, event_store.CONSUME_INPUTS, [run.id])
        return
    kept = {"run": run.id, "handler_id": run.handler_id, "events": run.event_ids, "quarantine": False}
    for row in event_store.release_inputs(tx, [kept]):
        tx.first(event_store.SKIP_ONE, event_id=row.event_id, handler_id=run.handler_id)


def _refuse_unresolved(run: RunWithMutationRow, event_id: EventId) -> None:
    asks = run.status == RunStatus.PAUSED_APPROVAL and run.finished_at is None
    unknown = run.mutation_status is not None and run.mutation_status not in _NOT_IN_DOUBT
    if run.lease_expires_at is None and not asks and not unknown:
        return
    doubt = f"mutation {run.mutation_id} is {run.mutation_status or MutationStatus.PENDING}"
    found = f"held by run {run.id}, which " + ("a worker has" if run.lease_expires_at else f"waits: {doubt}")
    allowed = ["answered first: reject its request, or resolve its mutation"]
    raise IllegalTransitionError("event", event_id, verb="skip", found=found, allowed=allowed)
