"""The tasks that beat rings for, and one for each mutation in doubt."""

from uuid import UUID

from pipeline.celery import app
from pipeline.domain.ids import MutationId
from pipeline.tasks.process import current_process


@app.task(name="pipeline.sweep")
def sweep(name: str) -> None:
    """Run one sweep, unless somebody else has just run it."""
    current_process().sweeps.run(name)


@app.task(name="pipeline.reconcile")
def reconcile(mutation_id: str) -> None:
    """Ask the outside system about one mutation."""
    current_process().sweeps.reconcile_one(MutationId(UUID(mutation_id)))


@app.task(name="pipeline.forsake")
def recover_process(worker: str) -> None:
    """Recover what a process held that is known to be gone."""
    current_process().sweeps.recover_process(worker)
