"""The Celery tasks of the sweeps, sent by beat, and of one reconcile attempt."""

from datetime import datetime
from uuid import UUID

from pipeline.background.sweeps import DUTIES
from pipeline.celery import app
from pipeline.domain.states import MutationId
from pipeline.tasks.process import current_process


def _add_task(name: str) -> None:
    """Add the task of one sweep. It sends no task events: Flower shows work, not the clock."""

    def sweep() -> None:
        """Run this sweep, unless another worker has just run it."""
        current_process().sweeps.run(name)

    app.task(name=f"pipeline.sweep.{name}", send_events=False)(sweep)


for _name in DUTIES:
    _add_task(_name)


@app.task(name="pipeline.reconcile")
def reconcile(mutation_ids: list[str], deferred_until: str | None = None) -> None:
    """Reconcile mutations with outside systems; an attempt for one may have been deferred by another worker."""
    ids, sweeps = [MutationId(UUID(id_)) for id_ in mutation_ids], current_process().sweeps
    if len(ids) > 1:
        sweeps.reconcile_all(ids)
        return
    until = None if deferred_until is None else datetime.fromisoformat(deferred_until)
    sweeps.reconcile_one(ids[0], until)
