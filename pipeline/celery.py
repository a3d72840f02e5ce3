"""The Celery app: `celery -A pipeline worker`, `beat` or `flower`.

Importing this module reads nothing and connects to nothing; the settings are loaded when Celery first asks.
"""

import runpy
from pathlib import Path
from typing import Any

import click
from celery import Celery
from celery.app.defaults import SETTING_KEYS

from pipeline.config import EXIT_UNSAFE, SettingsError


def _settings() -> dict[str, Any]:
    """The values of `celeryconfig.py`, which a wheel carries inside the package and a checkout beside it.

    It is found by its place and not by its name: a project that uses us may have a `celeryconfig` too.
    """
    package = Path(__file__).parent
    places = (package / "celeryconfig.py", package.parent / "celeryconfig.py")
    file = next(place for place in places if place.is_file())
    try:
        values = runpy.run_path(str(file))
    except SettingsError as error:
        if click.get_current_context(silent=True) is None:
            raise
        raise _SettingsExit(str(error)) from error
    return {name: value for name, value in values.items() if name in SETTING_KEYS}


class _SettingsExit(click.ClickException):
    """Ends a `celery` command with the problem alone: a traceback would bury it."""

    exit_code = EXIT_UNSAFE


app = Celery("pipeline", include=[f"pipeline.tasks.{name}" for name in ("phases", "publish", "signals", "sweeps")])
app.add_defaults(_settings)
