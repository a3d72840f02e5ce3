"""Where Python enters from outside: the command, Celery's hook and the pytest plugin.

A module of a user may be called `pipeline` as well, and be found before ours. This package has another name, so it is
found in any case and can say so. It imports ours only after it has looked.
"""

import gc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "pipeline", "__init__.py")
_EXIT_UNSAFE = 78  #: as in `pipeline.config`, which may be out of reach


def describe_other(path: Sequence[str]) -> str:
    """Describe what these folders have as `pipeline` before ours; empty if it is ours.

    A folder without `__init__.py` is not found before ours: Python prefers a package with that file, wherever it is.
    """
    loaded = sys.modules.get("pipeline")
    spec = loaded.__spec__ if loaded else PathFinder.find_spec("pipeline", path)
    if spec is None or spec.origin is None or os.path.realpath(spec.origin) == _OURS:
        return ""
    return (
        f"{spec.origin} is imported as `pipeline` here, instead of the package of celery-durable-effects: rename it, "
        "or work in another folder."
    )


def current_path() -> list[str]:
    """Return the import path of a program that looks into the current folder first, as `celery` does."""
    try:
        return [os.getcwd(), *sys.path]
    except FileNotFoundError:  # the folder was removed
        return sys.path


def main() -> None:
    """Run the command ``pipeline``, unless the package that it needs is hidden by another.

    Another `pipeline` in the current folder does not hide ours from the command, but from the Celery processes that
    ``pipeline dev`` starts there. Other commands say it and go on.
    """
    hidden = describe_other(sys.path)
    if (found := hidden or describe_other(current_path())) and "_PIPELINE_COMPLETE" not in os.environ:
        print(found, file=sys.stderr)  # noqa: T201 - nothing else can be imported yet
    if hidden or (found and "dev" in sys.argv[1:2]):
        sys.exit(_EXIT_UNSAFE)
    gc.disable()  # until the command runs: what it imports is no garbage, and searching it takes a tenth of the time
    from pipeline.cli.main import main as run

    run()
