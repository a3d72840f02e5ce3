"""The Celery tasks of the sweeps, sent by beat, and of one reconcile attempt."""

from datetime import datetime
from uuid import UUID

from pipeline.celery import app
from pipeline.domain.ids import MutationId
from pipeline.tasks.process import current_process


@app.task(name="pipeline.sweep")
def sweep(name: str) -> None:
    """Run one sweep, unless another worker has just run it."""
    current_process().sweeps.run(name)


@app.task(name="pipeline.reconcile")
def reconcile(mutation_id: str, deferred_until: str | None = None) -> None:
    """Reconcile one mutation with the outside system; the attempt may have been deferred by another worker."""
    until = None if deferred_until is None else datetime.fromisoformat(deferred_until)
    current_process().sweeps.reconcile_one(MutationId(UUID(mutation_id)), until)
