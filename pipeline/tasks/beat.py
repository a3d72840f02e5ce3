"""Celery's beat scheduler with a liveness file."""

import os
import threading
from typing import Any

from celery.beat import PersistentScheduler

from pipeline.config import Settings
from pipeline.worker import liveness


class LivenessScheduler(PersistentScheduler):  # type: ignore[misc]  # celery ships no types
    """Celery's own scheduler, and a thread that touches the liveness file.

    The thread waits for no broker. It stops when the process is frozen or gone.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        file = Settings.load(os.environ).liveness_file
        if file is not None:
            threading.Thread(target=liveness.touch_forever, args=(file,), name="pipeline-liveness", daemon=True).start()
        super().__init__(*args, **options)
