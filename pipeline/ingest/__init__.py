"""Queue consumers of Redis streams. The command ``pipeline ingest`` bridges a stream to a topic."""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.ingest.consumer import ContextManagerTxFactory, DbFactory, DbTx, QueueConsumer, RecoveryRunner
    from pipeline.ingest.engine_source import AsyncStreamSource, StreamSource
    from pipeline.ingest.errors import NoStreamError, PoisonEntry, PoisonError, QueueError
    from pipeline.ingest.queue import QueueConfig, QueueMessage, RedisStreamsQueue
    from pipeline.ingest.redis_client import connect_redis
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "pipeline.ingest.consumer": "ContextManagerTxFactory DbFactory DbTx QueueConsumer RecoveryRunner",
            "pipeline.ingest.engine_source": "AsyncStreamSource StreamSource",
            "pipeline.ingest.errors": "NoStreamError PoisonEntry PoisonError QueueError",
            "pipeline.ingest.queue": "QueueConfig QueueMessage RedisStreamsQueue",
            "pipeline.ingest.redis_client": "connect_redis",
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
