"""Bringing the database in line with the workflows this process knows."""

import logging

from pipeline.domain.values import Person
from pipeline.execution import workflows
from pipeline.runtime.registry import Registry, spec_of
from pipeline.store import views
from pipeline.store.database import Database

log = logging.getLogger(__name__)

HOST = Person(name="host", reason="the workflow's code has changed")


def sync(db: Database, registry: Registry) -> None:
    """Register every known workflow. New code ends the maintenance that the old code caused.

    Code of an older version changes nothing: it serves what it has in common with the newer, as while a release
    rolls out and an old worker is restarted.
    """
    for workflow in registry.workflows.values():
        with db.transaction() as tx:
            before = views.workflow(tx, workflow.name)
            if before is not None and before.version > workflow.version:
                log.warning(
                    "workflow %r is registered with version %d and this worker has %d: it serves what both have, and "
                    "registers nothing",
                    workflow.name,
                    before.version,
                    workflow.version,
                )
                continue
            spec = spec_of(workflow, tx.clock())
            workflows.register(tx, spec)
            if before is not None and before.maintenance and before.fingerprint != spec.fingerprint:
                workflows.exit_maintenance(tx, workflow.name, HOST)
