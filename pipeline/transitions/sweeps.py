"""Slots of the sweeps: of several that want to run one, the database lets one through.

Two beats at once are then harmless, and a worker may stand in for a beat that is gone.
"""

import json
from collections.abc import Mapping
from datetime import timedelta

from pipeline.store.database import Transaction
from pipeline.store.rows import SlotRow
from pipeline.store.writes import sweeps as sweep_store


def take_slot(tx: Transaction, name: str, every: timedelta) -> SlotRow | None:
    """Let this caller run the sweep now, if it has not run within three quarters of its period. None: it has.

    A run that Postgres's clock, since set back, put into the future counts as none.
    """
    return tx.first(sweep_store.TAKE_SLOT, name=name, pause=every * 0.75)


def save_report(tx: Transaction, name: str, counts: Mapping[str, int]) -> None:
    """Remember what the last run of a sweep did."""
    tx.execute(sweep_store.REPORT_SLOT, name=name, report=json.dumps(dict(counts)))
