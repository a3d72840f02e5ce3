"""Register the workflows of this process in the database."""

import logging

from pipeline.domain.values import Actor, WorkflowSpec
from pipeline.store.codecs import missing_keys
from pipeline.store.database import Database
from pipeline.transitions import registration, workflows
from pipeline.transitions.registration import Registration
from pipeline.workflows.authoring import Workflow
from pipeline.workflows.registry import Registry, operation_specs, spec_of

log = logging.getLogger(__name__)

DEPLOYMENT = Actor(name="deployment", reason="the workflow's code has changed")


def register_workflows(db: Database, registry: Registry, code_version: str = "") -> None:
    """Register every workflow of this process. New code ends the maintenance that the old code caused.

    Older code removes nothing of the newer, and logs what was restored for it. This happens when an old worker restarts
    during a deployment, and for every worker after a rollback.
    """
    left: set[str] = set()
    specs: list[WorkflowSpec] = []
    for workflow in registry.workflows.values():
        with db.transaction() as tx:
            specs.append(spec_of(workflow, tx.clock(), code_version))
            registered = registration.register(tx, specs[-1])
            if registered.is_new_code:
                workflows.exit_maintenance(tx, workflow.name, DEPLOYMENT)
        if registered.renamed:
            log.info("workflow %r: renamed %s", workflow.name, ", ".join(registered.renamed))
        if registered.present_name:
            left.add(workflow.name)
        if registered.is_older:
            _log_older_code(workflow, registered)
        _log_missing_keys(db, workflow)
    with db.transaction() as tx:
        registration.register_operations(tx, operation_specs(registry), specs)
    for name in registry.workflows.keys() - left:
        while _backfill(db, name):
            pass
        with db.transaction() as tx:
            workflows.clear_unclaimed(
                tx, name, {handler for workflow, handler in registry.handlers if workflow == name}
            )


def _log_missing_keys(db: Database, workflow: Workflow) -> None:
    if workflow.codec is None:
        return
    with db.transaction() as tx:
        missing = missing_keys(tx, workflow.name, workflow.codec)
    if missing:
        text = "data waits that was encrypted with keys which this worker lacks: %s; runs that need them stop"
        log.error(f"workflow %r: {text}", workflow.name, ", ".join(missing))


def _backfill(db: Database, workflow: str) -> bool:
    with db.transaction() as tx:
        return registration.backfill_page(tx, workflow)


def _log_older_code(workflow: Workflow, registered: Registration) -> None:
    if registered.present_name:
        log.warning(
            "workflow %r was renamed to %r by newer code: this worker leaves its work to workers that have that code",
            workflow.name,
            registered.present_name,
        )
        return
    restored = f"; restored were {', '.join(registered.restored)}" if registered.restored else ""
    if registered.version > workflow.version:
        state = f"is registered with version {registered.version} and this worker has {workflow.version}: it serves"
        log.warning("workflow %r %s what both have, and removes nothing%s", workflow.name, state, restored)
    else:
        state = f"was registered by newer code of version {workflow.version} than this worker has"
        log.warning("workflow %r %s: it removes nothing%s", workflow.name, state, restored)
