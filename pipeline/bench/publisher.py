"""The service that publishes orders: a process of its own, which takes commands as lines of JSON.

It publishes and sends the wake-up message after the commit, as a database client does. Its session in Postgres has the
name of the benchmark, so that its statements do not count as the workers'.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.bench.counters import OWN
from pipeline.client import publish
from pipeline.config import Settings
from pipeline.store.database import Database, Statement, UnreadRow
from pipeline.tasks import messages

_RENAME_SESSION = Statement[UnreadRow]("SELECT set_config('application_name', CAST(:name AS text), false)")


class Publisher:
    """Publishes orders at once or at a rate."""

    def __init__(self, db: Database) -> None:
        self._db = db  #: one connection, since there is one thread
        self._commands: Mapping[str, Callable[..., Any]] = {
            "publish": self.publish,
            "pace": self.pace,
            "wake": self.wake,
        }

    def run(self, command: Mapping[str, Any]) -> Any:
        """Do what a line asks for, and return its answer."""
        return self._commands[command["do"]](**command["with"])

    def publish(self, workflow: str, orders: list[str], payloads: list[Any]) -> None:
        """Publish all orders in one transaction. Payloads are repeated in turn."""
        new = [
            {"topic": "orders", "message_id": order, "payload": payloads[n % len(payloads)]}
            for n, order in enumerate(orders)
        ]
        with self._db.transaction() as tx:
            publish(tx, workflow, new)

    def pace(self, workflow: str, orders: list[str], payloads: list[Any], rate: float) -> list[float]:
        """Publish one order after the other at a rate, whether or not earlier ones are done (an open loop).

        Return the instant before each publish, by the machine's monotonic clock.
        """
        pause, begun = threading.Event(), time.monotonic()
        sent: list[float] = []
        for n, order in enumerate(orders):
            pause.wait(max(0.0, begun + n / rate - time.monotonic()))
            sent.append(time.monotonic())
            self.publish(workflow, [order], [payloads[n % len(payloads)]])
            self.wake(workflow)
        return sent

    def wake(self, workflow: str) -> None:
        """Send the wake-up message."""
        messages.wake_workflow(workflow)


def main() -> None:
    """Answer each line with a line of JSON once it is done."""
    db = Database.connect(Settings.load(os.environ).database_url, pool_size=1)
    with db.transaction() as tx:
        tx.all(_RENAME_SESSION, name=OWN)
    publisher = Publisher(db)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(publisher.run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
