"""Durable side effects on Celery.

These are the names that authors of workflows and connectors and publishing services need. Other public names are in
``pipeline.client``, ``pipeline.testing``, ``pipeline.ingest``, ``pipeline.consumer_engine`` and
``pipeline.connectors``. Deeper modules are private.
"""

from typing import TYPE_CHECKING

from pipeline.lazy import lazy_names

if TYPE_CHECKING:
    from pipeline.client import (
        BrokerClient,
        DatabaseClient,
        EventInput,
        Receipt,
        publish,
    )
    from pipeline.connectors import (
        Applied,
        Call,
        Connector,
        ErrorMeaning,
        ErrorReading,
        Grade,
        NotFound,
        Retry,
        Verdict,
        mutation,
        read,
    )
    from pipeline.domain.codec import Codec
    from pipeline.domain.errors import (
        AuthError,
        EventError,
        HandlerError,
        InvalidInputError,
        LogicError,
        MissingKeyError,
        NotFoundError,
        PayloadError,
        PhaseViolationError,
        PipelineError,
        RefusedError,
        TamperedError,
        TransientError,
        UnavailableError,
    )
    from pipeline.domain.policies import (
        Backoff,
        BreakerPolicy,
        FailurePolicy,
        MutationRetryPolicy,
        ReconcilePolicy,
        Retention,
        WakePolicy,
    )
    from pipeline.store.codecs import AesGcm
    from pipeline.workflows.authoring import DeclarationError, Topic, Workflow
    from pipeline.workflows.contexts import MutateContext, NextContext, PrepareContext, ProducerContext
    from pipeline.workflows.handler_types import Event, MutationResult, Prepared, PrepareResult
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "pipeline.client": "BrokerClient DatabaseClient EventInput Receipt publish",
            "pipeline.connectors": (
                "Applied Call Connector ErrorMeaning ErrorReading Grade NotFound Retry Verdict mutation read"
            ),
            "pipeline.domain.codec": "Codec",
            "pipeline.domain.errors": (
                "AuthError EventError HandlerError InvalidInputError LogicError MissingKeyError NotFoundError "
                "PayloadError PhaseViolationError PipelineError RefusedError TamperedError TransientError "
                "UnavailableError"
            ),
            "pipeline.domain.policies": (
                "Backoff BreakerPolicy FailurePolicy MutationRetryPolicy ReconcilePolicy Retention WakePolicy"
            ),
            "pipeline.store.codecs": "AesGcm",
            "pipeline.workflows.authoring": "DeclarationError Topic Workflow",
            "pipeline.workflows.contexts": "MutateContext NextContext PrepareContext ProducerContext",
            "pipeline.workflows.handler_types": "Event MutationResult PrepareResult Prepared",
        },
    )

__all__ = [
    "AesGcm",
    "Applied",
    "AuthError",
    "Backoff",
    "BreakerPolicy",
    "BrokerClient",
    "Call",
    "Codec",
    "Connector",
    "DatabaseClient",
    "DeclarationError",
    "ErrorMeaning",
    "ErrorReading",
    "Event",
    "EventError",
    "EventInput",
    "FailurePolicy",
    "Grade",
    "HandlerError",
    "InvalidInputError",
    "LogicError",
    "MissingKeyError",
    "MutateContext",
    "MutationResult",
    "MutationRetryPolicy",
    "NextContext",
    "NotFound",
    "NotFoundError",
    "PayloadError",
    "PhaseViolationError",
    "PipelineError",
    "PrepareContext",
    "PrepareResult",
    "Prepared",
    "ProducerContext",
    "Receipt",
    "ReconcilePolicy",
    "RefusedError",
    "Retention",
    "Retry",
    "TamperedError",
    "Topic",
    "TransientError",
    "UnavailableError",
    "Verdict",
    "WakePolicy",
    "Workflow",
    "mutation",
    "publish",
    "read",
]
