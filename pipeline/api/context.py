"""Hold what every endpoint needs: the database, the acts of operators and the settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from fastapi import Request

from pipeline.admin import Database
from pipeline.admin.changes import changes_since
from pipeline.admin.dead_letters import DeadLetters
from pipeline.admin.given_results import Operations
from pipeline.admin.mutations import Presence
from pipeline.admin.plan import PlannedRun
from pipeline.admin.resolutions import Resolutions
from pipeline.admin.system import QueueLengths, connect
from pipeline.api.live import Broadcaster
from pipeline.config import Settings


def _notify_nothing(_: object) -> None:
    """Leave the work to the next tick: this process has no broker."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Services:
    """What endpoints read and act with. The process that has Celery hands its functions in."""

    db: Database
    resolutions: Resolutions
    settings: Settings
    wake_workflow: Callable[[str], object] = _notify_nothing
    dispatch_run: Callable[[UUID], object] = _notify_nothing
    dead_letters: DeadLetters | None = None  #: None: this process has no broker
    plan: Callable[[str, int], Sequence[PlannedRun]] | None = None  #: None: this process has no code of workflows
    sweep_periods: Mapping[str, timedelta] = field(default_factory=dict)  #: empty: this process knows no sweeps
    queue_lengths: QueueLengths | None = None  #: None: this process has no broker
    broadcaster: Broadcaster  #: sends changes to open streams
    presence: Presence = field(default_factory=Presence)  #: which operators have a mutation open

    @classmethod
    def connect(  # noqa: PLR0913 - what the edge of a process hands in
        cls,
        settings: Settings,
        db: Database | None = None,
        *,
        wake_workflow: Callable[[str], object] = _notify_nothing,
        dispatch_run: Callable[[UUID], object] = _notify_nothing,
        dead_letters: DeadLetters | None = None,
        operations: Operations | None = None,
        plan: Callable[[str, int], Sequence[PlannedRun]] | None = None,
        sweep_periods: Mapping[str, timedelta] | None = None,
        queue_lengths: QueueLengths | None = None,
    ) -> "Services":
        """Build the services of one process from its settings."""
        found = db or connect(settings)
        return cls(
            db=found,
            resolutions=Resolutions(found, operations, wake_workflow, dispatch_run),
            settings=settings,
            wake_workflow=wake_workflow,
            dispatch_run=dispatch_run,
            dead_letters=dead_letters,
            plan=plan,
            sweep_periods=sweep_periods or {},
            queue_lengths=queue_lengths,
            broadcaster=Broadcaster(lambda mark: changes_since(found, mark)),
        )


def services(request: Request) -> Services:
    """Return the services of the app that answers this request."""
    found: Services = request.app.state.services
    return found
