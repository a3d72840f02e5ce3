"""Bringing the database in line with the workflows this process knows."""

import logging

from pipeline.domain.values import Actor
from pipeline.store.database import Database
from pipeline.transitions import registration, workflows
from pipeline.transitions.registration import Registration
from pipeline.workflows.authoring import Workflow
from pipeline.workflows.registry import Registry, spec_of

log = logging.getLogger(__name__)

DEPLOYMENT = Actor(name="deployment", reason="the workflow's code has changed")


def register_workflows(db: Database, registry: Registry, code_version: str = "") -> None:
    """Register every known workflow. New code ends the maintenance that the old code caused.

    Older code takes nothing away from the newer, and says what it was given back: an old worker that is restarted
    while a release rolls out, or every worker after a rollback.
    """
    for workflow in registry.workflows.values():
        with db.transaction() as tx:
            registered = registration.register(tx, spec_of(workflow, tx.clock(), code_version))
            if registered.is_new_code:
                workflows.exit_maintenance(tx, workflow.name, DEPLOYMENT)
        if registered.is_older:
            _log_older_code(workflow, registered)
    for name in registry.workflows:
        with db.transaction() as tx:
            workflows.clear_unclaimed(
                tx, name, {handler for workflow, handler in registry.handlers if workflow == name}
            )


def _log_older_code(workflow: Workflow, registered: Registration) -> None:
    given = f"; given back were {', '.join(registered.restored)}" if registered.restored else ""
    if registered.version > workflow.version:
        said = f"is registered with version {registered.version} and this worker has {workflow.version}: it serves"
        log.warning("workflow %r %s what both have, and takes nothing away%s", workflow.name, said, given)
    else:
        said = f"was registered by newer code of version {workflow.version} than this worker has"
        log.warning("workflow %r %s: it takes nothing away%s", workflow.name, said, given)
