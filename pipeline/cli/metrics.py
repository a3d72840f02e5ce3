"""Command ``pipeline metrics``: serve the gauges of the database to Prometheus, or print them once.

Workers serve their own metrics when PIPELINE_METRICS_PORT is set. This command serves the database's gauges from one
place. ``metrics_endpoint`` is the endpoint of other commands that keep running.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from pipeline.admin import gauges
from pipeline.config import Settings
from pipeline.domain.errors import InvalidInputError
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.telemetry.metrics import METRICS
from pipeline.telemetry.metrics_export import GaugeRegistration, MetricsExport, require_exporter

_HOST = "0.0.0.0"  # noqa: S104 - Prometheus seldom runs on the same machine


def metrics(
    context: typer.Context,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, envvar="PIPELINE_METRICS_PORT", help="Port to serve on.", show_envvar=True),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="PIPELINE_METRICS_HOST", help="Interface to serve on.", show_envvar=True)
    ] = _HOST,
    once: Annotated[bool, typer.Option("--once", help="Print every gauge and end.")] = False,
) -> None:
    """Serve the gauges of the database to Prometheus at /metrics, until SIGTERM or Ctrl-C."""
    database: Database = context.obj
    settings = Settings.load(os.environ)
    if once:
        require_exporter(settings.model_copy(update={"metrics_port": 1}))
        migrate.require_current(database)
        typer.echo(_gauge_text(database), nl=False)
        return
    if port is None:
        raise InvalidInputError("No port was given; expected --port, PIPELINE_METRICS_PORT or --once.")
    asked = settings.model_copy(update={"metrics_port": port, "metrics_host": host, "otlp_endpoint": ""})
    require_exporter(asked)
    _serve(asked)


def _gauge_text(database: Database) -> str:
    from pipeline.telemetry import metrics_endpoint
    from pipeline.telemetry.metrics_collector import Series

    rows = [*gauges.read(database), (gauges.UP, {}, 1), (gauges.AGE, {}, 0)]
    found = [(METRICS[name], tuple(labels.items()), float(value)) for name, labels, value in rows]
    return metrics_endpoint.exposition(
        (Series(about.name, about.kind, about.unit, about.description, (), labels), (value,))
        for about, labels, value in found
    )


def _serve(settings: Settings) -> None:
    _require_free_port(settings)
    database = Database.connect(settings.database_url, pool_size=1)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    meters = MetricsExport(settings)
    meters.begin(gauges.Gauges(database).register)
    try:
        typer.echo(f"serving /metrics on {settings.metrics_host}:{settings.metrics_port}", err=True)
        ended.wait()
    finally:
        meters.end()
        database.dispose()


def _require_free_port(settings: Settings) -> None:
    """Refuse a port that is taken. The endpoint itself only retries, since a worker must go on without it."""
    host, port = settings.metrics_host, settings.metrics_port or 0
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        raise InvalidInputError(f"Port {port} of {host} cannot be used; expected one that is free.") from None


@contextmanager
def metrics_endpoint(*registers: GaugeRegistration) -> Iterator[None]:
    """Export metrics while the block runs, if the settings ask for it."""
    settings = Settings.load(os.environ)
    require_exporter(settings)
    meters = MetricsExport(settings)
    meters.begin(*registers)
    try:
        yield
    finally:
        meters.end()
