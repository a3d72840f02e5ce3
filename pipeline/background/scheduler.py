"""Start what is due: after a wake-up message, at the end of a run, and on the tick of beat.

Runs are created and committed first, their messages are sent afterwards: a message that is never
sent costs a sweep period, not an event. Everything is decided under the workflow's lock from facts
read there, so schedulers at once are one after the other and offer nothing twice. A first read without the lock only
tells whether the lock is worth taking.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from pipeline.background.messages import DispatchMessage, SweepReport
from pipeline.domain.errors import NotFoundError
from pipeline.domain.scheduling import DueReason, HandlerFacts, cohort_size, due_reason, priority
from pipeline.domain.states import PHASE_TASKS, Phase, PhaseTask
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database, Transaction, describe_error, is_lock_timeout
from pipeline.store.reads import work
from pipeline.store.rows import HandlerFactsRow, HandlerNameRow
from pipeline.store.schema import RunRow
from pipeline.telemetry.tracing import spans
from pipeline.transitions import starts
from pipeline.transitions.starts import StartResult
from pipeline.worker.crash_points import CrashPoint, reach

log = logging.getLogger(__name__)

Dispatch = Callable[[DispatchMessage], object]

#: Passes over one workflow before the next one gets a turn. The next call finds what is left.
_PASSES = 50


class Scheduler:
    """Starts runs of workflows and dispatches them."""

    def __init__(
        self,
        db: Database,
        send: Dispatch,
        *,
        lease: timedelta,
        max_cohort_size: int = 50,
        per_run: Callable[[int], timedelta] = lambda _: timedelta(0),
    ) -> None:
        self.db, self.dispatch, self.lease, self.max_cohort_size, self.per_run = (
            db,
            send,
            lease,
            max_cohort_size,
            per_run,
        )

    def schedule(self, workflows: Iterable[str]) -> SweepReport:
        """Start all that is due in these workflows. What another transaction holds waits for the next call."""
        report = SweepReport()
        for workflow in workflows:
            try:
                self._start_all_due(workflow, report)
            except NotFoundError:
                report.add("renamed")  # between the read and the lock; the next call has the present name
            except DBAPIError as error:
                if not is_lock_timeout(error):
                    raise
                log.warning("nothing can be started in workflow %r now: %s", workflow, describe_error(error))
                report.add("locked")
        return report

    def _start_all_due(self, workflow: str, report: SweepReport) -> None:
        """Start what is due until nothing is, or others should have a turn."""
        for _ in range(_PASSES):
            started = self._start_next(workflow)
            report.add("runs", started)
            if not started:
                return

    def _start_next(self, workflow: str) -> int:
        """Start the due handler of a workflow whose turn it is. Returns how many runs that made."""
        with ExitStack() as last, self.db.transaction() as tx:
            made = next((made for made in self._starts(tx, workflow) if made.runs), None)
            last.enter_context(spans.bind_started_runs(made.runs if made is not None else ()))
        if made is None:
            return 0
        reach(CrashPoint.STARTED)
        self._dispatch_started(made.runs)
        return len(made.runs)

    def _starts(self, tx: Transaction, workflow: str) -> Iterable[StartResult]:
        """Try the due handlers in turn; nothing else can start once the workflow is held back."""
        if not _due_handlers(tx, workflow):
            return
        starts.lock_workflow(tx, workflow)
        for reason, row in _due_handlers(tx, workflow):
            made = self._start(tx, workflow, reason, row)
            yield made
            if made.hold_reason:
                return

    def _start(self, tx: Transaction, workflow: str, reason: DueReason, row: HandlerFactsRow) -> StartResult:
        if reason is DueReason.RETRY:
            most = 1 if row.is_unclaimed else self.max_cohort_size
            return starts.retry(tx, work.retryable_runs(tx, workflow, handler_id=row.id, limit=most))
        if reason is not DueReason.EVENTS:
            slot = row.next_run_at if reason is DueReason.SLOT else None
            return starts.start(tx, workflow, row.name, is_unsliced=True, slot=slot)
        backlog = work.backlog(tx, row.id, limit=self.max_cohort_size * row.batch)
        slices = -(-backlog // row.batch)
        # half the places at most: two processes share the work evenly, and none waits for one large cohort
        share = max(1, -(-row.concurrency // 2))
        count = cohort_size(
            slices, share, per_run=self.per_run(row.id), lease=self.lease, max_size=self.max_cohort_size
        )
        return starts.start(tx, workflow, row.name, count=1 if row.is_unclaimed else max(1, count))

    def _dispatch_started(self, started: Sequence[RunRow]) -> None:
        for message in dispatch_messages(started, self.db):
            self.dispatch(message)


def _due_handlers(tx: Transaction, workflow: str) -> list[tuple[DueReason, HandlerFactsRow]]:
    """The handlers of a workflow that are due, in the order of their turns."""
    rows = work.handler_facts(tx, workflow)
    due = [(reason, row) for row in rows if (reason := due_reason(facts_of(row), row.now))]
    return sorted(due, key=lambda pair: priority(pair[0], facts_of(pair[1])))


def dispatch_messages(
    rows: Sequence[RunRow], db: Database, *, suspects: Collection[UUID] = ()
) -> list[DispatchMessage]:
    """The wake-up messages for runs, one for each task they wait for.

    A run that follows one which died with its process gets a message of its own: if it was the cause, it takes no
    other run down the next time.
    """
    with db.transaction() as tx:
        handlers = work.handlers_by_id(tx, {row.handler_id for row in rows})
    cohorts: dict[tuple[PhaseTask, str], list[RunRow]] = {}
    for row in rows:
        is_producer = handlers[row.handler_id].kind == HandlerKind.PRODUCER
        task = PhaseTask.PRODUCE if is_producer else PHASE_TASKS[Phase(row.phase)]
        alone = str(row.id) if row.id in suspects or getattr(row, "suspect", False) else ""
        cohorts.setdefault((task, alone), []).append(row)
    return [
        DispatchMessage(
            task=task,
            run_ids=tuple(str(row.id) for row in runs),
            description=_description(handlers[row.handler_id] for row in runs),
        )
        for (task, _), runs in cohorts.items()
    ]


def _description(handlers: Iterable[HandlerNameRow]) -> str:
    """The handlers whose runs a message is about: the first, and how many more."""
    names = sorted({f"{row.workflow}.{row.name}" for row in handlers})
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def facts_of(row: HandlerFactsRow) -> HandlerFacts:
    """A row of facts as the pure decisions take it."""
    return HandlerFacts(
        kind=HandlerKind(row.kind),
        retry_at=row.retry_at,
        wake_at=row.wake_at,
        next_run_at=row.next_run_at,
        has_unseen=row.has_unseen,
        has_retry=row.has_retry,
        turn=row.turn,
        is_single=row.concurrency == 1,
        has_probe_run=row.has_probe_run,
    )
