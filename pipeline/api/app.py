"""Build the ASGI app of the API and the console. It runs alone or mounted under a prefix of another app."""

import os
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from pipeline.admin.database import Database
from pipeline.api import health, login, problem_pages, problems
from pipeline.api.access import Identify, check_role_rules
from pipeline.api.console.routes import router as console_router
from pipeline.api.context import Services
from pipeline.api.security import Guard
from pipeline.api.v1.documents import document_answers
from pipeline.api.v1.routes import router as v1_router
from pipeline.config import Settings, SettingsError

_OIDC_NEEDED = ("authlib", "httpx", "joserfc")
_STATIC = Path(__file__).parent / "static"


def create(
    settings: Settings | None = None,
    *,
    database: Database | None = None,
    identify: Identify | None = None,
    services: Services | None = None,
) -> FastAPI:
    """Create the ASGI app of the API and the console.

    ``identify`` names the caller by another system's login. ``services`` replaces the database and the settings.
    """
    found = services or Services.connect(settings or Settings.load(os.environ), database)
    check_role_rules(found.settings)
    app = FastAPI(
        title="Pipeline",
        version=metadata.version("pipeline"),
        description="Read and operate workflows, runs, events and mutations.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.state.services = found
    app.state.identify = identify
    app.state.failed_logins = login.FailedLogins()
    app.add_middleware(Guard, settings=found.settings)
    problems.install_handlers(app, problem_pages.problem_page)
    app.include_router(health.router)
    app.include_router(login.router)
    if found.settings.oidc_issuer:
        _add_provider(app, found.settings)
    app.include_router(v1_router)
    document_answers(app)
    app.include_router(console_router, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    return app


def _add_provider(app: FastAPI, settings: Settings) -> None:
    """Let people log in by the OpenID Connect provider of the settings."""
    missing = [name for name in _OIDC_NEEDED if find_spec(name) is None]
    if missing:
        needed = ", ".join(missing)
        raise SettingsError(
            [f"PIPELINE_OIDC_ISSUER: needs packages that are not installed ({needed}): pip install 'pipeline[oidc]'"]
        )
    from pipeline.api import oidc

    app.state.oidc = oidc.Provider(settings)
    app.include_router(oidc.router)
