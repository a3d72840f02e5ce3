"""What people were told already."""

from pipeline.store import workflows as store
from pipeline.store.database import Transaction


def announced(tx: Transaction, kind: str, subject: str) -> None:
    """Remember that a notice was delivered, so that it is not sent again."""
    tx.run(store.INSERT_NOTICE, kind=kind, subject=subject)
