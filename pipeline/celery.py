"""Pipeline inside a Celery app: `install` for any app, and our own app for `celery -A pipeline`.

Importing this module reads nothing, connects to nothing and makes no app. Our own app is made when it is first used,
by the same installation, and Celery loads the settings when it first needs one.
"""

import os
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import click
from celery import Celery, Task
from celery.app.defaults import SETTING_KEYS
from celery.utils.imports import instantiate
from kombu.entity import Exchange, Queue

from pipeline.background.sweeps import DUTIES, periods
from pipeline.client.publishing import PUBLISH_QUEUE
from pipeline.config import APP_VARIABLE, EXIT_UNSAFE, TIME_LIMIT_GRACE, Settings, SettingsError
from pipeline.domain.errors import InvalidInputError
from pipeline.domain.states import PhaseTask

__all__ = ["install"]

PHASE_QUEUES = tuple(task.value.rpartition(".")[2] for task in PhaseTask if task is not PhaseTask.PRODUCE)
SCHEDULE_QUEUE, RECONCILE_QUEUE, DEAD_LETTER_QUEUE = "schedule", "reconcile", "dead_letters"
#: Options with which every message of ours is sent, whatever the settings of the app are.
SEND_OPTIONS: Mapping[str, Any] = {
    "serializer": "json",
    "ignore_result": True,
    # one retry at once; after that the sweep finds the run in Postgres
    "retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2},
}
_MODULES = tuple(f"pipeline.tasks.{name}" for name in ("phases", "publish", "signals"))
#: Tasks of the queue of sweeps. An app may have tasks of its own whose names begin with `pipeline.`.
_SCHEDULE_TASKS = ("pipeline.schedule", "pipeline.reconcile", *(f"pipeline.sweep.{name}" for name in DUTIES))
#: Limit of the tasks that bound their own work, so that no `task_time_limit` of the app ends them.
_LONGEST = timedelta(hours=1)
_DEFAULT_VISIBILITY_TIMEOUT = timedelta(hours=1)  #: Celery's own, for Redis
_UNBOUNDED = timedelta(days=7)


def install(app: Celery, workflows: Iterable[str] | Callable[[], Iterable[str]] = ()) -> None:
    """Add Pipeline's tasks, queues and beat entries to a Celery app.

    Call it once, after the app has its settings. ``workflows`` are the modules that define workflows, or a function
    that finds them later, unless PIPELINE_WORKFLOWS names others. All other settings come from PIPELINE_* variables;
    broker and transport options are the app's. The app's own tasks keep their options, queues, routes and beat entries.
    """
    _add(Installation(app, workflows if callable(workflows) else tuple(workflows)))


