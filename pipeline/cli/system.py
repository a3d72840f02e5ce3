"""Commands that list workers and settings, and open the console: ``pipeline workers``, ``settings``, ``open``."""

import os
import sys
import webbrowser
from typing import Annotated
from urllib.parse import quote

import typer

from pipeline.admin import system, trace
from pipeline.admin.system import WorkerStatus
from pipeline.cli import common, tables
from pipeline.config import Settings
from pipeline.domain.errors import quantity
from pipeline.embedded import development
from pipeline.store.database import Database
from pipeline.store.reads import work


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


_DEFAULT_URL = "http://127.0.0.1:8080"
_PAGES = {"event": "e", "run": "r", "mutation": "m"}


def open_(
    context: typer.Context,
    thing: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]",
            help="An event, run, mutation, workflow, message id or idempotency key; without it, the inbox.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser, if this is a terminal with a display.")] = True,
) -> None:
    """Print the address of the console at a thing, and open it in a browser if there is one.

    The console's own address is PIPELINE_CONSOLE_URL, or that of the console that `pipeline dev` runs in this folder.
    """
    settings = Settings.load(os.environ)
    base = settings.console_url or development.console_url(settings.home) or _DEFAULT_URL
    address = base.rstrip("/") + (_path(context.obj, thing) if thing else "/")
    common.print_lines(address)
    if browser and sys.stdout.isatty() and _has_display():
        webbrowser.open(address)


def _path(database: Database, text: str) -> str:
    with database.transaction() as tx:
        if text in work.workflow_names(tx):
            return f"/w/{quote(text, safe='')}"
        found = trace.single_match(tx, text, command="open")
    return f"/{_PAGES[found.noun]}/{found.id}"


def _has_display() -> bool:
    """Return whether a browser can open a window here. BROWSER names one that needs no display."""
    names = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in names)
