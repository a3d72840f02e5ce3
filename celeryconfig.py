"""Celery's settings, each with its reason; values that depend on the installation come from `PIPELINE_*`.

A message is a doorbell: losing, repeating or delaying one is harmless, because Postgres holds the truth.
These settings keep that rare and quick to repair; nothing here is needed for correctness.
"""

import os
from datetime import timedelta
from ssl import CERT_REQUIRED as _CERT_REQUIRED
from typing import Any

from pipeline.background.sweeps import periods as _periods
from pipeline.config import TIME_LIMIT_GRACE, Settings
from pipeline.domain.states import PhaseTask as _PhaseTask

_settings = Settings.load(os.environ)
_is_rabbit = _settings.broker_url.startswith("amqp")
_SENTINEL_TIMEOUTS = {"socket_timeout": 2, "socket_connect_timeout": 2}
_TIME_LIMITS = {
    _PhaseTask.PREPARE.value: _settings.prepare_time_limit,
    _PhaseTask.MUTATE.value: _settings.mutate_time_limit,
    _PhaseTask.NEXT.value: _settings.next_time_limit,
}

_PRODUCE = _PhaseTask.PRODUCE.value


def _limits(limit: timedelta) -> dict[str, float]:
    """First an exception ends the task, which stops its runs and says why; then the process is ended."""
    soft = limit.total_seconds()
    return {"soft_time_limit": soft, "time_limit": soft + TIME_LIMIT_GRACE.total_seconds()}


def _queue(name: str) -> dict[str, Any]:
    """An exchange and a key of the queue's own; by Celery's defaults all queues would share one."""
    arguments = {"queue_arguments": {"x-queue-type": "quorum"}} if _is_rabbit else {}
    return {"exchange": name, "exchange_type": "direct", "routing_key": name, **arguments}


# Broker
broker_url = _settings.broker_url
if broker_url.startswith("rediss") and "ssl_cert_reqs" not in broker_url:
    broker_use_ssl = {"ssl_cert_reqs": _CERT_REQUIRED}  # by default kombu would believe any certificate
broker_connection_retry_on_startup = True  # a worker may start before its broker
broker_connection_max_retries = None  # a long outage must not end the worker: the default gives up after 100
broker_transport_options = (
    {
        "confirm_publish": True,  # a send that was not stored is an error, not a silence
        "read_timeout": 5,  # and one that is not confirmed ends too: a frozen broker would hold its sender forever
        "write_timeout": 5,
    }
    if _is_rabbit
    else {
        # when the messages of a worker that died come back
        "visibility_timeout": _settings.visibility_timeout.total_seconds(),
        "unacked_restore_interval": 10,  # look for such messages every 10 s ...
        "unacked_restore_throttle": 1,  # ... and not only every tenth time
        "socket_timeout": 5,  # without it a frozen or half-open broker blocks publishers and workers forever
        "socket_connect_timeout": 2,
        "socket_keepalive": True,
        "health_check_interval": 5,  # notices a connection that died in silence
        # with Sentinel: which Redis, and no endless wait for a Sentinel that is gone
        **(
            {"master_name": _settings.broker_primary, "sentinel_kwargs": _SENTINEL_TIMEOUTS}
            if _settings.broker_primary
            else {}
        ),
    }
)
task_create_missing_queue_type = "quorum"  # RabbitMQ's replicated kind; Redis knows no kinds

# Sending: once more at once, then leave it to the sweep, which finds the run in Postgres
task_publish_retry_policy = {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2}
task_serializer = "json"
accept_content = ["json"]  # never unpickle what comes from a broker
task_ignore_result = True  # results live in Postgres; storing them again costs a tenth of the throughput

# Delivery
task_acks_late = True  # a message is done when its work is, not when it arrives
task_reject_on_worker_lost = True  # a killed child hands its message back; without it the message is dropped
worker_prefetch_multiplier = 1  # a message held by a busy worker cannot be taken by an idle one
worker_consumer = "pipeline.tasks.dead_letter:DeadLetterConsumer"  # what Celery would discard is kept for a person
worker_cancel_long_running_tasks_on_connection_loss = False  # the fence makes a second copy harmless

# Queues: one per phase, so that workers of their own (`-Q pipeline.mutate`) keep slow mutations away from the rest
task_queues = {name: _queue(name) for name in (*_TIME_LIMITS, "pipeline.schedule")}
task_default_queue = task_default_exchange = task_default_routing_key = "pipeline.schedule"
task_routes = {name: {"queue": name} for name in _TIME_LIMITS} | {_PRODUCE: {"queue": _PhaseTask.PREPARE.value}}
task_annotations = {name: _limits(limit) for name, limit in _TIME_LIMITS.items()}
task_annotations[_PRODUCE] = _limits(_settings.prepare_time_limit)

# Beat: each sweep on its own period. A tick that nobody took in time is worthless, so it expires; two beats at
# once are harmless, because a slot in the database lets one of two sweeps through.
beat_scheduler = "pipeline.tasks.beat:LivenessScheduler"
beat_schedule = {
    f"pipeline.{name}": {
        "task": "pipeline.sweep",
        "args": (name,),
        "schedule": every,
        "options": {"expires": every.total_seconds() * 3},
    }
    for name, every in _periods(_settings.tick).items()
}
