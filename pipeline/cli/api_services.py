"""Hand the API what only this process has: the broker, and the code of workflows if it can be imported."""

from collections.abc import Callable, Collection, Mapping

import typer

from pipeline.admin.plan import PlannedRun, Planner
from pipeline.api.context import Services
from pipeline.background.sweeps import periods
from pipeline.cli import common
from pipeline.cli.dead_letters import BrokerDeadLetters
from pipeline.config import Settings
from pipeline.domain.errors import PipelineError
from pipeline.store.database import Database
from pipeline.workflows.registry import Registry


def api_services(settings: Settings, database: Database) -> Services:
    """Build the services of ``pipeline api``."""
    wake_ups, registry = common.WakeUps(), _registry_or_none()
    return Services.connect(
        settings,
        database,
        wake_workflow=wake_ups.wake_workflow,
        dispatch_run=wake_ups.dispatch_run,
        dead_letters=BrokerDeadLetters(),
        operations=registry,
        plan=_plans(settings, database, registry),
        sweep_periods=periods(settings.tick),
        queue_lengths=_queue_lengths,
    )


def _queue_lengths(names: Collection[str]) -> Mapping[str, int] | None:
    """Ask the broker how many messages wait."""
    from pipeline.tasks import messages  # Celery is slow to import

    return messages.queue_lengths(names)


def _registry_or_none() -> Registry | None:
    """Load the code of workflows; None where it cannot be imported: only fetching and planning need it."""
    try:
        return common.load_registry()
    except PipelineError as error:
        typer.echo(f"{error} Results cannot be fetched here, and nothing can be planned.", err=True)
        return None


def _plans(
    settings: Settings, database: Database, registry: Registry | None
) -> Callable[[str, int], list[PlannedRun]] | None:
    """Return what plans a workflow with the loaded code; None if there is none."""
    if registry is None or not registry.workflows:
        return None

    def plan(workflow: str, limit: int) -> list[PlannedRun]:
        return Planner(database, registry, step_limit=settings.step_time_limit).plan(workflow, limit=limit)

    return plan
