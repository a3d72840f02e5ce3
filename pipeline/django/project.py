"""Read from a Django project which database has our schema, and which modules define workflows."""

from typing import Any

from django import conf
from django.apps import AppConfig, apps
from django.db import connections
from django.utils.module_loading import module_has_submodule
from sqlalchemy.engine import URL

#: Options of a database that are libpq's. Django and its drivers keep the others for themselves.
_LIBPQ_OPTIONS = ("channel_binding", "gss", "krbsrvname", "options", "passfile", "ssl", "target_session_attrs")


def autodiscover() -> tuple[str, ...]:
    """Return the modules ``workflows`` of the installed apps, for ``install(app, workflows=autodiscover)``.

    It imports none of them, and works before Django is set up: a Celery app is made earlier.
    """
    found = apps.get_app_configs() if apps.ready else map(AppConfig.create, conf.settings.INSTALLED_APPS)
    return tuple(f"{app.name}.workflows" for app in found if module_has_submodule(app.module, "workflows"))


def database_alias() -> str:
    """Return the alias of the database that has our schema: PIPELINE_DATABASE_ALIAS, or `default`."""
    return str(getattr(conf.settings, "PIPELINE_DATABASE_ALIAS", "default"))


def database_url(alias: str) -> str | None:
    """Return the URL of a database as Django would connect to it now; None if its settings cannot be written as one.

    During tests that is the test database.
    """
    if alias not in connections or connections[alias].vendor != "postgresql":
        return None
    found: dict[str, Any] = connections[alias].settings_dict
    if not found["NAME"]:  # a service of libpq names it
        return None
    query = {name: str(value) for name, value in found["OPTIONS"].items() if name.startswith(_LIBPQ_OPTIONS)}
    host, port = found["HOST"] or None, found["PORT"]
    if host and host.startswith("/"):
        query, host = {"host": host, **query}, None
    url = URL.create(
        "postgresql",
        username=found["USER"] or None,
        password=found["PASSWORD"] or None,
        host=host,
        port=int(port) if port and host else None,
        database=found["NAME"],
        query=query if host or not port else {**query, "port": str(port)},
    )
    return url.render_as_string(hide_password=False)
