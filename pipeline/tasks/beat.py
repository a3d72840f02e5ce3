"""Beat's clock, beside which its process gives signs of life."""

import os
import threading
from typing import Any

from celery.beat import PersistentScheduler

from pipeline.config import Settings
from pipeline.worker import liveness


class LivenessScheduler(PersistentScheduler):  # type: ignore[misc]  # celery ships no types
    """Celery's own scheduler. Its signs wait for no broker, and end when its process is frozen or gone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        file = Settings.load(os.environ).liveness_file
        if file is not None:
            threading.Thread(target=liveness.touch_forever, args=(file,), name="pipeline-liveness", daemon=True).start()
        super().__init__(*args, **options)
