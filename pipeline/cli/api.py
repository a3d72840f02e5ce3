"""Command ``pipeline api``: serve the HTTP API and the operator console."""

import os
import socket
from importlib.util import find_spec
from typing import Annotated

import typer

from pipeline.config import Settings, is_loopback
from pipeline.domain.errors import InvalidInputError
from pipeline.store.database import Database

_NEEDED = ("fastapi", "jinja2", "multipart", "uvicorn")


def api(
    host: Annotated[str, typer.Option(help="Address of the interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080,
    prefix: Annotated[str, typer.Option(help="Path under which a proxy serves it, such as /ops.")] = "",
) -> None:
    """Serve the HTTP API and the operator console, until SIGTERM or Ctrl-C."""
    _require_extra()
    _require_identity(host)
    import uvicorn

    from pipeline.api.app import create
    from pipeline.api.server import StreamingServer
    from pipeline.cli.api_services import api_services

    settings = Settings.load(os.environ)
    database = Database.connect(settings.database_url, pool_size=settings.pool_size)
    found = api_services(settings, database)
    app = create(services=found)
    listener = _listener(host, port)
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"http://{shown}:{listener.getsockname()[1]}{prefix}/", err=True)
    config = uvicorn.Config(app, root_path=prefix, log_level="warning", server_header=False, proxy_headers=False)
    try:
        StreamingServer(config, found.broadcaster).run(sockets=[listener])
    finally:
        listener.close()
        database.dispose()


def _require_extra() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidInputError(
            f"The API needs packages that are not installed ({', '.join(missing)}); "
            "install them with `pip install 'pipeline[console]'`."
        )


def _require_identity(host: str) -> None:
    """Refuse an address that other machines can reach while no source of identity is set."""
    if not is_loopback(host):
        raise InvalidInputError(
            f"The API does not listen on {host}: other machines reach it, and no source of identity is set. "
            "Expected a loopback address such as 127.0.0.1."
        )


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        raise InvalidInputError(f"Port {port} of {host} cannot be used; expected one that is free.") from None
