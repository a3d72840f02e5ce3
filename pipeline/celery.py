"""The Celery app: `celery -A pipeline worker`, `beat` or `flower`.

Importing this module reads nothing and connects to nothing; Celery loads the settings when it first needs one.
"""

import runpy
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from celery import Celery
from celery.app.defaults import SETTING_KEYS

from pipeline.config import EXIT_UNSAFE, SettingsError


def _settings() -> dict[str, Any]:
    """Return the values of `celeryconfig.py`: inside the package in a wheel, beside it in a checkout.

    It is loaded by its path, not by its name: a project that uses Pipeline may have its own `celeryconfig`.
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
    """Ends a `celery` command with the problems and without a traceback."""

    exit_code = EXIT_UNSAFE


class _App(Celery):  # type: ignore[misc]  # celery ships no types
    """The app whose workers end with documented exit codes."""

    @cached_property
    def Worker(self) -> Any:  # noqa: N802 - the name is Celery's
        return self.subclass_with_self("pipeline.tasks.supervised:SupervisedWorker", name="Worker", reverse="Worker")


app = _App("pipeline", include=[f"pipeline.tasks.{name}" for name in ("phases", "publish", "signals")])
app.add_defaults(_settings)
