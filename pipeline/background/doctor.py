"""Check the invariants of the tables."""

import logging
from collections.abc import Sequence

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import INVARIANTS, Invariant

log = logging.getLogger(__name__)


def check(db: Database, checked: Sequence[Invariant] = INVARIANTS) -> SweepReport:
    """Check invariants and log each finding as an error. Repairs nothing."""
    report = SweepReport()
    with db.transaction() as tx:
        found = invariants.findings(tx, checked)
    for finding in found:
        log.error("doctor.%s: %s: %s", finding.severity, finding.subject, finding.detail)
        report.add(f"{finding.severity}: {finding.invariant}")
    report.add("findings", len(found))
    return report
