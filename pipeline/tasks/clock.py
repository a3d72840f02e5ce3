"""Beat's clock, which gives a sign of life each time round."""

import os
from typing import Any

from celery.beat import PersistentScheduler

from pipeline.config import Settings
from pipeline.runtime import signs


class Clock(PersistentScheduler):  # type: ignore[misc]  # celery ships no types
    """Celery's own scheduler; a sign says that it looks at the time, not that anybody hears it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.alive_file = Settings.load(os.environ).alive_file
        super().__init__(*args, **options)

    def tick(self, *args: Any, **options: Any) -> float:
        """Ring for what is due, and say how long nothing else is."""
        signs.give(self.alive_file)
        pause: float = super().tick(*args, **options)
        return pause
