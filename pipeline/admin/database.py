"""Hand the database to callers that read and act through ``admin`` only."""

from datetime import datetime

from pipeline.store import migrate
from pipeline.store.database import Database as Database


def check_readiness(db: Database) -> None:
    """Check that the database answers and has the schema of this code; raise an error otherwise."""
    migrate.require_current(db)


def clock(db: Database) -> datetime:
    """Return the time of the database."""
    with db.transaction() as tx:
        return tx.clock()
