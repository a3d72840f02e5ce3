"""Drop or archive what no workflow keeps any longer, page by page."""

import time

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.transitions import housekeeping, workflows

_SECONDS_PER_TABLE = 10  #: a long past is pruned over several passes


def prune(db: Database) -> SweepReport:
    """Raise the watermarks behind consumed events, then prune each table for a while."""
    with db.transaction() as tx:
        workflows.raise_watermarks(tx)
        old_samples = housekeeping.delete_old_samples(tx)
    report = SweepReport()
    report.add("samples", old_samples)
    for name in housekeeping.PRUNED_TABLES:
        ends_at, page = time.monotonic() + _SECONDS_PER_TABLE, None
        while page is None or not (page.is_last or time.monotonic() > ends_at):
            with db.transaction() as tx:
                page = housekeeping.prune_page(tx, name)
            report.add(name, page.dropped)
    return report
