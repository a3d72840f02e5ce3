"""Command ``pipeline ingest``: publish the entries of a Redis stream as events.

Exit codes; start it again after all but 2:

- 0: stopped by a signal
- 2: wrong usage, or no such workflow, topic or stream
- 3: the database cannot be used, or another transaction is in the way
- 65: an entry cannot become an event
- 75: Redis failed
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from pipeline.cli import common, metrics, setup, tables
from pipeline.cli.commands import CommandGroup
from pipeline.config import EXIT_DATABASE, EXIT_NOT_FOUND, EXIT_RESTART, Settings
from pipeline.consumer_engine.consumer import stopped_by_signals
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.values import Limits
from pipeline.ingest import lag
from pipeline.ingest.bridge import Bridge, OnPoison, Route
from pipeline.ingest.errors import LockedError, NoStreamError, PoisonError, QueueError
from pipeline.ingest.queue import QueueConfig, RedisStreamsQueue, default_consumer, park_entry
from pipeline.ingest.redis_client import connect_redis, require_one_server
from pipeline.store import migrate
from pipeline.store.database import Database
from pipeline.worker import liveness

EXIT_POISON = 65
_HOUR = 3_600_000
_WEEK = 7 * 24 * _HOUR

app = CommandGroup(help="Publish the entries of a Redis stream as events.", invoke_without_command=True)

Stream = Annotated[str, typer.Option(help="Name of the stream.")]
Group = Annotated[str, typer.Option(help="Consumer group. Each group gets every entry once.")]
ConsumerOption = Annotated[
    str, typer.Option(help="Consumer name; by default host and process. Two running processes must not share it.")
]
RedisUrl = Annotated[
    str,
    typer.Option("--redis", envvar="INGEST_REDIS_URL", help="URL of Redis; by default the broker.", show_envvar=True),
]
WorkflowOption = Annotated[str, typer.Option(help="Workflow to publish to.")]
TopicOption = Annotated[str, typer.Option(help="Topic to publish to.")]
TopicField = Annotated[str | None, typer.Option(help="Key of an entry's data that names another topic.")]
MessageIdField = Annotated[
    str | None, typer.Option(help="Key of an entry's data with its message id; by default it is stream:entry.")
]
KeyField = Annotated[str | None, typer.Option(help="Key of an entry's data with the event's key.")]
Batch = Annotated[int, typer.Option(min=1, max=10_000, help="Entries published in one transaction at most.")]
BlockMs = Annotated[
    int, typer.Option(min=1, max=_HOUR, help="How long a read waits; a signal stops it within that time.")
]
ClaimIdleMs = Annotated[
    int, typer.Option(min=1, max=_WEEK, help="How long an entry is idle before it counts as stale.")
]
EveryMs = Annotated[int, typer.Option(min=1, max=_HOUR, help="How long to wait when nothing is stale.")]
OnPoisonOption = Annotated[OnPoison, typer.Option(help="stop: exit with 65. leave: log the entry and continue.")]


@app.callback()
def ingest(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    *,
    stream: Stream = "",
    workflow: WorkflowOption = "",
    topic: TopicOption = "",
    group: Group = "pipeline",
    consumer: ConsumerOption = "",
    redis: RedisUrl = "",
    batch: Batch = 100,
    message_id_field: MessageIdField = None,
    key_field: KeyField = None,
    topic_field: TopicField = None,
    block_ms: BlockMs = 1_000,
    on_poison: OnPoisonOption = OnPoison.STOP,
) -> None:
    """Publish new entries of a stream until SIGTERM or SIGINT. If it dies, its entries go stale: see recover."""
    if context.invoked_subcommand is not None:
        _refuse_misplaced_options(context, context.invoked_subcommand)
        return
    route = _route(workflow, topic, message_id_field, key_field, topic_field)
    stop = StopRequest()
    with _exit_on_error(), stopped_by_signals(stop):
        queue = _queue(redis, stream, group, consumer, block_ms=block_ms, max_read_count=batch)
        bridge = _bridge(context, queue, route, on_poison)
        _run_until_stopped(bridge, redis, stop, bridge.run)


@app.command()
def recover(  # noqa: PLR0913 - options of a command
    context: typer.Context,
    *,
    stream: Stream,
    workflow: WorkflowOption,
    topic: TopicOption,
    group: Group = "pipeline",
    consumer: ConsumerOption = "",
    redis: RedisUrl = "",
    batch: Batch = 100,
    message_id_field: MessageIdField = None,
    key_field: KeyField = None,
    topic_field: TopicField = None,
    claim_idle_ms: ClaimIdleMs = 60_000,
    every_ms: EveryMs = 5_000,
    once: Annotated[bool, typer.Option("--once", help="Publish one batch and exit.")] = False,
    on_poison: OnPoisonOption = OnPoison.STOP,
) -> None:
    """Publish entries that a consumer read and never acknowledged, until SIGTERM or SIGINT."""
    route = _route(workflow, topic, message_id_field, key_field, topic_field)
    stop = StopRequest()
    with _exit_on_error(), stopped_by_signals(stop):
        queue = _queue(redis, stream, group, consumer, claim_idle_ms=claim_idle_ms, max_read_count=batch)
        bridge = _bridge(context, queue, route, on_poison)
        work = bridge.recover_once if once else lambda: bridge.recover(every_ms=every_ms)
        _run_until_stopped(bridge, redis, stop, work)


@app.command()
def backlog(
    stream: Stream,
    group: Group = "pipeline",
    redis: RedisUrl = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Pending entries to list at most.")] = 20,
    as_json: common.AsJson = False,
) -> None:
    """Count the entries that wait in a stream, and list the oldest pending ones. Changes nothing."""
    with _exit_on_error():
        queue = _queue(redis, stream, group, "")
        stats, pending = queue.backlog_stats(), queue.pending(limit)
    if as_json:
        common.print_json({**asdict(stats), "entries": [asdict(entry) for entry in pending]})
        return
    waiting = "an unknown number" if stats.lag is None else stats.lag
    typer.echo(f"{stats.length} in the stream, {waiting} not delivered yet, {stats.pending} pending")
    rows = [(entry.id, entry.consumer, entry.idle_ms, entry.times_delivered) for entry in pending]
    tables.print_table(f"{len(rows)} oldest pending", ("entry", "consumer", "idle ms", "times delivered"), rows)


@app.command()
def park(  # noqa: PLR0913 - options of a command
    entries: Annotated[list[str], typer.Argument(help="Ids of pending entries.")],
    *,
    stream: Stream,
    group: Group = "pipeline",
    redis: RedisUrl = "",
    to: Annotated[str | None, typer.Option(help="Parking stream; by default the stream's name and :parked.")] = None,
    reason: Annotated[str, typer.Option("--reason", "-m", help="Why. Kept with the copy.")] = "",
    as_json: common.AsJson = False,
) -> None:
    """Park pending entries: copy each to a parking stream, then acknowledge it."""
    parked: dict[str, str] = {}
    try:
        with _exit_on_error():
            queue = _queue(redis, stream, group, "")
            for entry in entries:
                parked[entry] = str(park_entry(queue, entry, to=to, reason=reason))
                if not as_json:
                    typer.echo(f"{entry}: parked as {parked[entry]}")
    finally:  # print the parked entries also if a later one fails
        if as_json:
            common.print_json(parked)


def _refuse_misplaced_options(context: typer.Context, command: str) -> None:
    """Refuse options before a subcommand: the subcommand has its own and would ignore them."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name and getattr(context.get_parameter_source(option.name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise InvalidInputError(f"Options before {command} would be ignored: {', '.join(given)}; expected after it.")


