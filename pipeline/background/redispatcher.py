"""Send the wake-up message of a run again when no worker has taken it."""

from datetime import timedelta

from pipeline.background.messages import SweepReport
from pipeline.background.rescuer import recover_unclaimed_runs
from pipeline.background.scheduler import Scheduler, dispatch_messages, due_workflows
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.transitions import runs

_UNCLAIMED_AFTER = timedelta(minutes=1)  #: how long workers may hand a run back before it is withdrawn


def tick(db: Database, scheduler: Scheduler, *, redispatch_after: timedelta) -> SweepReport:
    """Withdraw runs that no worker claims, start what is due, and redispatch runs whose message was lost."""
    withdrawn = recover_unclaimed_runs(db, older_than=max(redispatch_after, _UNCLAIMED_AFTER))
    with db.autocommit() as tx:
        due = due_workflows(work.due_facts(tx))  # known here or not: starting a run needs none of its code
    report = scheduler.schedule(due)
    report.add("redispatched", redispatch(db, scheduler, redispatch_after=redispatch_after))
    report.add("withdrawn", withdrawn)
    return report


def redispatch(db: Database, scheduler: Scheduler, *, redispatch_after: timedelta) -> int:
    """Send the messages of active runs again that no worker has held for this long."""
    with db.autocommit() as tx:
        stale = work.stale_dispatches(tx, redispatch_after=redispatch_after)
    if not stale:
        return 0
    ids = [row.id for row in stale]
    with db.transaction() as tx:
        runs.mark_dispatched(tx, ids)
        suspects = work.suspect_runs(tx, ids)
    for message in dispatch_messages(stale, suspects=suspects):
        scheduler.dispatch(message)
    return len(stale)
