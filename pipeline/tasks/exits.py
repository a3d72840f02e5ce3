"""Let a worker end with a documented exit code, whatever ended it.

Celery ends a worker with 1 after Ctrl-C, after an error that it cannot survive, such as a Redis that became read-only
or full, and after an error of the stop itself. It ends with 0 when it has too many open files. A supervisor cannot tell
these apart.
"""

import logging
import sys
import traceback
from typing import Any

import click
from celery.apps.worker import Worker
from celery.exceptions import SecurityError
from celery.worker import state

from pipeline.config import EXIT_RESTART, EXIT_UNSAFE

log = logging.getLogger(__name__)

EXIT_OK = 0


class SupervisedWorker(Worker):  # type: ignore[misc]  # celery ships no types
    """Celery's worker, whose exit code tells a supervisor what to do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            super().__init__(*args, **options)
        except (click.ClickException, SecurityError):
            raise
        except Exception:  # noqa: BLE001 - with a traceback Python would end with 1
            traceback.print_exc()
            sys.stderr.write("this worker cannot be set up; the lines above say why. Start it again\n")
            sys.exit(EXIT_RESTART)

    def start(self) -> None:
        """Run until it is asked to stop, or cannot go on."""
        try:
            super().start()
        except Exception:
            self.exitcode = None
            log.critical("the worker failed to stop in order; the leases of its runs will lapse", exc_info=True)
        self.exitcode = exit_code(self.exitcode, state.should_stop, state.should_terminate)
        if self.exitcode == EXIT_RESTART:
            log.critical(
                "this worker ends with exit code %d; nothing is lost, let its supervisor start it again", EXIT_RESTART
            )


def exit_code(found: int | None, should_stop: int | None, should_terminate: int | None) -> int:
    """Return the exit code of a worker that ended with ``found`` and was asked to stop with the others, or was not."""
    if found in (EXIT_OK, EXIT_RESTART, EXIT_UNSAFE):
        return found
    asked = [code for code in (should_stop, should_terminate) if code is not None]
    return EXIT_OK if asked and EXIT_RESTART not in asked else EXIT_RESTART
