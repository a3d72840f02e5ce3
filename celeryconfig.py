"""Celery's settings, each with its reason; values that depend on the installation come from `PIPELINE_*`.

A message only wakes a worker. A lost, repeated or late message is harmless, because Postgres holds all state. These
settings make that rare and quick to repair. Correctness needs none of them.
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
    """Return the two limits: at the soft one an exception stops the runs of the task, then the process is ended."""
    soft = limit.total_seconds()
    return {"soft_time_limit": soft, "time_limit": soft + TIME_LIMIT_GRACE.total_seconds()}


def _queue(name: str) -> dict[str, Any]:
    """Return a queue with its own exchange and routing key; by Celery's defaults all queues share one."""
    arguments = {"queue_arguments": {"x-queue-type": "quorum"}} if _is_rabbit else {}
    return {"exchange": name, "exchange_type": "direct", "routing_key": name, **arguments}


# Broker
broker_url = _settings.broker_url
if broker_url.startswith("rediss") and "ssl_cert_reqs" not in broker_url:
    broker_use_ssl = {"ssl_cert_reqs": _CERT_REQUIRED}  # by default kombu accepts any certificate
broker_connection_retry_on_startup = True  # a worker may start before its broker
broker_connection_max_retries = None  # a long outage must not end the worker: the default gives up after 100
broker_transport_options = (
    {
        "confirm_publish": True,  # a send that the broker did not store raises an error
        "read_timeout": 5,  # without a confirmation it ends too: a frozen broker would block the sender forever
        "write_timeout": 5,
    }
    if _is_rabbit
    else {
        # after this time the messages of a dead worker are delivered again
        "visibility_timeout": _settings.visibility_timeout.total_seconds(),
        "unacked_restore_interval": 10,  # search such messages every 10 s ...
        "unacked_restore_throttle": 1,  # ... and not only every tenth time
        "socket_timeout": 5,  # without it a frozen or half-open broker blocks publishers and workers forever
        "socket_connect_timeout": 2,
        "socket_keepalive": True,
        "health_check_interval": 5,  # detects a connection that died without an error
        # with Sentinel: the name of the primary, and no endless wait for a dead Sentinel
        **(
            {"master_name": _settings.broker_primary, "sentinel_kwargs": _SENTINEL_TIMEOUTS}
            if _settings.broker_primary
            else {}
        ),
    }
)
task_create_missing_queue_type = "quorum"  # RabbitMQ's replicated type; Redis has no types

# Sending: one retry at once; after that the sweep finds the run in Postgres
task_publish_retry_policy = {"max_retries": 1, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.2}
task_serializer = "json"
accept_content = ["json"]  # never unpickle data from a broker
task_ignore_result = True  # results live in Postgres; storing them again costs a tenth of the throughput

# Delivery
task_acks_late = True  # a message is acknowledged after its work, not on arrival
task_reject_on_worker_lost = True  # the message of a killed child is delivered again; otherwise Celery drops it
worker_prefetch_multiplier = 1  # a prefetched message of a busy worker cannot go to an idle one
worker_consumer = "pipeline.tasks.dead_letter:DeadLetterConsumer"  # keeps what Celery would discard
worker_cancel_long_running_tasks_on_connection_loss = False  # the fence makes a second delivery harmless

# Queues: one per phase, so that separate workers (`-Q pipeline.mutate`) keep slow mutations away from the rest.
# A worker that reads `pipeline.schedule` also reads `pipeline.publish`, where other services send events, and one queue
# of reconcile attempts for each of its workflows. These are not listed, so that `celery purge` does not empty them.
task_queues = {name: _queue(name) for name in (*_TIME_LIMITS, "pipeline.schedule")}
task_default_queue = task_default_exchange = task_default_routing_key = "pipeline.schedule"
task_routes = {name: {"queue": name} for name in _TIME_LIMITS} | {_PRODUCE: {"queue": _PhaseTask.PREPARE.value}}
task_annotations = {name: _limits(limit) for name, limit in _TIME_LIMITS.items()}
task_annotations[_PRODUCE] = _limits(_settings.prepare_time_limit)

# Beat: each sweep has its own period. A tick that no worker took in time has no use, so it expires. Two beats at
# once are harmless: a slot in the database lets only one of two sweeps run.
beat_scheduler = "pipeline.tasks.supervised:LivenessScheduler"
beat_schedule = {
    f"pipeline.{name}": {
        "task": f"pipeline.sweep.{name}",
        "schedule": every,
        "options": {"expires": every.total_seconds() * 3},
    }
    for name, every in _periods(_settings.tick).items()
}
