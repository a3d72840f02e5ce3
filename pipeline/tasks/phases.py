"""The Celery tasks of runs and sweeps. They take ids and make one call; the state machine owns logic and retry.

Each is safe to deliver twice, late, or not at all: it claims what it may claim and ignores the rest.
"""

import functools
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from pipeline.background.messages import DispatchMessage
from pipeline.background.sweeps import DUTIES
from pipeline.celery import PipelineTask, app
from pipeline.domain.states import MutationId, PhaseTask
from pipeline.tasks import messages
from pipeline.tasks.process import current_process
from pipeline.worker.runner import PhaseResult


@app.task(name=PhaseTask.PREPARE.value, bind=True, base=PipelineTask, shared=False)
def prepare(self: Any, ids: list[str], hops: int = 0) -> None:
    """Select and reserve the inputs of a cohort."""
    _continue_chain(self, current_process().runner.prepare(_uuids(ids)), hops)


@app.task(name=PhaseTask.MUTATE.value, bind=True, base=PipelineTask, shared=False)
def mutate(self: Any, ids: list[str], hops: int = 0) -> None:
    """Carry out the mutations of a cohort."""
    about = self.request.get("kwargsrepr") or ""  # read here: another thread has no request
    _continue_chain(self, current_process().runner.mutate(_uuids(ids), functools.partial(_dispatch_next, about)), hops)


@app.task(name=PhaseTask.NEXT.value, bind=True, base=PipelineTask, shared=False)
def next_(self: Any, ids: list[str], hops: int = 0) -> None:
    """Publish, consume and commit; then start what became due."""
    result = current_process().runner.next(_uuids(ids))
    _continue_chain(self, result, hops)
    current_process().scheduler.schedule_due(result.workflows, ended=len(ids))


@app.task(name=PhaseTask.PRODUCE.value, bind=True, base=PipelineTask, shared=False)
def produce(self: Any, ids: list[str], hops: int = 0) -> None:
    """Run producers; then start what became due."""
    result = current_process().runner.produce(_uuids(ids))
    _continue_chain(self, result, hops)
    current_process().scheduler.schedule_due(result.workflows, ended=len(ids))


@app.task(name="pipeline.schedule", base=PipelineTask, shared=False)
def schedule(workflow: str) -> None:
    """Start what is due in a workflow."""
    current_process().scheduler.schedule([workflow])


def _continue_chain(task: Any, result: PhaseResult, hops: int) -> None:
    """Continue the chain with the runs that are left of the cohort, or end it when none is left."""
    messages.redispatch_unknown(PhaseTask(task.name), result.unknown_handler_runs, hops)
    if not result.continuing:
        task.request.chain = None


def _dispatch_next(about: str, ids: Sequence[UUID]) -> None:
    messages.dispatch(DispatchMessage(task=PhaseTask.NEXT, run_ids=tuple(str(id_) for id_ in ids), description=about))


def _uuids(ids: Sequence[str]) -> list[UUID]:
    return [UUID(id_) for id_ in ids]


def _add_task(name: str) -> None:
    """Add the task of one sweep. It sends no task events: Flower shows work, not the clock."""

    def sweep() -> None:
        """Run this sweep, unless another worker has just run it."""
        current_process().sweeps.run(name)

    app.task(name=f"pipeline.sweep.{name}", send_events=False, base=PipelineTask, shared=False)(sweep)


for _name in DUTIES:
    _add_task(_name)


@app.task(name="pipeline.reconcile", base=PipelineTask, shared=False)
def reconcile(mutation_ids: list[str], deferred_until: str | None = None) -> None:
    """Reconcile mutations with outside systems; an attempt for one may have been deferred by another worker."""
    ids, sweeps = [MutationId(UUID(id_)) for id_ in mutation_ids], current_process().sweeps
    if len(ids) > 1:
        sweeps.reconcile_all(ids)
        return
    until = None if deferred_until is None else datetime.fromisoformat(deferred_until)
    sweeps.reconcile_one(ids[0], until)
