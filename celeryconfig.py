"""Settings of our own Celery app, each with its reason; values that depend on the installation come from `PIPELINE_*`.

A message only wakes a worker. A lost, repeated or late message is harmless, because Postgres holds all state. These
settings make that rare and quick to repair. Correctness needs none of them. The options of tasks, the queues, the
routes and the beat entries are in `pipeline/celery.py`, since they are the same in every app.
"""

import os
from ssl import CERT_REQUIRED as _CERT_REQUIRED

from pipeline.celery import SCHEDULE_QUEUE as _SCHEDULE_QUEUE
from pipeline.config import Settings

_settings = Settings.load(os.environ)
_is_rabbit = _settings.broker_url.startswith("amqp")
_SENTINEL_TIMEOUTS = {"socket_timeout": 2, "socket_connect_timeout": 2}

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
        # unacknowledged messages under keys of this installation: with Celery's keys, its short timeout would also
        # deliver messages of other apps on the same Redis again
        **{f"unacked{part}_key": f"{_settings.queue_prefix}.unacked{part}" for part in ("", "_index", "_mutex")},
        # with Sentinel: the name of the primary, and no endless wait for a dead Sentinel
        **(
            {"master_name": _settings.broker_primary, "sentinel_kwargs": _SENTINEL_TIMEOUTS}
            if _settings.broker_primary
            else {}
        ),
    }
)
task_create_missing_queue_type = "quorum"  # RabbitMQ's replicated type; Redis has no types

# Messages
task_serializer = "json"
accept_content = ["json"]  # never unpickle data from a broker

# Delivery
worker_prefetch_multiplier = 1  # a prefetched message of a busy worker cannot go to an idle one
worker_cancel_long_running_tasks_on_connection_loss = False  # the fence makes a second delivery harmless
task_default_queue = task_default_exchange = task_default_routing_key = f"{_settings.queue_prefix}.{_SCHEDULE_QUEUE}"
