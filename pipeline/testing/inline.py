"""Run a workflow inside a test: without broker and worker process, on a real Postgres.

The harness takes the place of the scheduler, the worker, the sweeps and the clock, and runs the code of production.
Messages wait in a list. A test can drop, double or reorder them, move the clock, and crash at a named point.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pipeline.background.messages import DispatchMessage
from pipeline.background.scheduler import Scheduler
from pipeline.background.sweeps import DUTIES, Sweeps
from pipeline.connectors.sdk import Connector
from pipeline.domain.payloads import json_payload
from pipeline.domain.states import MutationId, PhaseTask, chained_tasks
from pipeline.domain.values import Actor, NewEvent
from pipeline.store.database import Database, Statement
from pipeline.store.rows import EventIdRow, HandlerStateRow, NamedDeliveryRow, NamedRunRow
from pipeline.store.schema import EventRow, MutationRow
from pipeline.transitions import events, resolution
from pipeline.worker import crash_points
from pipeline.worker.crash_points import CrashPoint
from pipeline.worker.leases import Leases
from pipeline.worker.runner import Runner
from pipeline.worker.settings import WorkerPolicy
from pipeline.workflows.authoring import Topic, Workflow
from pipeline.workflows.registration import register_workflows
from pipeline.workflows.registry import Registry

_RUNS = Statement[NamedRunRow](
    "SELECT r.*, h.name AS handler FROM pipeline.runs r JOIN pipeline.handlers h ON h.id = r.handler_id ORDER BY r.id"
)
_EVENTS = Statement[EventRow]("SELECT * FROM pipeline.events WHERE workflow = :workflow AND topic = :topic ORDER BY id")
_NEWEST = Statement[EventIdRow]("SELECT id AS event_id FROM pipeline.events ORDER BY id DESC LIMIT 1")
_LEDGER = Statement[MutationRow]("SELECT * FROM pipeline.mutations ORDER BY id")
_DELIVERIES = Statement[NamedDeliveryRow]("""
SELECT e.workflow, e.message_id, e.payload, d.*, h.name AS handler
FROM pipeline.events e JOIN pipeline.deliveries d ON d.event_id = e.id JOIN pipeline.handlers h ON h.id = d.handler_id
WHERE e.workflow = :workflow AND e.topic = :topic ORDER BY e.id, h.name
""")
_STATE = Statement[HandlerStateRow](
    "SELECT id, state FROM pipeline.handlers WHERE workflow = :workflow AND name = :name"
)
TESTER = Actor(name="tester", reason="the test says so")


class WorkerCrash(BaseException):
    """The worker dies at a point that the test chose. The workflow's code cannot catch it."""


class _ManualLeases(Leases):
    """Leases without a heartbeat thread: the test decides when time passes."""

    def _start(self) -> None:
        return


