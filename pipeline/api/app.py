"""Build the ASGI app of the API and the console. Serve it alone, or mount it.

Mounted, it runs under a prefix of another app. Served alone, it ends its open streams first when it shuts down.
"""

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from starlette.staticfiles import StaticFiles

from pipeline.admin import Database
from pipeline.admin.system import check_readiness
from pipeline.api import console, login, problems, v1
from pipeline.api.access import Identify, check_role_rules
from pipeline.api.context import Services
from pipeline.api.context import services as services_of
from pipeline.api.live import Broadcaster
from pipeline.api.security import Guard
from pipeline.api.v1.documents import document_answers
from pipeline.client.publishing import App, WakeUpSender
from pipeline.config import Settings, SettingsError, package_version

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> dict[str, str]:
    """Answer that this process lives. Asks no other system."""
    return {"status": "ok"}


@router.get("/readyz")
def readyz(found: Annotated[Services, Depends(services_of)]) -> dict[str, str]:
    """Answer whether the database can be used and has the schema of this code."""
    check_readiness(found.db)
    return {"status": "ok"}


_OIDC_NEEDED = ("authlib", "httpx", "joserfc")
_STATIC = Path(__file__).parent / "static"


def create(
    settings: Settings | None = None,
    *,
    database: Database | None = None,
    identify: Identify | None = None,
    celery_app: App | None = None,
    services: Services | None = None,
) -> FastAPI:
    """Create the ASGI app of the API and the console.

    ``identify`` names the caller by another system's login. Through ``celery_app``, the Celery app of a service,
    workers are told at once of what was published or decided. ``services`` replaces all but ``identify``.
    """
    found = services or _connect(settings or Settings.load(os.environ), database, celery_app)
    check_role_rules(found.settings)
    app = FastAPI(
        title="Pipeline",
        version=package_version(),
        description="Read and operate workflows, runs, events and mutations.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.services = found
    app.state.identify = identify
    app.state.failed_logins = login.FailedLogins()
    app.add_middleware(Guard, settings=found.settings)
    problems.install_handlers(app, login.problem_page)
    app.include_router(router)
    app.include_router(login.router)
    if found.settings.oidc_issuer:
        _add_provider(app, found.settings)
    for part in v1.ROUTERS:
        app.include_router(part, prefix="/v1")
    document_answers(app)
    for part in console.ROUTERS:
        app.include_router(part, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    return app


def _connect(settings: Settings, database: Database | None, celery_app: App | None) -> Services:
    if celery_app is None:
        return Services.connect(settings, database)
    sender = WakeUpSender(celery_app, queue_prefix=settings.queue_prefix)
    return Services.connect(settings, database, wake_workflow=sender.wake_workflow, dispatch_run=sender.dispatch_run)


def _add_provider(app: FastAPI, settings: Settings) -> None:
    """Let people log in by the OpenID Connect provider of the settings."""
    missing = [name for name in _OIDC_NEEDED if find_spec(name) is None]
    if missing:
        needed = ", ".join(missing)
        raise SettingsError(
            [f"PIPELINE_OIDC_ISSUER: packages are missing ({needed}): pip install 'celery-durable-effects[oidc]'"]
        )
    from pipeline.api import oidc

    app.state.oidc = oidc.Provider(settings)
    app.include_router(oidc.router)


class StreamingServer(uvicorn.Server):
    """A server that waits for no stream when it shuts down."""

    def __init__(self, config: uvicorn.Config, broadcaster: Broadcaster) -> None:
        super().__init__(config)
        self.broadcaster = broadcaster

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the connections."""
        self.broadcaster.close()
        await super().shutdown(sockets)
