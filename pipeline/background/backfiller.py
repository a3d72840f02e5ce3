"""Continue backfills that no process works on: the worker that began them has ended."""

import time

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.store.reads import work
from pipeline.transitions import registration

_SECONDS = 10  #: a long backfill is continued over several passes


def continue_backfills(db: Database) -> SweepReport:
    """Deliver earlier events to consumers that have joined a topic, page by page, for a while."""
    report = SweepReport()
    ends_at = time.monotonic() + _SECONDS
    with db.autocommit() as tx:
        workflows = dict.fromkeys(row.workflow for row in work.open_backfills(tx))
    for workflow in workflows:
        is_open = True
        while is_open and time.monotonic() < ends_at:
            with db.transaction() as tx:
                is_open = registration.backfill_page(tx, workflow)
            report.add("pages", is_open)
    return report