@dataclass(eq=False)
class Installation:
    """Pipeline inside one Celery app."""

    app: Any
    workflows: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    is_own: bool = False  #: it is our app, and no other tasks are expected in it

    def load_settings(self) -> Settings:
        """Read the settings. In another app they say nothing about the broker: it is the app's."""
        if self.is_own:
            return Settings.load(os.environ)
        defaults: dict[str, Any] = {"workflows": self.modules, "visibility_timeout": _UNBOUNDED}
        url = str(self.app.conf.broker_url or "")
        if _is_supported(url):
            defaults["broker_url"] = url
            defaults["broker_primary"] = (self.app.conf.broker_transport_options or {}).get("master_name", "")
        return Settings.load(os.environ, defaults)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules that define workflows, as `install` was given them."""
        return tuple(self.workflows() if callable(self.workflows) else self.workflows)

    @cached_property
    def prefix(self) -> str:
        """The first part of the names of our queues."""
        return self.load_settings().queue_prefix

    @property
    def is_rabbit(self) -> bool:
        """Whether the broker is RabbitMQ."""
        return str(self.app.conf.broker_url or "").startswith("amqp")

    def queue(self, name: str) -> Any:
        """Return one of our queues, with its own exchange and routing key; by Celery's defaults all queues share one.

        In RabbitMQ the queues of our own app are replicated. Elsewhere they have the type of the app's own queue: one
        quorum queue changes prefetch and countdown of all tasks of a worker. ``publish`` is declared as every app
        declares a queue by default, since RabbitMQ refuses an app that declares an existing queue in another way.
        """
        full = f"{self.prefix}.{name}"
        is_quorum = self.is_rabbit and name != PUBLISH_QUEUE
        is_quorum = is_quorum and (self.is_own or self.app.conf.task_default_queue_type == "quorum")
        arguments = {"x-queue-type": "quorum"} if is_quorum else None
        exchange = Exchange(full, type="direct")  # type: ignore[no-untyped-call]
        return Queue(full, exchange, routing_key=full, queue_arguments=arguments)  # type: ignore[no-untyped-call]

    def is_ours(self, queue: str) -> bool:
        """Return whether a queue is one of ours."""
        first, _, name = queue.rpartition(f"{self.prefix}.")
        is_reconcile = name.startswith(f"{RECONCILE_QUEUE}.")
        return not first and (name in {*PHASE_QUEUES, SCHEDULE_QUEUE, PUBLISH_QUEUE} or is_reconcile)

    def configure(self) -> Mapping[str, Any]:
        """Add our part to the settings of the app, which Celery has just loaded. Returns no defaults.

        Queues: one per phase, so that separate workers (`-Q pipeline.mutate`) keep slow mutations away from the rest.
        A worker that reads `schedule` also reads `publish`, where other services send events, and one queue of
        reconcile attempts for each of its workflows. These are not listed, so that `celery purge` does not empty them.

        Beat: each sweep has its own period. A tick that no worker took in time has no use, so it expires. Two beats at
        once are harmless: a slot in the database lets only one of two sweeps run.
        """
        conf = self.app.conf
        with _ending_commands():
            settings = self.load_settings()
        theirs = instantiate(self.app.amqp_cls, app=self.app).Queues(conf.task_queues)  # Celery's default, if none
        conf.task_queues = [*({**theirs, **self._queues()}.values())]
        routes = conf.task_routes or ()
        conf.task_routes = [self._routes(), *(routes if isinstance(routes, list | tuple) else (routes,))]
        conf.beat_schedule = {**conf.beat_schedule, **self._beat_entries(settings)}
        conf.include = [*dict.fromkeys((*(conf.include or ()), *_MODULES))]
        return {}

    def _queues(self) -> dict[str, Any]:
        queues = [self.queue(name) for name in (*PHASE_QUEUES, SCHEDULE_QUEUE)]
        return {queue.name: queue for queue in queues}

    def _routes(self) -> dict[str, Any]:
        phases = {task.value: task.value.rpartition(".")[2] for task in PhaseTask} | {
            PhaseTask.PRODUCE.value: PHASE_QUEUES[0]
        }
        names = phases | dict.fromkeys(_SCHEDULE_TASKS, SCHEDULE_QUEUE)
        return {task: {"queue": f"{self.prefix}.{queue}"} for task, queue in names.items()}

    def _beat_entries(self, settings: Settings) -> dict[str, Any]:
        queue = f"{self.prefix}.{SCHEDULE_QUEUE}"
        return {
            f"{self.prefix}.{name}": {
                "task": f"pipeline.sweep.{name}",
                "schedule": every,
                "options": {"expires": every.total_seconds() * 3, "queue": queue},
            }
            for name, every in periods(settings.tick).items()
        }

    def problems(self, settings: Settings) -> Iterator[str]:
        """Yield each setting of the app with which its workers could not run workflows."""
        conf, name = self.app.conf, self.app.main or "without a name"
        options = conf.broker_transport_options or {}
        if not _is_supported(str(conf.broker_url or "")):
            yield f"the broker of the app {name!r} is neither Redis, Redis Sentinel nor RabbitMQ; expected one of these"
        elif not self.is_own and settings.broker_url != str(conf.broker_url):
            yield f"PIPELINE_BROKER_URL is not the broker of the app {name!r}; expected the same URL, or nothing"
        limit = max(settings.prepare_time_limit, settings.mutate_time_limit, settings.next_time_limit)
        visible = timedelta(seconds=options.get("visibility_timeout") or _DEFAULT_VISIBILITY_TIMEOUT.total_seconds())
        if not self.is_rabbit and visible <= limit + TIME_LIMIT_GRACE:
            yield (
                f"broker_transport_options has visibility_timeout {visible.total_seconds():g} s, so a message is "
                f"delivered again while its task still runs; expected more than the longest time limit of a phase plus "
                f"{TIME_LIMIT_GRACE.total_seconds():g} s ({(limit + TIME_LIMIT_GRACE).total_seconds():g} s): raise it, "
                "or lower PIPELINE_MUTATE_TIME_LIMIT"
            )
        if not {"json", "application/json"} & set(conf.accept_content or ()):
            yield f"accept_content is {list(conf.accept_content or ())}; expected 'json' in it: our messages are JSON"
        if conf.task_always_eager:
            yield "task_always_eager is on, so tasks run inside their senders; expected it off in a worker"
        if conf.task_protocol != 2:
            yield f"task_protocol is {conf.task_protocol}; expected 2, Celery's default"
        expected = ({*self._queues()} <= {*self.app.amqp.queues}, self._routes().items() <= _first(conf.task_routes))
        if not all(expected) or not {*self._beat_entries(settings)} <= {*conf.beat_schedule}:
            yield (
                "task_queues, task_routes or beat_schedule were assigned after pipeline.celery.install(app); expected "
                "install to be called last"
            )


def _first(routes: Any) -> Any:
    """Return the items of the first table of routes."""
    first = routes[0] if isinstance(routes, list | tuple) and routes else {}
    return first.items() if isinstance(first, Mapping) else {}.items()


def _is_supported(url: str) -> bool:
    return url.partition("://")[0] in ("redis", "rediss", "sentinel", "amqp", "amqps")


_installation: Installation | None = None


def _add(found: Installation) -> None:
    """Install in an app: now if its settings are loaded, else when Celery loads them."""
    global _installation
    if _installation is not None:
        raise InvalidInputError(
            f"Pipeline is already installed in the Celery app {_installation.app.main!r}; expected one app in a "
            "process, and one call of pipeline.celery.install, before anything of pipeline.tasks is imported."
        )
    _installation = found
    found.app.add_defaults(found.configure)


def found_installation() -> Installation | None:
    """Return the installation of this process, if there is one yet. None is made."""
    return _installation


def installed() -> Installation:
    """Return the installation of this process: of the app that called `install`, of PIPELINE_APP, or our own."""
    if _installation is None:
        if name := os.environ.get(APP_VARIABLE, "").strip():
            _find(name)
        else:
            app = _App("pipeline")
            app.add_defaults(_settings)
            _add(Installation(app, is_own=True))
    assert _installation is not None
    return _installation


def _find(name: str) -> None:
    """Import the app that PIPELINE_APP names; it has to call `install`."""
    from celery.app.utils import find_app

    try:
        find_app(name)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(
            f"{APP_VARIABLE}={name} is no Celery app ({error}); expected what `celery -A` accepts."
        ) from error
    if _installation is None:
        raise InvalidInputError(
            f"The Celery app {APP_VARIABLE}={name} does not call pipeline.celery.install; expected that it does, or no "
            f"{APP_VARIABLE}."
        )


def __getattr__(name: str) -> Any:
    """Return the app: the installed one, or our own, which is made now."""
    if name == "app":
        return installed().app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class PipelineTask(Task):  # type: ignore[misc]  # celery ships no types
    """The base of our tasks: it sets every option that Celery would take from the settings of the app."""

    abstract = True
    acks_late = True  #: a message is acknowledged after its work, not on arrival
    reject_on_worker_lost = True  #: the message of a killed child is delivered again; otherwise Celery drops it
    retry_on_worker_lost = False
    acks_on_failure = acks_on_timeout = True
    acks_on_failure_or_timeout = True  #: both, before Celery 5.7
    ignore_result = True  #: results live in Postgres; storing them again costs a tenth of the throughput
    store_errors_even_if_ignored = store_eager_result = track_started = False
    rate_limit = 0  #: none; with None the `task_default_rate_limit` of the app would count
    priority = 0

    @classmethod
    def annotate(cls) -> None:
        """Set the time limits. The `task_annotations` of the app are for its own tasks.

        At the soft limit an exception stops the runs of the task; at the other one the process is ended.
        """
        settings = installed().load_settings()
        limit = {
            PhaseTask.PREPARE: settings.prepare_time_limit,
            PhaseTask.MUTATE: settings.mutate_time_limit,
            PhaseTask.NEXT: settings.next_time_limit,
            PhaseTask.PRODUCE: settings.prepare_time_limit,
        }.get(cls.name, _LONGEST)
        cls.soft_time_limit = limit.total_seconds()
        cls.time_limit = (limit + TIME_LIMIT_GRACE).total_seconds()

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send this task as each message of ours is sent."""
        return super().apply_async(args, kwargs, **{**SEND_OPTIONS, **options})


