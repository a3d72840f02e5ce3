"""The workflow of a chaos run: an order, one effect, one event that reports it.

There are four operations. ``charge`` honours its key and can be reconciled (grade A), ``ship`` can be
reconciled (grade B), ``text`` neither (grade D): each of its unknown outcomes must end before an operator.
``refund`` is of grade A, and its search lags longer than the settle window that is declared here.
Intervals of minutes in production are seconds here.
"""

import os
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from pipeline import Backoff, FailurePolicy, PrepareResult, ReconcilePolicy, Retention, Topic, Workflow
from pipeline.chaos.faults import OPERATIONS, PROVIDER_VARIABLE, RETENTION_VARIABLE, SETTLE, TIMEOUT
from pipeline.connectors.http import Http, get, post
from pipeline.domain.policies import BreakerPolicy, MutationRetryPolicy

_SHORT_BACKOFF = Backoff(base=timedelta(milliseconds=300), cap=timedelta(seconds=1))
_MANY_FAILURES = FailurePolicy(max_failures=1000, backoff=_SHORT_BACKOFF)
_RECONCILE = ReconcilePolicy(
    max_attempts=60,
    backoff=_SHORT_BACKOFF,
    immediate_timeout=timedelta(seconds=1),
    monitor_after=(timedelta(seconds=2), timedelta(seconds=4)),
)
_RETRY = MutationRetryPolicy(backoff=_SHORT_BACKOFF)
#: Half of all requests fail here on purpose, so the breaker opens only if nearly all outcomes are unknown.
_BREAKER = BreakerPolicy(unknown_share=0.8, probe_every=timedelta(seconds=1))


_send = partial(post, timeout=TIMEOUT, settle=SETTLE, retry=_RETRY, breaker=_BREAKER)


class Provider(Http):
    """The operations of the provider."""

    name = "provider"

    charge = _send("/charge", keyed=True, lookup=get("/charge/{key}"), policy=_RECONCILE)
    refund = _send("/refund", keyed=True, lookup=get("/refund/{key}"), policy=_RECONCILE)
    ship = _send("/ship", lookup=get("/ship/{key}"), policy=_RECONCILE)
    text = _send("/text")


provider = Provider(os.environ.get(PROVIDER_VARIABLE) or "http://127.0.0.1:9")
_days = os.environ.get(RETENTION_VARIABLE)
_retention = Retention(done=timedelta(days=int(_days)), ledger=timedelta(days=int(_days))) if _days else None
chaos = Workflow("chaos", concurrency=64, on_uncertain="contain", retention=_retention)
done = chaos.topic("done")


class Fulfil:
    """Fulfil one order at a time, with one effect."""

    topic: ClassVar[Topic]

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest order."""
        del state
        pending = ctx.peek(self.topic, limit=1)
        if not pending:
            return PrepareResult.nothing()
        return PrepareResult(reserve=pending, data={"order": pending[0].message_id})

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Request the effect; the topic is named after the operation."""
        return getattr(ctx.provider, self.topic.name)(json={"order": prepared.data["order"]})

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Publish that the order is done."""
        if result.applied:
            ctx.publish(done, message_id=prepared.data["order"], payload={})


for operation in OPERATIONS:
    orders = chaos.topic(operation)
    declare = chaos.consumer(name=operation, subscribes=[orders], publishes=[done], failures=_MANY_FAILURES)
    declare(type(operation, (Fulfil,), {"topic": orders}))
