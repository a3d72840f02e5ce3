"""Check the rules of the tables and the durability of commits, for an operator."""

from collections.abc import Collection

from pipeline.store.database import Database
from pipeline.store.reads import invariants
from pipeline.store.reads.durability import durability_findings
from pipeline.store.reads.invariants import Finding


def findings(db: Database, *, recent: int = 10_000, allowed_unsafe_settings: Collection[str] = ()) -> list[Finding]:
    """Return every row that breaks a rule, overdue work, and settings of Postgres that risk commits."""
    with db.transaction() as tx:
        return invariants.findings(tx, recent=recent) + durability_findings(tx, allowed=allowed_unsafe_settings)
