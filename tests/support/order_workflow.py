"""The workflow of the tests with real processes: one order, one effect at the recorder, one event that says so.

The same module is imported by every worker. At every named point a process asks the recorder what to
do, so a test can freeze or kill it at exactly that place.
"""

import os
import signal
from datetime import timedelta
from typing import Any

from pipeline import (
    Applied,
    Backoff,
    Call,
    Connector,
    FailurePolicy,
    NotFound,
    PrepareResult,
    ReconcilePolicy,
    TransientError,
    Verdict,
    Workflow,
    mutation,
    read,
)
from pipeline.domain.policies import BreakerPolicy
from pipeline.worker import crash_points
from pipeline.worker.crash_points import CrashPoint
from tests.support.effect_recorder import asked

RECORDER = os.environ.get("SHOP_RECORDER", "")
#: Short, because some tests wait for it; those in which it must not run out have a longer one.
TIMEOUT = timedelta(seconds=float(os.environ.get("SHOP_TIMEOUT", "2")))
#: Seconds at a gate: longer than any test keeps one shut, or a handler would fail for having waited.
_PATIENCE = 120.0
_SOON = Backoff(base=timedelta(milliseconds=300), cap=timedelta(seconds=1))
_PATIENT = FailurePolicy(max_failures=50, backoff=_SOON)


class World(Connector):
    """What the recorder offers."""

    name = "world"

    @read
    def gate(self, *, name: str) -> Any:
        """Go through a gate, which a test may have closed."""
        return asked(RECORDER, "gate", timeout=_PATIENCE, name=name)

    @mutation(
        timeout=TIMEOUT,
        settle=timedelta(0),
        policy=ReconcilePolicy(max_attempts=100, backoff=_SOON),
        breaker=BreakerPolicy(probe_every=timedelta(seconds=1)),  # killed workers leave many outcomes unknown
    )
    def apply(self, call: Call, *, event: str) -> dict[str, Any]:
        """The effect. Nothing is sent once the deadline has passed."""
        left = call.remaining.total_seconds()
        if not left:
            raise TransientError("the deadline had passed before anything was sent")
        return asked(RECORDER, "apply", timeout=left, event=event, key=call.idempotency_key)

    @apply.reconcile
    def find(self, call: Call, *, event: str) -> Verdict:
        """Look whether it happened."""
        del event
        found = asked(RECORDER, "find", key=call.idempotency_key)["found"]
        return Applied({"receipt": call.idempotency_key}) if found else NotFound()


world = World()
shop = Workflow("shop", concurrency=64, on_uncertain="contain", version=int(os.environ.get("SHOP_VERSION", "1")))
orders = shop.topic("orders")
done = shop.topic("done")


@shop.consumer(subscribes=[orders], publishes=[done], failures=_PATIENT)
class Fulfil:
    """One order at a time."""

    def prepare(self, ctx: Any, state: Any) -> PrepareResult:
        """Take the oldest order."""
        del state
        ctx.world.gate(name="prepare")
        pending = ctx.peek(orders, limit=1)
        if not pending:
            return PrepareResult.nothing()
        approval = True if "needs_approval" in (pending[0].payload or {}) else None
        return PrepareResult(reserve=pending, data={"order": pending[0].message_id}, approval=approval)

    def mutate(self, ctx: Any, prepared: Any) -> Any:
        """Ask for the effect."""
        return ctx.world.apply(event=prepared.data["order"])

    def next(self, ctx: Any, prepared: Any, result: Any) -> None:
        """Say that it is done. The gate is the test's way to hold a worker here, not an example to follow."""
        asked(RECORDER, "gate", timeout=_PATIENCE, name="next")
        if result.applied:
            ctx.publish(done, message_id=prepared.data["order"], payload=result.value)


def obey(point: CrashPoint) -> None:
    """Do what the test ordered for this point."""
    order = asked(RECORDER, "at", point=point, pid=os.getpid())["order"]
    if order == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif order == "die":
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("SHOP_OBEYS"):
    crash_points.on_reach = obey
