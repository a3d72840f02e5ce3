"""Bringing the database in line with the workflows this process knows."""

from pipeline.domain.values import Person
from pipeline.execution import workflows
from pipeline.runtime.registry import Registry, spec_of
from pipeline.store import views
from pipeline.store.database import Database

HOST = Person(name="host", reason="the workflow's code has changed")


def sync(db: Database, registry: Registry) -> None:
    """Register every known workflow. New code ends the maintenance that the old code caused."""
    for workflow in registry.workflows.values():
        with db.transaction() as tx:
            before = views.workflow(tx, workflow.name)
            spec = spec_of(workflow, tx.clock())
            workflows.register(tx, spec)
            if before is not None and before.maintenance and before.fingerprint != spec.fingerprint:
                workflows.exit_maintenance(tx, workflow.name, HOST)
