"""`celery` with a bad line: messages are dropped, doubled, delayed, overtaken, or no longer heard.

Run as `python -m tests.support.unreliable_broker MODE -A pipeline worker …`. In the mode `chaos` three of ten
messages are dropped, and of all messages three of ten each are doubled, delayed, or kept back until
the next one has passed; in the mode `twice` every message is sent twice and nothing else happens. Every
copy has a delivery tag of its own, as if it had been sent twice. In the mode `deaf` a worker stops
listening to its queues when it gets SIGUSR2, and believes that it still does.
"""

import copy
import secrets
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from celery import signals
from celery.__main__ import main
from kombu.transport import redis

SHARE = 0.3
DELAY = 0.7  #: seconds

_chance = secrets.SystemRandom()
_put: Any = redis.Channel._put


class Line:
    """What happens to messages on their way."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._lock = threading.Lock()
        self._kept: list[tuple[str, dict[str, Any]]] = []

    def put(self, channel: Any, queue: str, message: dict[str, Any], **_: Any) -> None:
        """Stands in for the channel's own put."""
        for each in self._copies(message):
            if self.mode == "chaos" and _happens():
                timer = threading.Timer(DELAY, _late, (channel, queue, each))
                timer.daemon = True
                timer.start()
            elif self.mode == "chaos" and _happens():
                with self._lock:
                    self._kept.append((queue, each))
            else:
                _put(channel, queue, each)
                self._let_go(channel)

    def _copies(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.mode == "chaos" and _happens():
            return
        yield message
        if self.mode == "twice" or _happens():
            second = copy.deepcopy(message)
            second["properties"]["delivery_tag"] = str(uuid.uuid4())
            yield second

    def _let_go(self, channel: Any) -> None:
        """What was kept back comes after the message that has just passed it."""
        with self._lock:
            kept, self._kept = self._kept, []
        for queue, message in kept:
            _put(channel, queue, message)


def _happens() -> bool:
    return _chance.random() < SHARE


def _late(channel: Any, queue: str, message: dict[str, Any]) -> None:
    try:
        _put(channel, queue, message)
    except Exception as error:  # noqa: BLE001 - the line is bad: a message that comes too late is lost
        sys.stderr.write(f"lost on the way: {error}\n")


def _can_go_deaf(sender: Any, **_: Any) -> None:
    """The queues are cancelled at the broker's end; what the worker thinks it consumes stays as it was."""

    def goes_deaf(*_: Any) -> None:
        sender.task_consumer.cancel()
        sys.stderr.write("hears nothing from now on\n")

    signal.signal(signal.SIGUSR2, goes_deaf)


if __name__ == "__main__":
    line = Line(sys.argv.pop(1))
    if line.mode == "deaf":
        signals.worker_ready.connect(_can_go_deaf)
    setattr(redis.Channel, "_put", lambda channel, *args, **options: line.put(channel, *args, **options))  # noqa: B010
    sys.exit(main())
