"""Pause and resume workflows, and put them into maintenance, for an operator."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.admin import lookup
from pipeline.domain.errors import InvalidInputError, quantity
from pipeline.domain.values import Actor
from pipeline.domain.workflows import DesiredStatus
from pipeline.store.database import Database, Transaction
from pipeline.store.reads import listings
from pipeline.store.schema import WorkflowRow
from pipeline.transitions import starts, workflows


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """What an act on a workflow changed."""

    workflow: str
    is_changed: bool  #: False: the workflow had that state already
    message: str
    consequence: str


class WorkflowControls:
    """Control workflows. ``wake_workflow`` is called for a workflow that may continue."""

    def __init__(self, db: Database, wake_workflow: Callable[[str], object] = lambda _: None) -> None:
        self.db, self.wake_workflow = db, wake_workflow

    def pause(self, name: str, by: Actor) -> ControlResult:
        """Start no run until an operator resumes the workflow."""
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            workflows.pause(tx, name, by)
        return ControlResult(
            workflow=name,
            is_changed=before.desired != DesiredStatus.PAUSED,
            message=f"{name} is paused." if before.desired != DesiredStatus.PAUSED else f"{name} was paused already.",
            consequence="Active runs continue; no new one starts until `pipeline resume`.",
        )

    def resume(self, name: str, by: Actor) -> ControlResult:
        """Lift an operator's pause and the blocks that wait for an operator.

        Lifting a block says that its cause was corrected: then the failures so far are forgotten too.
        """
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            starts.lock_workflow(tx, name)  # a block that comes later stays
            blocks = listings.blocks(tx, name)
            workflows.resume(tx, name, by, forget_failures=bool(blocks))
        self.wake_workflow(name)
        were = "was" if len(blocks) == 1 else "were"
        lifted = f" {quantity(len(blocks), 'block')} {were} lifted." if blocks else ""
        changed = bool(blocks) or before.desired == DesiredStatus.PAUSED
        return ControlResult(
            workflow=name,
            is_changed=changed,
            message=f"{name} continues.{lifted}" if changed else f"{name} was neither paused nor blocked.",
            consequence=_STILL_IN_MAINTENANCE
            if before.maintenance
            else f"Due runs start now{'; the failures so far are forgotten' if blocks else ''}.",
        )

    def enter_maintenance(self, name: str, by: Actor) -> ControlResult:
        """Start no run until new code is deployed, or an operator ends maintenance."""
        if not by.reason:
            raise InvalidInputError(f"{by.name} gave no reason; expected what is wrong with {name!r}.")
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
        """End maintenance, and reset the failures of the old code."""
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            workflows.exit_maintenance(tx, name, by)
        if before.maintenance:
            self.wake_workflow(name)
        held = before.desired == DesiredStatus.PAUSED
        next_step = "It stays paused by an operator until `pipeline resume`." if held else "Due runs start now."
        return ControlResult(
            workflow=name,
            is_changed=before.maintenance,
            message=f"{name} left maintenance." if before.maintenance else f"{name} was not in maintenance.",
            consequence=next_step if before.maintenance else "Nothing was changed.",
        )

    def run_producer(self, name: str, handler: str, by: Actor) -> ControlResult:
        """Let a producer run now, whatever its schedule."""
        with self.db.transaction() as tx:
            before = _workflow(tx, name)
            workflows.run_producer(tx, name, handler, by)
        self.wake_workflow(name)
        is_held = before.desired == DesiredStatus.PAUSED or before.maintenance
        return ControlResult(
            workflow=name,
            is_changed=True,
            message=f"{handler} is due now.",
            consequence="It runs when the workflow may start runs again." if is_held else "It runs at once.",
        )


_STILL_IN_MAINTENANCE = (
    "It stays in maintenance: no run starts until new code is deployed, or until `pipeline maintenance exit`."
)


def _workflow(tx: Transaction, name: str) -> WorkflowRow:
    (row,) = listings.workflows(tx, lookup.require_workflow(tx, name))
    return row
