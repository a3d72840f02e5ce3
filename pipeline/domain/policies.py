"""How often, how long, how far apart. Values only: jitter and time are arguments.

Policies are stored beside the handler they belong to, so that a sweep can follow them without
having the workflow's code at hand.
"""

from datetime import timedelta
from itertools import pairwise
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Policy(BaseModel):
    """A frozen value that survives JSON unchanged and refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Backoff(Policy):
    """Growing pauses: ``base``, then ``multiplier`` times longer each time. No pause is longer than ``cap``."""

    base: timedelta = Field(default=timedelta(seconds=1), ge=timedelta(0))
    multiplier: float = Field(default=2.0, ge=1.0, le=100.0)
    cap: timedelta = Field(default=timedelta(minutes=10), ge=timedelta(0), le=timedelta(days=365))
    jitter: float = Field(default=0.2, ge=0.0, le=1.0)  #: up to this share is added

    @model_validator(mode="after")
    def _cap_covers_base(self) -> Self:
        if self.cap < self.base:
            raise ValueError(f"cap {self.cap} is below base {self.base}; expected cap >= base")
        return self

    def delay(self, attempt: int, *, jitter: float = 0.0) -> timedelta:
        """The pause after attempt number ``attempt`` (from 1), with ``jitter`` in [0, 1). The cap covers the jitter.

        Grown step by step and cut at the cap, so no attempt number is large enough to overflow.
        """
        pause = self.base
        for _ in range(attempt - 1):
            if pause >= self.cap or pause == timedelta(0):
                break
            pause = min(pause * self.multiplier, self.cap)
        return min(pause * (1.0 + self.jitter * jitter), self.cap)


class FailurePolicy(Policy):
    """How a handler's failed runs are followed up."""

    max_failures: int = Field(default=5, ge=1)  #: failures in a row before an operator is asked
    backoff: Backoff = Backoff()
    quarantine_after: int = Field(default=3, ge=1)  #: runs an event may fail before it is set aside


class MutationRetryPolicy(Policy):
    """How often one mutation is attempted when the outside system says that it did not happen this time."""

    max_attempts: int = Field(default=3, ge=1, le=100)
    backoff: Backoff = Backoff(base=timedelta(seconds=1), cap=timedelta(seconds=30))


class ReconcilePolicy(Policy):
    """How long the background reconciles before it escalates, and when it checks for late effects.

    A mutation may be resolved as not having happened: by an operator, or because it was not found. It is checked again
    after each span of ``monitor_after``, because an effect may be late.
    """

    max_attempts: int = Field(default=5, ge=1)
    backoff: Backoff = Backoff(base=timedelta(seconds=10), cap=timedelta(minutes=10))
    immediate_timeout: timedelta = Field(default=timedelta(seconds=30), gt=timedelta(0))
    monitor_after: tuple[timedelta, ...] = (timedelta(minutes=10), timedelta(hours=1), timedelta(hours=24))

    @model_validator(mode="after")
    def _monitor_after_grows(self) -> Self:
        if any(span <= before for before, span in pairwise((timedelta(0), *self.monitor_after))):
            raise ValueError(
                f"monitor_after {[str(span) for span in self.monitor_after]} does not grow; expected each span longer"
            )
        return self


class BreakerPolicy(Policy):
    """When an operation's outcomes are so often unknown that no new mutation of it is started."""

    unknown_share: float = Field(default=0.5, gt=0.0, le=1.0)  #: of the last calls, so many unknown
    min_unknown: int = Field(default=10, ge=1)  #: unknown calls; fewer prove nothing
    last_calls: int = Field(default=50, ge=1, le=1000)  #: calls that count
    window: timedelta = Field(default=timedelta(minutes=10), gt=timedelta(0))  #: and how far back
    probe_every: timedelta = Field(default=timedelta(seconds=30), gt=timedelta(0))


class WakePolicy(Policy):
    """How soon and how late a prepare may ask to be called again."""

    soonest: timedelta = Field(default=timedelta(seconds=30), ge=timedelta(0))
    latest: timedelta = Field(default=timedelta(hours=24), le=timedelta(days=365))

    @model_validator(mode="after")
    def _latest_covers_soonest(self) -> Self:
        if self.latest < self.soonest:
            raise ValueError(f"latest {self.latest} is below soonest {self.soonest}; expected latest >= soonest")
        return self


class Retention(Policy):
    """How long a workflow's past is kept. What has no limit is kept for ever.

    A message id is remembered as long as its event is kept: published again after that, it is a new event.
    """

    #: events that every consumer is done with, and finished runs that asked for no mutation
    done: timedelta | None = Field(default=None, ge=timedelta(hours=1))
    #: mutations with their runs, and acts of operators; at least as long as ``done``
    ledger: timedelta | None = Field(default=None, ge=timedelta(hours=1))
    archive: bool = False  #: what is no longer kept is moved to the table ``archive``, not dropped

    @model_validator(mode="after")
    def _ledger_covers_done(self) -> Self:
        if self.ledger is not None and (self.done is None or self.ledger < self.done):
            raise ValueError(f"ledger {self.ledger} is below done {self.done or 'for ever'}; expected ledger >= done")
        return self