class Inline:
    """Run workflows in this process: scheduler, worker, sweeps and clock in one object."""

    def __init__(
        self,
        db: Database,
        workflows: Iterable[Workflow],
        connectors: Iterable[Connector] = (),
        policy: WorkerPolicy | None = None,
        max_cohort_size: int = 200,
        code_version: str = "",
    ) -> None:
        self.db = db
        self.registry = Registry()
        for connector in connectors:
            self.registry.add_connector(connector)
        for workflow in workflows:
            self.registry.add(workflow)
        db.codecs = self.registry.codecs(None if db.codecs is None else db.codecs.default)
        self.policy = policy or WorkerPolicy()
        self.messages: deque[DispatchMessage] = deque()
        #: What the broker delivers for a message that is sent: none loses it, two double it.
        self.broker: Callable[[DispatchMessage], Iterable[DispatchMessage]] = lambda message: (message,)
        #: Index of the next message to deliver, from the number of waiting messages.
        self.pick_next: Callable[[int], int] = lambda _: 0
        self._delivering: DispatchMessage | None = None
        self.scheduler = Scheduler(
            db,
            self.send,
            cohort_time=self.policy.lease,
            max_cohort_size=max_cohort_size,
            gather_time=timedelta(0),
        )
        self.sweeps = Sweeps(
            db=db,
            registry=self.registry,
            scheduler=self.scheduler,
            jitter=lambda: 0.0,
            redispatch_after=timedelta(seconds=60),
            dispatch_reconcile=self._reconcile,
        )
        self.start_worker()
        register_workflows(db, self.registry, code_version)

    def start_worker(self) -> None:
        """Start a new worker. The memory of the earlier one is gone."""
        self.leases = _ManualLeases(self.db, lease=self.policy.lease, every=timedelta(hours=1))
        self.runner = Runner(self.db, self.registry, self.leases, self.policy, lambda: 0.0)

    def close(self) -> None:
        """End the worker's thread."""
        self.runner.phases.steps.close()

    def publish(self, topic: Topic, *payloads: Any, key: str | None = None, prefix: str = "m") -> None:
        """Publish payloads as a service does. Message ids are ``m1``, ``m2``, … per topic."""
        with self.db.transaction() as tx:
            count = len(tx.all(_EVENTS, workflow=topic.workflow, topic=topic.name))
            named = [(f"{prefix}{count + n}", payload) for n, payload in enumerate(payloads, start=1)]
            new = [
                NewEvent(
                    topic=topic.name, message_id=id_, payload=json_payload(payload, what=f"payload of {id_!r}"), key=key
                )
                for id_, payload in named
            ]
            events.publish(tx, topic.workflow, new)

    def run(self, *, max_messages: int = 10_000) -> None:
        """Start the runs that are due and deliver messages until none is left."""
        for _ in range(max_messages):
            if not self.messages:
                self.runner.stragglers.wait()
            if not self.messages:
                self.scheduler.schedule(self.registry.workflows)
            if not self.messages:
                return
            chosen = self.pick_next(len(self.messages))
            message = self.messages[chosen]
            del self.messages[chosen]
            self.deliver(message)
        raise AssertionError(f"still busy after {max_messages} messages: does the workflow publish to its own topic?")

    def send(self, message: DispatchMessage) -> None:
        """Hand a message to the broker."""
        self.messages.extend(self.broker(message))

    def deliver(self, message: DispatchMessage) -> None:
        """Deliver one message as a worker receives it. Then send the next one of its chain."""
        self._delivering = message
        _, *following = chained_tasks(message.task)
        if self._phase(message.task, message.run_ids) and following:
            self.send(DispatchMessage(task=following[0], run_ids=message.run_ids))
        self._delivering = None

    def advance(self, by: timedelta) -> None:
        """Move the clock of the database forward, for every connection of the harness."""
        self.db.advance_clock(by)

    def now(self) -> datetime:
        """Return the time of the database's clock."""
        with self.db.transaction() as tx:
            return tx.clock()

    def run_until_idle(self, *, max_rounds: int = 20) -> None:
        """Move the clock and run every sweep until two rounds in a row find no work.

        One round is not enough, because a sweep may have booked work for a little later. Runs that only the clock
        starts do not count if they end at once: a producer in its slot, a wake-up that finds nothing.
        """
        quiet = 0
        for _ in range(max_rounds):
            newest = self._newest_event()
            before = self._open_work(newest)
            self.advance(timedelta(minutes=15))
            for duty in DUTIES.values():
                if duty.moves_runs:
                    duty.run(self.sweeps)
            self.run()
            quiet = 0 if self._is_busy() or self._open_work(newest) != before else quiet + 1
            if quiet == 2:
                return
        raise AssertionError(f"not idle after {max_rounds} rounds: does some work never end?")

    @contextmanager
    def crash_at(self, point: CrashPoint, *, times: int = 1, redeliver: bool = False) -> Iterator[None]:
        """Let the worker die when it reaches a point. Afterwards a new worker takes its place.

        The message of the dead worker is lost. With ``redeliver`` it is delivered again at once. Brokers do both.
        """
        left = times

        def die(reached: CrashPoint) -> None:
            nonlocal left
            if reached is point and left:
                left -= 1
                raise WorkerCrash(point)

        with self.on_crash_points(die):
            try:
                yield
            except WorkerCrash:
                self.start_worker()
                if redeliver and self._delivering is not None:
                    self.messages.append(self._delivering)
        if left:
            raise AssertionError(f"the worker never reached {point!r}, so nothing was proved")

    @contextmanager
    def on_crash_points(self, action: Callable[[CrashPoint], None]) -> Iterator[None]:
        """Call a function whenever a worker passes a crash point."""
        before, crash_points.on_reach = crash_points.on_reach, action
        try:
            yield
        finally:
            crash_points.on_reach = before

    def approve(self, mutation: MutationRow, by: Actor = TESTER) -> None:
        """Approve exactly this request, as an operator does."""
        with self.db.transaction() as tx:
            resolution.approve(tx, MutationId(mutation.id), by, request_hash=mutation.request_hash)
        self.send(DispatchMessage(task=PhaseTask.MUTATE, run_ids=(str(mutation.run_id),)))

    def reject(self, mutation: MutationRow, by: Actor = TESTER) -> None:
        """Reject this request, as an operator does: it is skipped."""
        with self.db.transaction() as tx:
            resolution.reject(tx, MutationId(mutation.id), by)

    def runs(self) -> Sequence[NamedRunRow]:
        """Return every run, oldest first."""
        with self.db.transaction() as tx:
            return tx.all(_RUNS)

    def events(self, topic: Topic) -> Sequence[EventRow]:
        """Return every event of a topic, oldest first."""
        with self.db.transaction() as tx:
            return tx.all(_EVENTS, workflow=topic.workflow, topic=topic.name)

    def deliveries(self, topic: Topic) -> Sequence[NamedDeliveryRow]:
        """Return the deliveries of a topic's events, oldest event first."""
        with self.db.transaction() as tx:
            return tx.all(_DELIVERIES, workflow=topic.workflow, topic=topic.name)

    def ledger(self) -> Sequence[MutationRow]:
        """Return every mutation, oldest first."""
        with self.db.transaction() as tx:
            return tx.all(_LEDGER)

    def state(self, workflow: Workflow, handler: str) -> Any:
        """Return the state that a handler has saved."""
        with self.db.transaction() as tx:
            row = tx.first(_STATE, workflow=workflow.name, name=handler)
        return row and row.state

    def _phase(self, task: PhaseTask, ids: Sequence[str]) -> bool:
        """Run a task as ``pipeline.tasks.phases`` does. Returns whether runs of the cohort go on."""
        match task:
            case PhaseTask.PREPARE:
                ran = self.runner.prepare(_uuids(ids))
            case PhaseTask.MUTATE:
                ran = self.runner.mutate(_uuids(ids), self._dispatch_next)
            case PhaseTask.NEXT:
                ran = self.runner.next(_uuids(ids))
            case PhaseTask.PRODUCE:
                ran = self.runner.produce(_uuids(ids))
        if task in (PhaseTask.NEXT, PhaseTask.PRODUCE):
            self.scheduler.schedule_due(ran.workflows, ended=len(ids))
        return bool(ran.continuing)

    def _dispatch_next(self, ids: Sequence[UUID]) -> None:
        self.send(DispatchMessage(task=PhaseTask.NEXT, run_ids=tuple(str(id_) for id_ in ids)))

    def _reconcile(self, mutation_ids: Sequence[str]) -> None:
        for mutation_id in mutation_ids:
            self.sweeps.reconcile_one(MutationId(UUID(mutation_id)))

    def _newest_event(self) -> int:
        with self.db.transaction() as tx:
            row = tx.first(_NEWEST)
        return row.event_id if row else 0

    def _open_work(self, newest: int) -> set[tuple[UUID, str]]:
        """Return runs with their status. Leave out those that committed at once and took no event up to ``newest``."""
        return {
            (run.id, run.status)
            for run in self.runs()
            if run.status != "committed" or run.retry_of or any(id_ <= newest for id_ in run.event_ids)
        }

    def _is_busy(self) -> bool:
        return any(run.finished_at is None and run.status == "active" for run in self.runs())


