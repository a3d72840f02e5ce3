"""A task of Absurd with three steps, polled every 50 ms."""

import os
import subprocess
import sys
from pathlib import Path

from absurd_sdk import Absurd

from benchmarks.compare import work

QUEUE = "compare"
_apps: list[Absurd] = []


def _app() -> Absurd:
    if not _apps:
        _apps.append(Absurd(os.environ[work.DSN], queue_name=QUEUE))
    return _apps[0]


def setup() -> None:
    """Make the tables and the queue."""
    command = [str(Path(sys.executable).parent / "absurdctl"), "init", "--database", os.environ[work.DSN]]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    _app().create_queue()


def enqueue(orders: list[str]) -> None:
    """Spawn a task for each order."""
    for order in orders:
        _app().spawn("fulfil", {"order": order}, queue=QUEUE)


def run_worker() -> None:
    """Work until the end."""

    @_app().register_task(name="fulfil")
    def fulfil(params, ctx) -> None:
        for step in (work.prepare, work.act, work.publish):
            ctx.step(step.__name__, lambda step=step: step(params["order"]))

    _app().start_worker(batch_size=10, poll_interval=0.05)


if __name__ == "__main__":
    work.main(setup, enqueue, run_worker)
