"""Start what is due: after a wake-up message, at the end of a run, and on the tick of beat.

Runs are created and committed first, their messages are sent afterwards: a message that is never
sent costs a sweep period, not an event. Everything is decided under the workflow's lock from facts
read there, so schedulers at once are one after the other and offer nothing twice. A wake-up message takes the lock at
once: two statements lock, read and start. The end of a run and the tick first read without a lock where it is worth it.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from pipeline.background.messages import DispatchMessage, SweepReport
from pipeline.domain.errors import NotFoundError
from pipeline.domain.scheduling import (
    DueReason,
    HandlerFacts,
    WorkflowFacts,
    cohort_size,
    due_reason,
    hold_reason,
    priority,
)
from pipeline.domain.states import PHASE_TASKS, Phase, PhaseTask
from pipeline.domain.workflows import HandlerKind
from pipeline.store.database import Database, Transaction, describe_error, is_lock_timeout
from pipeline.store.reads import work
from pipeline.store.rows import DispatchableRunRow, HandlerFactsRow
from pipeline.telemetry import spans
from pipeline.transitions import starts
from pipeline.transitions.starts import LockedWorkflow, StartResult
from pipeline.worker.crash_points import CrashPoint, reach

log = logging.getLogger(__name__)

Dispatch = Callable[[DispatchMessage], object]

#: Passes over one workflow before the next one gets a turn. The next call finds what is left.
_PASSES = 50
#: Behind a backlog, few places wait so long for others that become free: runs in small cohorts cost many times as much.
GATHER_TIME = timedelta(milliseconds=100)
_FEW = 8  #: fewer than this part of a workflow's places are few


class Scheduler:
    """Starts runs of workflows and dispatches them."""

    def __init__(
        self,
        db: Database,
        send: Dispatch,
        *,
        cohort_time: timedelta,
        max_cohort_size: int = 200,
        per_run: Callable[[int], timedelta] = lambda _: timedelta(0),
        gather_time: timedelta = GATHER_TIME,
    ) -> None:
        self.db, self.dispatch, self.cohort_time, self.max_cohort_size = db, send, cohort_time, max_cohort_size
        self.per_run, self.gather_time = per_run, gather_time
        self._backlogged: set[str] = set()  #: workflows in which the end of the last run started another
        self._last_starts: dict[str, tuple[float, int]] = {}  #: by workflow: when, and how many places it has

    def schedule(self, workflows: Iterable[str]) -> SweepReport:
        """Start all that is due in these workflows. What another transaction holds waits for the next call."""
        report = SweepReport()
        for workflow in workflows:
            self._try_to_start(workflow, report)
        return report

    def schedule_due(self, workflows: Collection[str], *, ended: int) -> SweepReport:
        """Start all that is due in workflows of which so many runs have ended.

        One read without a lock tells in which of them something is due. After a call that started runs of a workflow
        the read is left out: there is a backlog, and probably more is due. Then few places wait for others.
        """
        report = SweepReport()
        backlogged = self._backlogged & set(workflows)
        due = {workflow for workflow in backlogged if not self._has_to_gather(workflow, ended)}
        if unknown := set(workflows) - backlogged:
            with self.db.autocommit() as tx:
                due |= set(due_workflows(work.handler_facts(tx, *sorted(unknown))))
        for workflow in sorted(due):
            has_started = self._try_to_start(workflow, report)
            (self._backlogged.add if has_started else self._backlogged.discard)(workflow)
        return report

    def _has_to_gather(self, workflow: str, ended: int) -> bool:
        """Whether few places are free, and runs that were started a moment ago will soon free others.

        If all of those hang, the next tick starts runs in the places that are free.
        """
        at, places = self._last_starts.get(workflow, (0.0, 0))
        return ended * _FEW < places and time.monotonic() - at < self.gather_time.total_seconds()

    def _try_to_start(self, workflow: str, report: SweepReport) -> bool:
        """Start what is due in a workflow, unless it is renamed or locked. Return whether a run was started."""
        before = report.counts.get("runs", 0)
        try:
            self._start_all_due(workflow, report)
        except NotFoundError:
            report.add("renamed")  # between the read and the lock; the next call has the present name
        except DBAPIError as error:
            if not is_lock_timeout(error):
                raise
            log.warning("nothing can be started in workflow %r now: %s", workflow, describe_error(error))
            report.add("locked")
        return report.counts.get("runs", 0) > before

    def _start_all_due(self, workflow: str, report: SweepReport) -> None:
        """Start what is due until nothing is, or others should have a turn."""
        for _ in range(_PASSES):
            started, has_more = self._start_next(workflow)
            report.add("runs", started)
            if not has_more:
                return

    def _start_next(self, workflow: str) -> tuple[int, bool]:
        """Start the due handler whose turn it is. Return how many runs that made, and whether more may be due."""
        with ExitStack() as last, self.db.transaction() as tx:
            locked = starts.lock_workflow(tx, workflow)
            made, has_more = self._start_first_due(tx, locked)
            last.enter_context(spans.bind_started_runs(made.runs))
        if not made.runs:
            return 0, False
        self._last_starts[workflow] = (time.monotonic(), locked.facts.concurrency)
        reach(CrashPoint.STARTED)
        for message in dispatch_messages(made.started):
            self.dispatch(message)
        return len(made.runs), has_more

    def _start_first_due(self, tx: Transaction, locked: LockedWorkflow) -> tuple[StartResult, bool]:
        """Try the due handlers in turn until one starts. Return its runs, and whether more may be due."""
        due = _due_handlers(locked.handlers)
        for tried, (reason, row) in enumerate(due, start=1):
            made = self._start(tx, locked, reason, row)
            if made.runs:
                has_place = len(made.runs) < locked.facts.free_capacity
                return made, has_place and (made.has_more or tried < len(due))
        return StartResult(), False

    def _start(self, tx: Transaction, locked: LockedWorkflow, reason: DueReason, row: HandlerFactsRow) -> StartResult:
        if reason is DueReason.RETRY:
            most = 1 if row.is_unclaimed else self.max_cohort_size
            return starts.retry(tx, [UUID(run_id) for run_id in row.retryable[:most]], locked=locked)
        if reason is not DueReason.EVENTS:
            slot = row.next_run_at if reason is DueReason.SLOT else None
            return starts.start(tx, locked, row.name, is_unsliced=True, slot=slot)
        count = cohort_size(
            row.concurrency, per_run=self.per_run(row.id), cohort_time=self.cohort_time, max_size=self.max_cohort_size
        )
        return starts.start(tx, locked, row.name, count=1 if row.is_unclaimed else count)


def due_workflows(rows: Iterable[HandlerFactsRow]) -> list[str]:
    """The workflows of these handlers in which something is due and may start."""
    return list(dict.fromkeys(row.workflow for row in rows if _startable_reason(row)))


def _due_handlers(rows: Iterable[HandlerFactsRow]) -> list[tuple[DueReason, HandlerFactsRow]]:
    """The handlers of a workflow that are due and may start, in the order of their turns."""
    due = [(reason, row) for row in rows if (reason := _startable_reason(row))]
    return sorted(due, key=lambda pair: priority(pair[0], facts_of(pair[1])))


def _startable_reason(row: HandlerFactsRow) -> DueReason | None:
    """Why a handler is due, or None. None as well if its workflow starts nothing now."""
    reason = due_reason(facts_of(row), row.now)
    held = reason and hold_reason(WorkflowFacts.of(row), is_retry=reason is DueReason.RETRY)
    return None if held else reason


def dispatch_messages(rows: Sequence[DispatchableRunRow], *, suspects: Collection[UUID] = ()) -> list[DispatchMessage]:
    """The wake-up messages for runs, one for each task they wait for.

    A run that follows one which died with its process gets a message of its own: if it was the cause, it takes no
    other run down the next time.
    """
    cohorts: dict[tuple[PhaseTask, str], list[DispatchableRunRow]] = {}
    for row in rows:
        task = PhaseTask.PRODUCE if row.kind == HandlerKind.PRODUCER else PHASE_TASKS[Phase(row.phase)]
        alone = str(row.id) if row.id in suspects or getattr(row, "suspect", False) else ""
        cohorts.setdefault((task, alone), []).append(row)
    return [
        DispatchMessage(task=task, run_ids=tuple(str(row.id) for row in runs), description=_description(runs))
        for (task, _), runs in cohorts.items()
    ]


def _description(runs: Iterable[DispatchableRunRow]) -> str:
    """The handlers whose runs a message is about: the first, and how many more."""
    names = sorted({f"{row.workflow}.{row.handler}" for row in runs})
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def facts_of(row: HandlerFactsRow) -> HandlerFacts:
    """A row of facts as the pure decisions take it."""
    return HandlerFacts(
        kind=HandlerKind(row.kind),
        retry_at=row.retry_at,
        wake_at=row.wake_at,
        next_run_at=row.next_run_at,
        has_unseen=row.has_unseen,
        has_retry=bool(row.retryable),
        turn=row.turns.index(row.id) + 1 if row.id in row.turns else 0,
        is_single=row.concurrency == 1,
        has_probe_run=row.has_probe_run,
    )
