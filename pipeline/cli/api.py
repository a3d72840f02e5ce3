"""Command ``pipeline api``: serve the HTTP API and the operator console.

The API gets from here what only this process has: the broker, and the code of workflows if it can be imported.
"""

import getpass
import os
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.admin.access import LINK_LIFETIME, Access
from pipeline.admin.plan import PlannedRun, Planner
from pipeline.background.sweeps import periods
from pipeline.cli import common, setup
from pipeline.cli.dead_letters import BrokerDeadLetters
from pipeline.config import Settings, is_loopback
from pipeline.domain.access import Rights, Role
from pipeline.domain.errors import InvalidInputError, PipelineError
from pipeline.store import migrate
from pipeline.store.codecs import settings_codec
from pipeline.store.database import Database
from pipeline.workflows.registry import Registry

if TYPE_CHECKING:
    from pipeline.api.context import Services


def api_services(settings: Settings, database: Database) -> "Services":
    """Build the services of ``pipeline api``."""
    from pipeline.api.context import Services  # needs the extra console

    wake_ups, registry = common.WakeUps(), _registry_or_none()
    database.codecs = (registry or Registry()).codecs(settings_codec(settings))
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


_NEEDED = ("fastapi", "jinja2", "multipart", "uvicorn")


def api(
    host: Annotated[str, typer.Option(help="Address of the interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    prefix: Annotated[str, typer.Option(help="Path under which it is served, such as /ops; a proxy keeps it.")] = "",
) -> None:
    """Serve the HTTP API and the operator console, until SIGTERM or Ctrl-C.

    Without any source of identity it listens on this machine only, and prints a link that logs in once.
    """
    _require_extra()
    import uvicorn
    from starlette.routing import Mount, Router

    from pipeline.api.app import StreamingServer, create

    pass

    settings = Settings.load(os.environ)
    setup.log_to_stderr(settings)
    under = _checked_prefix(prefix)
    with _open_database(settings) as database:
        migrate.require_current(database)
        access = Access(database)
        has_identity = bool(settings.api_identity_header or settings.oidc_issuer) or access.has_tokens()
        if not has_identity:
            _require_loopback(host)
        found = api_services(settings, database)
        app = create(services=found)
        with _listener(host, port) as listener:
            shown = f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listener.getsockname()[1]}{under}"
            common.print_lines(address if has_identity else _link_text(address, access))
            sys.stdout.flush()
            served = Router([Mount(under, app)]) if under else app
            config = uvicorn.Config(
                served,
                log_level="warning",
                server_header=False,
                proxy_headers=False,  # the app follows those of the listed proxies
                timeout_graceful_shutdown=5,
            )
            StreamingServer(config, found.broadcaster).run(sockets=[listener])


@contextmanager
def _open_database(settings: Settings) -> Iterator[Database]:
    """Connect to the database, and close the pool at the end."""
    database = Database.connect(settings.database_url, pool_size=settings.pool_size)
    try:
        yield database
    finally:
        database.dispose()


def _link_text(address: str, access: Access) -> str:
    """Create a one-time link for the user of this shell; return what to do with it."""
    rights = Rights(role=Role.ADMIN, can_see_payloads=True)
    link = access.create_link(getpass.getuser(), rights)
    minutes = LINK_LIFETIME // timedelta(minutes=1)
    return (
        f"{address}/login?link={link}\n"
        f"No caller can log in yet. This link logs in once, as admin, within {minutes} minutes, on this machine. "
        "`pipeline tokens create NAME --role admin` creates an API token."
    )


def _checked_prefix(prefix: str) -> str:
    under = prefix.rstrip("/")
    if under and not re.fullmatch(r"(/[\w.~-]+)+", under):
        raise InvalidInputError(f"{prefix!r} cannot be a prefix; expected a path such as /ops.")
    return under


def missing_packages() -> str:
    """Return the names of packages that the API needs and that are not installed."""
    return ", ".join(name for name in _NEEDED if find_spec(name) is None)


def _require_extra() -> None:
    if missing := missing_packages():
        raise InvalidInputError(
            f"The API needs packages that are not installed ({missing}); "
            "install them with `pip install 'celery-durable-effects[console]'`."
        )


def _require_loopback(host: str) -> None:
    """Refuse an address that other machines can reach while no caller can be identified."""
    if not is_loopback(host):
        raise InvalidInputError(
            f"The API does not listen on {host}: other machines reach it, and there is no source of identity. "
            "Expected an API token (`pipeline tokens create NAME`), PIPELINE_API_IDENTITY_HEADER or "
            "PIPELINE_OIDC_ISSUER; or a loopback address such as 127.0.0.1."
        )


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        raise InvalidInputError(f"Port {port} of {host} cannot be used; expected one that is free.") from None
