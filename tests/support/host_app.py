"""A small Celery app of a shop, with settings that contradict ours wherever Celery lets one choose.

With HOST_INSTALLS it also runs the workflow of the tests with real processes. Everything that its tasks can see of
themselves goes to the Redis key `seen`, so that a test can compare the app with and without Pipeline.
"""

import json
import os
import signal
from typing import Any

import redis
from celery import Celery, Task, bootsteps, chord, group, signals
from celery.app.defaults import SETTING_KEYS
from celery.apps.worker import Worker
from celery.worker.consumer import Consumer

BROKER = os.environ["HOST_BROKER"]
#: Its name until Celery 5.6, and since.
_ACKS_ON_FAILURE = f"task_acks_on_failure{'' if 'task_acks_on_failure' in SETTING_KEYS else '_or_timeout'}"


class ShopTask(Task):  # type: ignore[misc]  # celery ships no types
    """The base of the shop's tasks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count every call."""
        note("calls through the base", self.name)
        return super().__call__(*args, **kwargs)


class ShopWorker(Worker):  # type: ignore[misc]
    """The shop's worker."""

    def on_consumer_ready(self, consumer: Any) -> None:
        """Note the class of the worker and of what it starts."""
        super().on_consumer_ready(consumer)
        note("worker", f"{type(self).__name__} {isinstance(consumer, ShopConsumer)}")


class ShopConsumer(Consumer):  # type: ignore[misc]
    """The shop's consumer."""

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Note the task; Celery discards its message."""
        note("unknown task", message.headers["task"])
        super().on_unknown_task(body, message, exc)


class ShopStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """A step of the shop's worker."""

    def start(self, parent: Any) -> None:
        """Note the prefetch multiplier."""
        note("step", str(parent.prefetch_multiplier))


class ShopApp(Celery):  # type: ignore[misc]
    """The shop's app, with a worker class of its own."""

    Worker = property(lambda self: self.subclass_with_self(ShopWorker, name="Worker", reverse="Worker"))


def note(what: str, value: str) -> None:
    """Remember what was seen."""
    with redis.Redis.from_url(BROKER) as client:
        client.sadd("seen", json.dumps([what, value]))


app: Any = ShopApp("shop", task_cls=ShopTask)
app.steps["worker"].add(ShopStep)
app.conf.update(
    broker_url=BROKER,
    result_backend=BROKER,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("HOST_VISIBILITY_TIMEOUT", "600")),
        "socket_timeout": 5,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    accept_content=["pickle", *os.environ.get("HOST_ALSO_ACCEPTS", "json").split()],
    task_serializer="pickle",
    result_serializer="json",
    task_default_rate_limit="500/s",
    task_annotations={"*": {"acks_late": False, "priority": 3}, "shop.mail": {"rate_limit": "50/s"}},
    task_time_limit=300,
    task_track_started=True,
    **{_ACKS_ON_FAILURE: False},
    task_default_queue="shop",
    task_queues={
        "shop": {"exchange": "shop", "routing_key": "shop"},
        "mails": {"exchange": "mails", "exchange_type": "topic", "routing_key": "mail.#"},
    },
    task_routes={"shop.mail": {"queue": "mails", "routing_key": "mail.out"}, "*": {"queue": "shop"}},
    beat_schedule={"clock": {"task": "shop.clock", "schedule": 1.0}},
    worker_prefetch_multiplier=3,
    worker_consumer=f"{__name__}:ShopConsumer",
    worker_log_format="SHOP %(message)s",
)
if name := os.environ.get("HOST_BEAT_SCHEDULER"):
    app.conf.beat_scheduler = name

OPTIONS = """
    acks_late reject_on_worker_lost ignore_result serializer rate_limit time_limit soft_time_limit track_started
    acks_on_failure acks_on_timeout acks_on_failure_or_timeout priority
"""


@app.task(bind=True, name="shop.mail")
def mail(self: Any, to: str) -> str:
    """Send a mail, which never happens."""
    note("arrived", f"{self.name} {self.request.delivery_info['routing_key']} {self.request.delivery_info['priority']}")
    return f"sent to {to}"


@app.task(name="shop.options")
def options() -> dict[str, Any]:
    """Return the options of every task of the shop, as this worker has them."""
    return {
        name: {option: getattr(task, option, None) for option in OPTIONS.split()}
        for name, task in app.tasks.items()
        if name.startswith("shop.")
    }


@app.task(name="shop.clock")
def clock() -> None:
    """Note that beat sent this."""
    note("beat", "clock")


@app.task(bind=True, name="shop.dies")
def dies(self: Any) -> None:
    """Kill the process at the first delivery. With the shop's options the message is not delivered again."""
    with redis.Redis.from_url(BROKER) as client:
        client.incr(f"deliveries of {self.name}")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True, name="shop.survives", reject_on_worker_lost=True)
def survives(self: Any) -> str:
    """Kill the process at the first delivery; the second one succeeds."""
    with redis.Redis.from_url(BROKER) as client:
        if client.incr(f"deliveries of {self.name}") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return "delivered again"


survives.acks_late = True  # an annotation says otherwise; the shop knows its way around


@app.task(name="shop.collected")
def collected(results: list[str]) -> list[str]:
    """Return the results of a chord in order."""
    return sorted(results)


@app.task(name="shop.fails")
def fails() -> None:
    """Raise."""
    raise ValueError("as every time")


@signals.worker_ready.connect
def ready(**_: Any) -> None:
    """Note the signal."""
    note("signal", "ready")


@signals.task_success.connect
def succeeded(sender: Any = None, **_: Any) -> None:
    """Note the signal, of the shop's tasks."""
    if sender.name.startswith("shop."):
        note("signal", f"{sender.name} succeeded")


if os.environ.get("HOST_INSTALLS"):
    from pipeline.celery import install

    install(app, workflows=["tests.support.order_workflow"])


def use() -> dict[str, Any]:
    """Call every task as a service of the shop does, and return what came of it."""

    def ended(result: Any) -> list[str]:
        found = result.get(timeout=60, propagate=False)
        return [result.state, type(found).__name__ if isinstance(found, Exception) else str(found)]

    got: dict[str, Any] = {
        "options": options.delay().get(timeout=60),
        "late": mail.apply_async(("ada",), countdown=0.2).get(timeout=60),
        "fails": ended(fails.delay()),
        "group": group(mail.s("x"), mail.s("y"))().get(timeout=60),
        "chord": chord([mail.s("a"), mail.s("b")], collected.s())().get(timeout=60),
        "chain": (mail.s("z") | mail.s()).delay().get(timeout=60),
    }
    app.send_task("shop.unknown", queue="shop")
    got["dies"] = ended(dies.delay())
    got["survives"] = ended(survives.delay())
    inspect = app.control.inspect(destination=[os.environ["HOST_NODE"]], timeout=20)  # ends with the answer
    (stats,) = (inspect.stats() or {}).values()
    (queues,) = (inspect.active_queues() or {}).values()
    (registered,) = (inspect.registered() or {}).values()
    got["worker"] = {
        "prefetch": stats["prefetch_count"],
        "queues": sorted(queue["name"] for queue in queues if not queue["name"].startswith("pipeline.")),
        "registered": sorted(name for name in registered if not name.startswith("pipeline.")),
    }
    with redis.Redis.from_url(BROKER) as client:
        names = ("shop.dies", "shop.survives")
        got["deliveries"] = {name: int(client.get(f"deliveries of {name}") or 0) for name in names}
    return got
