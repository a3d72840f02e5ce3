"""Check the invariants of the tables, and the settings of Postgres that make commits durable."""

import logging
from collections.abc import Collection, Sequence

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.reads.invariants import INVARIANTS, Invariant, durability_findings
from pipeline.transitions import housekeeping

log = logging.getLogger(__name__)


def check(
    db: Database, checked: Sequence[Invariant] = INVARIANTS, *, allowed_unsafe_settings: Collection[str] = ()
) -> SweepReport:
    """Check invariants and Postgres's settings, and log each finding as an error. Repairs nothing."""
    report = SweepReport()
    with db.transaction() as tx:
        found = invariants.findings(tx, checked) + durability_findings(tx, allowed=allowed_unsafe_settings)
    for finding in found:
        log.error("doctor.%s: %s: %s", finding.severity, finding.subject, finding.detail)
        report.add(f"{finding.severity}: {finding.invariant}")
    report.add("findings", len(found))
    return report


def chain(db: Database, *, page: int = 1000) -> SweepReport:
    """Chain the acts of the audit that are committed, and log the head of the chain: a copy of it outside."""
    report = SweepReport()
    while True:
        with db.autocommit() as tx:
            head = housekeeping.chain_audit(tx, limit=page)
        if head is None:
            return report
        report.add("chained", head.acts)
        if head.acts:
            log.info("audit.chained: %s acts, the head is %s:%s", head.acts, head.position, head.hash)
        if head.acts < page:
            return report