def _uuids(ids: Sequence[str]) -> list[UUID]:
    return [UUID(id_) for id_ in ids]


def assert_consumed(run: Inline, topic: Topic, *, by: str | None = None) -> None:
    """Assert that every event of the topic was consumed, by every consumer or by one."""
    assert_deliveries(run, topic, "consumed", by=by)


def assert_deliveries(run: Inline, topic: Topic, *statuses: str, by: str | None = None) -> None:
    """Assert the statuses of a topic's events, oldest first. One status counts for all events."""
    found = [row for row in run.deliveries(topic) if by in (None, row.handler)]
    assert found, f"topic {topic.name!r} has no event for {by or 'any consumer'}"
    expected = list(statuses) if len(statuses) > 1 else [*statuses] * len(found)
    actual = [row.status for row in found]
    assert actual == expected, f"events of {topic.name!r} are {actual}, expected {expected}\n{describe_state(run)}"


def assert_runs(run: Inline, *statuses: str, handler: str | None = None) -> Sequence[NamedRunRow]:
    """Assert the statuses of the runs, oldest first, and return the runs."""
    found = [row for row in run.runs() if handler in (None, row.handler)]
    actual = [row.status for row in found]
    assert actual == list(statuses), f"runs are {actual}, expected {list(statuses)}\n{describe_state(run)}"
    return found


def describe_state(run: Inline) -> str:
    """Describe runs and mutations, one line each."""
    lines = [
        f"run {row.id} of {row.handler}: {row.phase}, {row.status}{': ' + row.error if row.error else ''}"
        for row in run.runs()
    ]
    lines += [
        f"mutation {row.connector}.{row.operation} of run {row.run_id}: {row.status}"
        f"{': ' + row.error if row.error else ''}"
        for row in run.ledger()
    ]
    return "\n".join(lines) or "nothing has run"
