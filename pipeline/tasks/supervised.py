"""Celery's worker as its supervisor needs it: documented exit codes.

Celery ends a worker with 1 after Ctrl-C, after a third signal while it stops, after an error that it cannot survive,
such as a Redis that became read-only or full, and after an error of the stop itself. It ends with 0 when it has too
many open files. A supervisor cannot tell these apart.
"""

import logging
import os
import sys
import traceback
from typing import Any

import click
from celery import platforms
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
        except click.ClickException:
            raise
        except SecurityError as error:  # Celery would end with 1
            sys.stderr.write(f"{error}\n")
            sys.exit(EXIT_UNSAFE)
        except Exception:  # noqa: BLE001 - with a traceback Python would end with 1
            traceback.print_exc()
            sys.stderr.write("this worker cannot be set up; the lines above say why. Start it again\n")
            sys.exit(EXIT_RESTART)

    def start(self) -> None:
        """Run until it is asked to stop, or cannot go on."""
        try:
            super().start()
        except (Exception, SystemExit):  # the latter by a signal that came while it was stopping
            self._end_by_next_signal()
            self.exitcode = None
            log.critical("the worker failed to stop in order; the leases of its runs will lapse", exc_info=True)
        else:
            self._end_by_next_signal()
        self.exitcode = exit_code(self.exitcode, state.should_stop, state.should_terminate)
        if self.exitcode == EXIT_RESTART:
            log.critical(
                "this worker ends with exit code %d; nothing is lost, let its supervisor start it again", EXIT_RESTART
            )

    def _end_by_next_signal(self) -> None:
        """Let a signal from now on end the process at once. Celery's handlers would raise, and end it with 1."""
        for name in ("SIGINT", "SIGQUIT"):
            platforms.signals[name] = lambda *_: os._exit(
                exit_code(self.exitcode, state.should_stop, state.should_terminate)
            )


def exit_code(found: int | None, should_stop: int | None, should_terminate: int | None) -> int:
    """Return the exit code of a worker that ended with ``found`` and was asked to stop with the others, or was not."""
    if found in (EXIT_OK, EXIT_RESTART, EXIT_UNSAFE):
        return found
    asked = [code for code in (should_stop, should_terminate) if code is not None]
    return EXIT_OK if asked and EXIT_RESTART not in asked else EXIT_RESTART
