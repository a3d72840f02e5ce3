"""A workflow's switches, as people turn them. Each turn says what happened and what follows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from pipeline.admin import lookup
from pipeline.domain.errors import InvalidInputError, quantity
from pipeline.domain.values import Actor
from pipeline.domain.workflows import DesiredStatus
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings
from pipeline.transitions import workflows


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """What a turn of a switch did."""

    workflow: str
    is_changed: bool  #: False: it stood like that already
    message: str
    consequence: str


class WorkflowControls:
    """The switches of workflows. ``ring`` hears of workflows that may go on."""

    def __init__(self, db: Database, ring: Callable[[str], object] = lambda _: None) -> None:
        self.db, self.wake_workflow = db, ring

    def pause(self, name: str, by: Actor) -> ControlResult:
        """Start no run until somebody resumes it."""
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            workflows.pause(tx, name, by)
        return ControlResult(
            workflow=name,
            is_changed=before.desired != DesiredStatus.PAUSED,
            message=f"{name} is paused." if before.desired != DesiredStatus.PAUSED else f"{name} was paused already.",
            consequence="Runs in the air go on; no new one starts until `pipeline resume`.",
        )

    def resume(self, name: str, by: Actor) -> ControlResult:
        """Lift a person's pause and what only waited for a person; past failures are forgotten."""
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            blocks = listings.blocks(tx, name)
            workflows.resume(tx, name, by)
        self.wake_workflow(name)
        were = "was" if len(blocks) == 1 else "were"
        lifted = f" {quantity(len(blocks), 'block')} {were} lifted." if blocks else ""
        changed = bool(blocks) or before.desired == DesiredStatus.PAUSED
        return ControlResult(
            workflow=name,
            is_changed=changed,
            message=f"{name} goes on.{lifted}" if changed else f"{name} was neither paused nor blocked.",
            consequence=_STILL_IN_MAINTENANCE
            if before.maintenance
            else "What is due starts now; every failure so far is forgotten.",
        )

    def enter_maintenance(self, name: str, by: Actor) -> ControlResult:
        """Start nothing until the code has changed, or somebody says that it is mended."""
        if not by.reason:
            raise InvalidInputError(
                f"{by.name} gave no reason; expected what is wrong with {name!r}, for whoever mends it."
            )
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            workflows.enter_maintenance(tx, name, by.reason, by)
        return ControlResult(
            workflow=name,
            is_changed=not before.maintenance,
            message=f"{name} was in maintenance already: {before.maintenance_reason}."
            if before.maintenance
            else f"{name} is in maintenance.",
            consequence="No run starts until new code is deployed, or until `pipeline maintenance exit`.",
        )

    def exit_maintenance(self, name: str, by: Actor) -> ControlResult:
        """The code was mended: go on, and forget the failures of the old one."""
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            workflows.exit_maintenance(tx, name, by)
        if before.maintenance:
            self.wake_workflow(name)
        held = before.desired == DesiredStatus.PAUSED
        goes_on = "It stays paused by a person; `pipeline resume` lets it go on." if held else "What is due starts now."
        return ControlResult(
            workflow=name,
            is_changed=before.maintenance,
            message=f"{name} left maintenance." if before.maintenance else f"{name} was not in maintenance.",
            consequence=goes_on if before.maintenance else "Nothing was changed.",
        )


_STILL_IN_MAINTENANCE = (
    "It stays in maintenance: nothing starts until new code is deployed, or until `pipeline maintenance exit`."
)


def _workflow(tx: Transaction, name: str) -> Row[Any]:
    (row,) = listings.workflows(tx, lookup.require_workflow(tx, name))
    return row
