"""Slots of the sweeps: of several that want to run one, the database lets one through.

Two beats at once are then harmless, and a worker may stand in for a beat that is gone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from pipeline.store.database import Transaction
from pipeline.store.writes import sweeps as sweep_store


@dataclass(frozen=True, slots=True)
class SweepSlot:
    """The right to run a sweep now, and the report of its last run; None: it has not reported."""

    last_report: Mapping[str, int] | None


def take_slot(tx: Transaction, name: str, every: timedelta) -> SweepSlot | None:
    """Let this caller run the sweep now, if it has not run within three quarters of its period.

    A run that Postgres's clock, since set back, put into the future counts as none.
    """
    row = tx.first(sweep_store.TAKE_SLOT, name=name, pause=every * 0.75)
    return None if row is None else SweepSlot(row.report)


def save_report(tx: Transaction, name: str, counts: Mapping[str, int]) -> None:
    """Remember what the last run of a sweep did."""
    tx.execute(sweep_store.REPORT_SLOT, name=name, report=json.dumps(dict(counts)))
