"""The tasks of a run: ids in, one call, no logic and no retry. The state machine owns retry.

Each is safe to deliver twice, late, or not at all: it claims what it may and leaves the rest alone.
"""

import functools
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from pipeline.background.messages import Message
from pipeline.celery import app
from pipeline.tasks import messages
from pipeline.tasks.process import host
from pipeline.worker.runner import Ran


@app.task(name="pipeline.prepare", bind=True)
def prepare(self: Any, ids: list[str], hops: int = 0) -> None:
    """Select and pin the inputs of a cohort."""
    _go_on(self, host().runner.prepare(_uuids(ids)), hops)


@app.task(name="pipeline.mutate", bind=True)
def mutate(self: Any, ids: list[str], hops: int = 0) -> None:
    """Carry out the mutations of a cohort."""
    _go_on(self, host().runner.mutate(_uuids(ids), functools.partial(_hand_on, self)), hops)


@app.task(name="pipeline.next", bind=True)
def next_(self: Any, ids: list[str], hops: int = 0) -> None:
    """Publish, consume and commit; then start what became due."""
    ran = host().runner.next(_uuids(ids))
    _go_on(self, ran, hops)
    host().scheduler.schedule(ran.workflows)


@app.task(name="pipeline.produce", bind=True)
def produce(self: Any, ids: list[str], hops: int = 0) -> None:
    """Run producers; then start what became due."""
    ran = host().runner.produce(_uuids(ids))
    _go_on(self, ran, hops)
    host().scheduler.schedule(ran.workflows)


@app.task(name="pipeline.schedule")
def schedule(workflow: str) -> None:
    """Start what is due in a workflow."""
    host().scheduler.schedule([workflow])


def _go_on(task: Any, ran: Ran, hops: int) -> None:
    """Let the chain go on with what is left of the cohort; with nothing left it ends here."""
    messages.pass_on(task.name, ran.strange, hops)
    if not ran.onward:
        task.request.chain = None


def _hand_on(task: Any, ids: Sequence[UUID]) -> None:
    about = task.request.get("kwargsrepr") or ""
    messages.send(Message(task="pipeline.next", ids=tuple(str(id_) for id_ in ids), about=about))


def _uuids(ids: Sequence[str]) -> list[UUID]:
    return [UUID(id_) for id_ in ids]
