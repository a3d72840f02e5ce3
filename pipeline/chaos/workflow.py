"""The workflow of a chaos run: an order, one effect, one event that says so, for three kinds of operation.

``charge`` honours its key and can be asked about (grade A), ``ship`` can be asked about (grade B), ``text``
neither (grade D): each of its unknown outcomes must end as a question for a person. Everything that waits
minutes in production waits seconds here.
"""

import os
from datetime import timedelta
from typing import Any, ClassVar

from pipeline import Backoff, FailurePolicy, PrepareResult, ReconcilePolicy, Topic, Workflow
from pipeline.chaos.faults import SETTLE, TIMEOUT
from pipeline.connectors.http import Http, get, post
from pipeline.domain.policies import BreakerPolicy, RetryPolicy

WORLD = "CHAOS_WORLD"  #: the variable that says where the world is
_SOON = Backoff(base=timedelta(milliseconds=300), cap=timedelta(seconds=1))
_PATIENT = FailurePolicy(max_failures=1000, backoff=_SOON)
_ASKS = ReconcilePolicy(
    max_attempts=60,
    backoff=_SOON,
    immediate_timeout=timedelta(seconds=1),
    watch=(timedelta(seconds=2), timedelta(seconds=4)),
)
_AGAIN = RetryPolicy(backoff=_SOON)
#: Half of everything goes wrong here on purpose; what is left of the breaker shows when the world goes dark.
_BREAKER = BreakerPolicy(share=0.8, probe_every=timedelta(seconds=1))


class World(Http):
    """What the outside world offers."""

    name = "world"

    charge = post(
        "/charge",
        keyed=True,
        lookup=get("/charge/{key}"),
        timeout=TIMEOUT,
        settle=SETTLE,
        policy=_ASKS,
        retry=_AGAIN,
        breaker=_BREAKER,
    )
    ship = post(
        "/ship", lookup=get("/ship/{key}"), timeout=TIMEOUT, settle=SETTLE, policy=_ASKS, retry=_AGAIN, breaker=_BREAKER
    )
    text = post("/text", timeout=TIMEOUT, settle=SETTLE, retry=_AGAIN, breaker=_BREAKER)


world = World(os.environ.get(WORLD) or "http://127.0.0.1:9")
chaos = Workflow("chaos", concurrency=64, on_uncertain="contain")
done = chaos.topic("done")


class Fulfil:
    """One order at a time, one effect for it."""

    topic: ClassVar[Topic]

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest order."""
        del state
        pending = ctx.peek(self.topic, limit=1)
        if not pending:
            return PrepareResult.nothing()
        return PrepareResult(reserve=pending, data={"order": pending[0].message_id})

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for the effect; the topic is named after the operation."""
        return getattr(ctx.world, self.topic.name)(json={"order": prepared.data["order"]})

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Say that it is done."""
        if result.applied:
            ctx.publish(done, message_id=prepared.data["order"], payload={})


charges, parcels, texts = (chaos.topic(name) for name in ("charge", "ship", "text"))


@chaos.consumer(subscribes=[charges], publishes=[done], failures=_PATIENT)
class Charge(Fulfil):
    """An operation of grade A."""

    topic = charges


@chaos.consumer(subscribes=[parcels], publishes=[done], failures=_PATIENT)
class Ship(Fulfil):
    """An operation of grade B."""

    topic = parcels


@chaos.consumer(subscribes=[texts], publishes=[done], failures=_PATIENT)
class Text(Fulfil):
    """An operation of grade D."""

    topic = texts
