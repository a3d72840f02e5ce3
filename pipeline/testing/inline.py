"""Run a workflow inside a test: no broker, no worker, one message at a time, on a real Postgres.

The harness is the scheduler, the worker, every sweep and the clock. Messages wait in a list until the
test lets them through, so a test can drop, double or reorder them, move time, and crash at any
named point; the code that runs is the code of production.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text

from pipeline.connectors.sdk import Connector
from pipeline.domain.ids import MutationId
from pipeline.domain.values import NewEvent
from pipeline.execution import events
from pipeline.runtime import points
from pipeline.runtime.authoring import Topic, Workflow
from pipeline.runtime.leases import Leases
from pipeline.runtime.points import Point
from pipeline.runtime.policy import RuntimePolicy
from pipeline.runtime.registry import Registry
from pipeline.runtime.runner import Runner
from pipeline.runtime.sync import sync
from pipeline.schedules.report import Message
from pipeline.schedules.scheduler import Scheduler
from pipeline.schedules.sweeps import Sweeps
from pipeline.store.database import Database

_CHAIN = ("pipeline.prepare", "pipeline.mutate", "pipeline.next")
_RUNS = text(
    "SELECT r.*, h.name AS handler FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id ORDER BY r.id"
)
_EVENTS = text("SELECT * FROM pipeline.events WHERE workflow = :workflow AND topic = :topic ORDER BY id")
_LEDGER = text("SELECT * FROM pipeline.mutations ORDER BY id")


class Crashed(BaseException):
    """The worker died at a point the test asked for. Nothing of the workflow can catch it."""


class Inline:
    """A whole installation in one object."""

    def __init__(
        self,
        db: Database,
        workflows: Iterable[Workflow],
        connectors: Iterable[Connector] = (),
        policy: RuntimePolicy | None = None,
        cohort: int = 50,
    ) -> None:
        self.db = db
        self.registry = Registry()
        for connector in connectors:
            self.registry.add_connector(connector)
        for workflow in workflows:
            self.registry.add(workflow)
        self.policy = policy or RuntimePolicy()
        self.messages: deque[Message] = deque()
        self.scheduler = Scheduler(db, self.messages.append, lease=self.policy.lease, most=cohort)
        self.sweeps = Sweeps(
            db=db,
            registry=self.registry,
            scheduler=self.scheduler,
            chance=lambda: 0.0,
            silence=timedelta(seconds=60),
            reconcile_one=self._look,
        )
        self.start_worker()
        sync(db, self.registry)

    def start_worker(self) -> None:
        """A new worker: what an earlier one held in memory is gone."""
        self.leases = Leases(self.db, lease=self.policy.lease, every=timedelta(hours=1))
        self.runner = Runner(self.db, self.registry, self.leases, self.policy, lambda: 0.0)

    def publish(self, topic: Topic, *payloads: Any, key: str | None = None, prefix: str = "m") -> None:
        """Publish payloads as a service would; message ids are ``m1``, ``m2``, … per topic."""
        with self.db.transaction() as tx:
            count = len(tx.all(_EVENTS, workflow=topic.workflow, topic=topic.name))
            new = [
                NewEvent(topic=topic.name, message_id=f"{prefix}{count + n}", payload=_json(payload), key=key)
                for n, payload in enumerate(payloads, start=1)
            ]
            events.publish(tx, topic.workflow, new)

    def run(self, *, most: int = 10_000) -> None:
        """Start what is due and deliver messages until nothing is left to do."""
        for _ in range(most):
            if not self.messages:
                self.scheduler.schedule(self.registry.workflows)
            if not self.messages:
                return
            self.deliver(self.messages.popleft())
        raise AssertionError(f"still busy after {most} messages: a workflow that feeds itself?")

    def deliver(self, message: Message) -> None:
        """Deliver one message as a worker receives it, the rest of its chain after it."""
        if message.task == "pipeline.produce":
            self.scheduler.schedule(self.runner.produce(_uuids(message.ids)).workflows)
            return
        for task in _CHAIN[_CHAIN.index(message.task) :]:
            if not self._phase(task, message.ids):
                return

    def advance(self, by: timedelta) -> None:
        """Move the clock of this database forward, for every connection of the harness."""
        self.db.advance(by)

    def settle(self, *, rounds: int = 20) -> None:
        """Let time pass and every sweep run until the workflow rests."""
        for _ in range(rounds):
            self.advance(timedelta(minutes=15))
            for name in ("rescue", "reconcile", "maintenance", "sessions", "tick"):
                getattr(self.sweeps, name)()
            if not self.messages and not self._busy():
                return
            self.run()

    @contextmanager
    def crash_at(self, point: Point, *, times: int = 1) -> Iterator[None]:
        """Let the worker die when it reaches a point; afterwards a new one takes its place."""
        left = times

        def die(reached: Point) -> None:
            nonlocal left
            if reached is point and left:
                left -= 1
                raise Crashed(point)

        with self.at_points(die):
            try:
                yield
            except Crashed:
                self.start_worker()
        if left:
            raise AssertionError(f"the worker never reached {point!r}, so nothing was proved")

    @contextmanager
    def at_points(self, act: Callable[[Point], None]) -> Iterator[None]:
        """Do something whenever a worker passes a named point."""
        before, points.on_reach = points.on_reach, act
        try:
            yield
        finally:
            points.on_reach = before

    def runs(self) -> Sequence[Row[Any]]:
        """Every run, oldest first."""
        with self.db.transaction() as tx:
            return tx.all(_RUNS)

    def events(self, topic: Topic) -> Sequence[Row[Any]]:
        """Every event of a topic, oldest first."""
        with self.db.transaction() as tx:
            return tx.all(_EVENTS, workflow=topic.workflow, topic=topic.name)

    def ledger(self) -> Sequence[Row[Any]]:
        """Every mutation, oldest first."""
        with self.db.transaction() as tx:
            return tx.all(_LEDGER)

    def _phase(self, task: str, ids: Sequence[str]) -> bool:
        if task == "pipeline.prepare":
            return bool(self.runner.prepare(_uuids(ids)).onward)
        if task == "pipeline.mutate":
            return bool(self.runner.mutate(_uuids(ids), self._hand_on).onward)
        self.scheduler.schedule(self.runner.next(_uuids(ids)).workflows)
        return False

    def _hand_on(self, ids: Sequence[UUID]) -> None:
        self.messages.append(Message(task="pipeline.next", ids=tuple(str(id_) for id_ in ids)))

    def _look(self, mutation_id: str) -> None:
        self.sweeps.look(MutationId(UUID(mutation_id)))

    def _busy(self) -> bool:
        return any(run.finished_at is None and run.status == "active" for run in self.runs())


def _uuids(ids: Sequence[str]) -> list[UUID]:
    return [UUID(id_) for id_ in ids]


def _json(payload: Any) -> Any:
    return payload.model_dump(mode="json") if hasattr(payload, "model_dump") else payload
