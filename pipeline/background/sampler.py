"""Sample throughput, backlog and unknown outcomes of the workflows, for charts."""

from pipeline.background.messages import SweepReport
from pipeline.store.database import Database
from pipeline.transitions import installation


def sample(db: Database) -> SweepReport:
    """Take one sample of every workflow in which something happened or waits."""
    with db.autocommit() as tx:
        return SweepReport({"workflows": number} if (number := installation.take_sample(tx)) else {})
