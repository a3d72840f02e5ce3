"""Commands ``pipeline workers`` and ``pipeline settings``: list what the installation consists of."""

import os

import typer

from pipeline.admin import system
from pipeline.admin.system import WorkerStatus
from pipeline.cli import common, tables
from pipeline.config import Settings
from pipeline.domain.errors import quantity
from pipeline.store.database import Database


def workers(context: typer.Context, as_json: common.AsJson = False) -> None:
    """List the workers that run, and those that were killed within the last day."""
    database: Database = context.obj
    found = system.list_workers(database)
    if as_json:
        common.print_json(found)
        return
    with database.transaction() as tx:
        now = tx.clock()
    tables.print_table(
        quantity(len(found), "worker") if found else "No worker has run within the last day.",
        ("name", "status", "pool", "queues", "up", "seen"),
        [
            (
                each.name,
                "gone" if each.is_gone else "runs",
                f"{each.pool} {each.concurrency}",
                ", ".join(each.queues),
                common.age(each.started_at, now),
                f"{common.age(each.seen_at, now)} ago",
            )
            for each in found
        ],
        [_code_text(each) for each in found],
        note="workflows",
    )


def settings(as_json: common.AsJson = False) -> None:
    """List every setting with its value, its default and its meaning. Passwords and secrets are masked.

    These are the settings of this shell. A process that was started elsewhere may have others.
    """
    found = system.list_settings(Settings.load(os.environ))
    if as_json:
        common.print_json(found)
        return
    tables.print_table(
        quantity(len(found), "setting"),
        ("variable", "value", "default"),
        [(each.variable, each.value, each.default) for each in found],
        [each.description for each in found],
        note="meaning",
    )


def _code_text(worker: WorkerStatus) -> str:
    """Describe the code of a worker: versions of workflows, of the author's code and of Pipeline."""
    code = f"; code {worker.code_version}" if worker.code_version else ""
    known = ", ".join(f"{name} {number}" for name, number in sorted(worker.workflows.items())) or "none"
    return f"{known}{code}; pipeline {worker.package_version}"
