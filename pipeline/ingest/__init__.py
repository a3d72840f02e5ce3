"""Queue consumers of Redis streams. The command ``pipeline ingest`` bridges a stream to a topic."""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.ingest.consumer import QueueConsumer
    from pipeline.ingest.engine_source import AsyncStreamSource, StreamSource
    from pipeline.ingest.errors import NoStreamError, PoisonEntry, PoisonError, QueueError
    from pipeline.ingest.queue import QueueConfig, QueueMessage, RedisStreamsQueue
    from pipeline.ingest.recovery import RecoveryRunner
    from pipeline.ingest.redis_client import connect_redis
    from pipeline.ingest.transactions import ContextManagerTxFactory, DbFactory, DbTx
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "pipeline.ingest.consumer": "QueueConsumer",
            "pipeline.ingest.engine_source": "AsyncStreamSource StreamSource",
            "pipeline.ingest.errors": "NoStreamError PoisonEntry PoisonError QueueError",
            "pipeline.ingest.queue": "QueueConfig QueueMessage RedisStreamsQueue",
            "pipeline.ingest.recovery": "RecoveryRunner",
            "pipeline.ingest.redis_client": "connect_redis",
            "pipeline.ingest.transactions": "ContextManagerTxFactory DbFactory DbTx",
        },
    )

__all__ = [
    "AsyncStreamSource",
    "ContextManagerTxFactory",
    "DbFactory",
    "DbTx",
    "NoStreamError",
    "PoisonEntry",
    "PoisonError",
    "QueueConfig",
    "QueueConsumer",
    "QueueError",
    "QueueMessage",
    "RecoveryRunner",
    "RedisStreamsQueue",
    "StreamSource",
    "connect_redis",
]
