"""Kinds of handlers for the tests with real processes: a producer, and consumers that wait, set aside and leak.

Every effect goes to the recorder of the shop. The producer publishes as many ticks as its environment says.
"""

import os
from datetime import timedelta
from typing import Any

from pipeline import Backoff, FailurePolicy, LogicError, Workflow
from tests.support.order_workflow import world

__all__ = ["world"]

TICKS = int(os.environ.get("WORKS_TICKS", "0"))
SLOT = timedelta(milliseconds=500)  #: a producer runs once in each
_SOON = Backoff(base=timedelta(milliseconds=200), cap=timedelta(milliseconds=500))
_PATIENT = FailurePolicy(max_failures=50, backoff=_SOON)
_STRICT = FailurePolicy(quarantine_after=2, backoff=_SOON)
_LEAKED: list[bytes] = []

works = Workflow("works", concurrency=16, on_uncertain="contain", on_logic_error="quarantine")
ticks = works.topic("ticks")
letters = works.topic("letters")
parcels = works.topic("parcels")
crates = works.topic("crates")


@works.producer(every=SLOT, publishes=[ticks], failures=_PATIENT)
def tick(ctx: Any, state: Any) -> Any:
    """One event a slot, numbered by the state and with the time at which it was made."""
    number = (state or 0) + 1
    if number > TICKS:
        return state
    ctx.publish(ticks, message_id=f"tick {number}", payload={"at": ctx.now.isoformat()})
    return number


@works.effect(ticks, failures=_PATIENT)
def tock(ctx: Any, event: Any) -> Any:
    """The effect of a tick."""
    return ctx.world.apply(event=event.message_id)


@works.effect(letters, failures=_PATIENT, requires_approval=True)
def post(ctx: Any, event: Any) -> Any:
    """An effect that a person must allow."""
    return ctx.world.apply(event=event.message_id)


@works.effect(parcels, failures=_STRICT)
def pack(ctx: Any, event: Any) -> Any:
    """An effect, unless the parcel is broken."""
    if event.payload["broken"]:
        raise LogicError(f"{event.message_id} cannot be packed")
    return ctx.world.apply(event=event.message_id)


@works.effect(crates, failures=_PATIENT)
def stack(ctx: Any, event: Any) -> Any:
    """An effect that costs its process memory for ever."""
    _LEAKED.append(os.urandom(1 << 20) * 16)
    return ctx.world.apply(event=event.message_id)
