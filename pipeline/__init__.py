"""Durable side effects on Celery.

What a workflow's author needs, and nothing heavier: ``Workflow``, ``PrepareResult``, connectors and
the errors a handler may raise. Everything else is imported from where it lives.
"""

from pipeline.connectors.sdk import Call, Connector, mutation, read
from pipeline.domain.errors import AuthError, EventError, LogicError, PhaseViolationError, PipelineError, TransientError
from pipeline.domain.policies import (
    Backoff,
    BreakerPolicy,
    FailurePolicy,
    MutationRetryPolicy,
    ReconcilePolicy,
    Retention,
    WakePolicy,
)
from pipeline.domain.reconciliation import Applied, ErrorMeaning, ErrorReading, NotFound, Retry, Verdict
from pipeline.workflows.authoring import DeclarationError, Topic, Workflow
from pipeline.workflows.contexts import MutateContext, NextContext, PrepareContext, ProducerContext
from pipeline.workflows.handler_types import Event, MutationResult, Prepared, PrepareResult

__all__ = [
    "Applied",
    "AuthError",
    "Backoff",
    "BreakerPolicy",
    "Call",
    "Connector",
    "DeclarationError",
    "ErrorMeaning",
    "ErrorReading",
    "Event",
    "EventError",
    "FailurePolicy",
    "LogicError",
    "MutateContext",
    "MutationResult",
    "MutationRetryPolicy",
    "NextContext",
    "NotFound",
    "PhaseViolationError",
    "PipelineError",
    "PrepareContext",
    "PrepareResult",
    "Prepared",
    "ProducerContext",
    "ReconcilePolicy",
    "Retention",
    "Retry",
    "Topic",
    "TransientError",
    "Verdict",
    "WakePolicy",
    "Workflow",
    "mutation",
    "read",
]