def _settings() -> dict[str, Any]:
    """Return the values of `celeryconfig.py`: inside the package in a wheel, beside it in a checkout.

    It is loaded by its path, not by its name: a project that uses Pipeline may have its own `celeryconfig`.
    """
    package = Path(__file__).parent
    places = (package / "celeryconfig.py", package.parent / "celeryconfig.py")
    file = next(place for place in places if place.is_file())
    with _ending_commands():
        values = runpy.run_path(str(file))
    return {name: value for name, value in values.items() if name in SETTING_KEYS}


@contextmanager
def _ending_commands() -> Iterator[None]:
    """End a `celery` command without a traceback if the settings cannot be used."""
    try:
        yield
    except SettingsError as error:
        if click.get_current_context(silent=True) is None:
            raise
        raise _SettingsExit(str(error)) from error


class _SettingsExit(click.ClickException):
    """Ends a `celery` command with the problems and without a traceback."""

    exit_code = EXIT_UNSAFE


class _App(Celery):  # type: ignore[misc]  # celery ships no types
    """Our own app, whose workers end with documented exit codes."""

    @cached_property
    def Worker(self) -> Any:  # noqa: N802 - the name is Celery's
        return self.subclass_with_self("pipeline.tasks.supervised:SupervisedWorker", name="Worker", reverse="Worker")
