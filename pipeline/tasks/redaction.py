"""What may be seen of a task that carries payloads: in Celery's events, in Flower, in logs.

Whoever sends ``pipeline.publish`` describes its arguments in the message, and by Celery's defaults that is
a piece of the payloads. The worker describes them anew before it tells anybody.
"""

from collections.abc import Sized
from typing import Any

from celery.worker.request import Request


def publish_summary(workflow: object, events: object) -> str:
    """A publish in a few words: how many events, and for which workflow."""
    count = len(events) if isinstance(events, Sized) else 0
    return f"{count} event{'' if count == 1 else 's'} for {str(workflow)[:100]}"


def publish_repr(workflow: object, events: object) -> dict[str, str]:
    """How a publish is described in its own message."""
    return {"argsrepr": "()", "kwargsrepr": publish_summary(workflow, events)}


class RedactedRequest(Request):  # type: ignore[misc]  # celery ships no types
    """A received publish, of which only counts are told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = dict(zip(("workflow", "events"), self._args or (), strict=False)) | (self._kwargs or {})
        said = publish_repr(given.get("workflow"), given.get("events"))
        self._argsrepr, self._kwargsrepr = said["argsrepr"], said["kwargsrepr"]
        self._request_dict.update(said)
