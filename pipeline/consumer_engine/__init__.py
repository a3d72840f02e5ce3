"""The consumer engine: retries, timeouts and limits for items of any source, with threads or asyncio."""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.consumer_engine.asyncio_driver import BoundedRunner
    from pipeline.consumer_engine.attempts import Attempt, current_attempt
    from pipeline.consumer_engine.consumer import (
        AcknowledgingSource,
        AsyncConsumerMixin,
        AsyncSource,
        BatchAcknowledgingSource,
        ConsumerMixin,
        PolicyCheckingSource,
        Source,
        stopped_by_signals,
    )
    from pipeline.consumer_engine.errors import (
        AbandonedCallsException,
        ConsumerLoopTimeoutException,
        ExceptionType,
        FetchException,
        FetchTimeoutException,
        TransactionException,
        error_message,
    )
    from pipeline.consumer_engine.function_tasks import consume
    from pipeline.consumer_engine.lifecycle import ItemOutcome, ItemStatus, LoopReport
    from pipeline.consumer_engine.policies import (
        BatchPolicy,
        ConcurrencyPolicy,
        ConsumerLoopPolicy,
        ConsumerPolicy,
        ConsumerSteps,
        EmptyQueuePolicy,
        ExceptionPolicy,
        FetchPolicy,
        PolicyError,
        ProcessPolicy,
        RetryPolicy,
        SuccessPolicy,
        load_policy,
    )
    from pipeline.consumer_engine.transactions import Transaction
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "pipeline.consumer_engine.asyncio_driver": "BoundedRunner",
            "pipeline.consumer_engine.attempts": "Attempt current_attempt",
            "pipeline.consumer_engine.consumer": (
                "AcknowledgingSource AsyncConsumerMixin AsyncSource BatchAcknowledgingSource ConsumerMixin "
                "PolicyCheckingSource Source "
                "stopped_by_signals"
            ),
            "pipeline.consumer_engine.errors": (
                "AbandonedCallsException ConsumerLoopTimeoutException ExceptionType FetchException "
                "FetchTimeoutException TransactionException error_message"
            ),
            "pipeline.consumer_engine.function_tasks": "consume",
            "pipeline.consumer_engine.lifecycle": "ItemOutcome ItemStatus LoopReport",
            "pipeline.consumer_engine.policies": (
                "BatchPolicy ConcurrencyPolicy ConsumerLoopPolicy ConsumerPolicy ConsumerSteps EmptyQueuePolicy "
                "ExceptionPolicy FetchPolicy PolicyError ProcessPolicy RetryPolicy SuccessPolicy load_policy"
            ),
            "pipeline.consumer_engine.transactions": "Transaction",
        },
    )

__all__ = [
    "AbandonedCallsException",
    "AcknowledgingSource",
    "AsyncConsumerMixin",
    "AsyncSource",
    "Attempt",
    "BatchAcknowledgingSource",
    "BatchPolicy",
    "BoundedRunner",
    "ConcurrencyPolicy",
    "ConsumerLoopPolicy",
    "ConsumerLoopTimeoutException",
    "ConsumerMixin",
    "ConsumerPolicy",
    "ConsumerSteps",
    "EmptyQueuePolicy",
    "ExceptionPolicy",
    "ExceptionType",
    "FetchException",
    "FetchPolicy",
    "FetchTimeoutException",
    "ItemOutcome",
    "ItemStatus",
    "LoopReport",
    "PolicyCheckingSource",
    "PolicyError",
    "ProcessPolicy",
    "RetryPolicy",
    "Source",
    "SuccessPolicy",
    "Transaction",
    "TransactionException",
    "consume",
    "current_attempt",
    "error_message",
    "load_policy",
    "stopped_by_signals",
]