def _route(workflow: str, topic: str, message_id: str | None, key: str | None, topic_field: str | None) -> Route:
    for name, value in (("--workflow", workflow), ("--topic", topic)):
        if not value.strip():
            raise InvalidInputError(f"No target for the entries was given; expected {name}.")
    return Route(
        workflow=workflow,
        topic=topic,
        message_id_field=message_id,
        key_field=key,
        topic_field=topic_field,
        limits=Limits(payload=Settings.load(os.environ).max_payload_bytes),
    )


def _queue(redis: str, stream: str, group: str, consumer: str, **options: int) -> RedisStreamsQueue:
    """Open the queue. Without options it only reads, and does not create a misspelt stream."""
    try:
        config = QueueConfig(stream=stream, group=group, consumer=consumer or default_consumer(), **options)
    except ValueError as error:
        raise InvalidInputError(str(error)) from None
    client = connect_redis(_redis_url(redis), longest_block_ms=config.block_ms)
    return RedisStreamsQueue(client, config, create=bool(options))


def _redis_url(redis: str) -> str:
    url = redis or common.load_settings().broker_url
    require_one_server(url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise InvalidInputError(
            "The broker is no Redis; expected --redis or INGEST_REDIS_URL with redis://host:6379/0."
        )
    return url


class StopRequest:
    """Remember a request to stop, and pass it to the loop once there is one."""

    def __init__(self) -> None:
        self.is_requested = False
        self.bridge: Bridge | None = None

    def stop(self, *, now: bool = False) -> None:  # noqa: ARG002 - a second request changes nothing
        """End the loop, or do not start it."""
        self.is_requested = True
        if self.bridge is not None:
            self.bridge.stop()


def _bridge(context: typer.Context, queue: RedisStreamsQueue, route: Route, on_poison: OnPoison) -> Bridge:
    """Build the bridge with one database connection, kept for all batches."""
    unpooled: Database = context.obj
    migrate.require_current(unpooled)
    database = Database.connect(unpooled.engine.url.render_as_string(hide_password=False), pool_size=1)
    database.codecs = unpooled.codecs
    liveness_file = Settings.load(os.environ).liveness_file
    bridge = Bridge(queue, database, route, on_poison, touch_liveness=lambda: liveness.touch(liveness_file))
    bridge.require_target()
    return bridge


def _run_until_stopped(bridge: Bridge, redis: str, stop: StopRequest, work: Callable[[], Any]) -> None:
    setup.log_to_stderr(Settings.load(os.environ))
    config, route = bridge.queue.config, bridge.route
    stop.bridge = bridge
    if stop.is_requested:
        bridge.stop()
    typer.echo(f"{config.stream} to {route.workflow}/{route.topic} as {config.group}/{config.consumer}", err=True)
    try:
        # a stream that disappears while it runs is created by the next start
        with metrics.metrics_endpoint(lag.lag_gauges(_redis_url(redis), config)), _exit_on_error(missing=EXIT_RESTART):
            work()
    finally:
        tally = bridge.counts
        counts = f"{tally.published} published, {tally.duplicates} published before, {tally.poison} not usable"
        locked = f", {tally.locked} held by another transaction" if tally.locked else ""
        typer.echo(counts + locked, err=True)


@contextmanager
def _exit_on_error(missing: int = EXIT_NOT_FOUND) -> Iterator[None]:
    """Turn an expected error into a sentence and an exit code."""
    codes: dict[type[Exception], int] = {NoStreamError: missing, LockedError: EXIT_DATABASE, QueueError: EXIT_RESTART}
    try:
        yield
    except PoisonError as error:
        typer.echo(error.summary, err=True)  # each entry was logged before
        raise typer.Exit(EXIT_POISON) from None
    except tuple(codes) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(next(code for kind, code in codes.items() if isinstance(error, kind))) from None
