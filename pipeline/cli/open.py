"""Command ``pipeline open``: go to a page of the console."""

import os
import sys
import webbrowser
from typing import Annotated
from urllib.parse import quote

import typer

from pipeline.admin import trace
from pipeline.cli import common
from pipeline.config import Settings
from pipeline.embedded import development
from pipeline.store.database import Database
from pipeline.store.reads import work

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
