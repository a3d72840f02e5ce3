"""How a worker runs phases: limits and sizes, as one value handed down from the settings."""

from datetime import timedelta

from pydantic import Field

from pipeline.domain.limits import DEFAULT_LIMITS, Limits
from pipeline.domain.policies import Policy


class RuntimePolicy(Policy):
    """Bounds of one worker process."""

    lease: timedelta = timedelta(seconds=60)
    step_limit: timedelta = timedelta(seconds=30)  #: one call of one handler
    cohort_budget: timedelta = timedelta(seconds=30)  #: after this a cohort gives the rest of its runs back
    mutation_budget: timedelta = timedelta(seconds=60)  #: after this a cohort puts nothing more in the air
    mutation_concurrency: int = Field(default=50, ge=1, le=1000)
    straggler_wait: timedelta = timedelta(seconds=1)  #: how long finished runs wait for slow calls of their cohort
    limits: Limits = DEFAULT_LIMITS
