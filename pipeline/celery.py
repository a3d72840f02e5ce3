"""The Celery app: `celery -A pipeline worker`, `beat` or `flower`.

Importing this module reads nothing and connects to nothing; the settings are loaded when Celery first asks.
"""

import runpy
from pathlib import Path
from typing import Any

from celery import Celery
from celery.app.defaults import SETTING_KEYS


def _settings() -> dict[str, Any]:
    """The values of `celeryconfig.py`, which a wheel carries inside the package and a checkout beside it.

    It is found by its place and not by its name: a project that uses us may have a `celeryconfig` too.
    """
    package = Path(__file__).parent
    places = (package / "celeryconfig.py", package.parent / "celeryconfig.py")
    file = next(place for place in places if place.is_file())
    return {name: value for name, value in runpy.run_path(str(file)).items() if name in SETTING_KEYS}


app = Celery("pipeline", include=["pipeline.tasks.phases", "pipeline.tasks.sweeps", "pipeline.tasks.signals"])
app.add_defaults(_settings)
