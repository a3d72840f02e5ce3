"""A worker's clock that a test sets forward: a deadline is over when the test says so, however slow the machine is."""

import time
from datetime import timedelta

import pytest

from pipeline.connectors import sdk
from pipeline.consumer_engine import bounded
from pipeline.testing import Inline
from pipeline.worker import sender


class Clock:
    """Takes the place of ``time`` where the deadlines and pauses of calls are measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = timedelta(0)
        for module in (sdk, bounded, sender):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        """The process's time and what the test has added to it."""
        return time.monotonic() + self.ahead.total_seconds()

    def advance(self, run: Inline, by: timedelta) -> None:
        """Let time pass for the worker and for the database alike."""
        run.advance(by)
        self.ahead += by
