"""The tasks that beat rings for, and one for each mutation in doubt."""

from uuid import UUID

from pipeline.celery import app
from pipeline.domain.ids import MutationId
from pipeline.tasks.process import host


@app.task(name="pipeline.sweep")
def sweep(name: str) -> None:
    """Run one sweep, unless somebody else has just run it."""
    host().sweeps.run(name)


@app.task(name="pipeline.reconcile")
def reconcile(mutation_id: str) -> None:
    """Ask the outside system about one mutation."""
    host().sweeps.look(MutationId(UUID(mutation_id)))


@app.task(name="pipeline.forsake")
def forsake(worker: str) -> None:
    """Recover what a process held that is known to be gone."""
    host().sweeps.forsake(worker)
