"""Check the invariants of the tables."""

import logging

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.store.reads import invariants

log = logging.getLogger(__name__)


def check(db: Database) -> SweepReport:
    """Check every invariant and log each finding as an error. Repairs nothing."""
    report = SweepReport()
    with db.transaction() as tx:
        found = invariants.findings(tx)
    for finding in found:
        log.error("doctor.%s: %s: %s", finding.severity, finding.subject, finding.detail)
        report.add(f"{finding.severity}: {finding.invariant}")
    report.add("findings", len(found))
    return report
