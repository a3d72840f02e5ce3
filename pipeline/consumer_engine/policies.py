"""The policies of the consumer engine, under the names and in the units of its specification.

They are pure data: frozen, checked when they are built, and the same after a trip through JSON.
Durations are seconds as floats. A default never loops hot and never tries without end.

`RetryPolicy` here is not the one of `pipeline.domain.policies`: that one spaces out mutations, with
jitter and a cap that is always there; this one must follow the specification's formula exactly, has
a timeout, and writes "no cap" as 0. Its pauses must be the same in every run.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from pipeline.consumer_engine.transactions import freeze, require_json_value, thaw
from pipeline.domain.policies import Policy


def _refuse_bool(value: Any) -> Any:
    """Python takes true for 1; nobody who writes a policy means that."""
    if isinstance(value, bool):
        raise ValueError("expected a number, got true or false")
    return value


_MAX_SECONDS = 10 * 365 * 86_400.0  #: ten years: waits that are much longer are refused by the operating system
_Number = BeforeValidator(_refuse_bool)
Seconds = Annotated[float, _Number, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]
#: 0 is refused: nothing can be done in no time
Timeout = Annotated[float, _Number, Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False)]
Multiplier = Annotated[float, _Number, Field(ge=1, allow_inf_nan=False)]
Count = Annotated[int, _Number, Field(ge=1)]
Arguments = Annotated[
    Mapping[str, Any], AfterValidator(require_json_value), AfterValidator(freeze), PlainSerializer(thaw)
]


class EnginePolicy(Policy):
    """A policy whose errors do not show what was given: it may hold the arguments of a source, and those secrets."""

    model_config = ConfigDict(hide_input_in_errors=True)


def delay(backoff: float, multiplier: float, cap: float, index: int) -> float:
    """The pause number ``index``, counted from 0: ``backoff * multiplier ** index``, at most ``cap`` if that is not 0.

    No index is too large: what no float can hold is the cap, or the largest float.
    """
    try:
        pause = backoff * multiplier**index
    except OverflowError:
        pause = math.inf if backoff else 0.0
    return min(pause, cap) if cap > 0 else min(pause, _MAX_SECONDS)


def _check_bounds(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" + (f" and at most {most}" if most is not None else "")
        raise ValueError(f"{name} is {value}; expected {bounds}")


class RetryPolicy(EnginePolicy):
    """How often one step is attempted, how long each attempt may take, and the pauses between them."""

    max_attempts: Count = 1  #: the first one included
    timeout: Timeout | None = None  #: seconds for one attempt
    backoff: Seconds = 0.0  #: seconds before the second attempt
    backoff_multiplier: Multiplier = 2.0  #: how much longer each further pause is
    backoff_cap: Seconds = 0.0  #: the longest pause; 0 means that there is none

    def pause(self, index: int) -> float:
        """Seconds to wait after failure number ``index``, counted from 0."""
        return delay(self.backoff, self.backoff_multiplier, self.backoff_cap, index)


class ConcurrencyPolicy(EnginePolicy):
    """How many items are worked on at once."""

    value: Count = 1  #: items at once, exactly
    min: Count = 1  #: a bound for whoever chooses ``value``
    max: Count | None = None  #: a bound for whoever chooses ``value``

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        _check_bounds("value", self.value, self.min, self.max)
        return self


class BatchPolicy(EnginePolicy):
    """How many items are asked for at once."""

    size: Count = 1  #: items asked for in one fetch, at most
    min_size: Count = 1  #: a bound for whoever chooses ``size``
    max_size: Count | None = None  #: a bound for whoever chooses ``size``
    interval: Seconds = 0.0  #: reserved by the specification; nothing reads it

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        _check_bounds("size", self.size, self.min_size, self.max_size)
        return self


class EmptyQueuePolicy(EnginePolicy):
    """How long a streaming loop rests when a fetch brings nothing; the pauses grow until one brings something."""

    backoff: Seconds = 1.0  #: seconds after the first empty fetch
    backoff_multiplier: Multiplier = 2.0  #: how much longer each further pause is
    backoff_cap: Seconds = 30.0  #: the longest pause; 0 means that there is none
    interval: Seconds = 0.0  #: reserved by the specification; nothing reads it

    def pause(self, index: int) -> float:
        """Seconds to rest after empty fetch number ``index`` in a row, counted from 0."""
        return delay(self.backoff, self.backoff_multiplier, self.backoff_cap, index)


class FetchPolicy(EnginePolicy):
    """How items are fetched."""

    retry: RetryPolicy = RetryPolicy()
    #: further arguments for the source; never shown
    extra: Arguments = Field(default={}, validate_default=True, repr=False)


class ProcessPolicy(EnginePolicy):
    """How items are processed."""

    retry: RetryPolicy = RetryPolicy()


class SuccessPolicy(EnginePolicy):
    """How the success handler is called."""

    retry: RetryPolicy = RetryPolicy()


class ExceptionPolicy(EnginePolicy):
    """How the exception handler is called."""

    retry: RetryPolicy = RetryPolicy()


class ConsumerSteps(EnginePolicy):
    """The four steps, each with a budget of its own."""

    fetch: FetchPolicy = FetchPolicy()
    process: ProcessPolicy = ProcessPolicy()
    success: SuccessPolicy = SuccessPolicy()
    exception: ExceptionPolicy = ExceptionPolicy()


class ConsumerLoopPolicy(EnginePolicy):
    """When the loop fetches, how wide it works, and when it ends."""

    batch: BatchPolicy = BatchPolicy()
    concurrency: ConcurrencyPolicy = ConcurrencyPolicy()
    timeout: Timeout | None = None  #: seconds for the whole loop
    limit: Annotated[int, _Number, Field(ge=0)] | None = None  #: items taken before the loop ends; 0 takes none
    transaction_timeout: Timeout | None = None  #: seconds for one item, from the moment a worker starts on it
    streaming: bool = False  #: whether the loop goes on after an empty fetch
    empty_queue: EmptyQueuePolicy = EmptyQueuePolicy()


class ConsumerPolicy(EnginePolicy):
    """Everything that is decided for a consumer from outside."""

    name: str | None = None
    loop: ConsumerLoopPolicy = ConsumerLoopPolicy()
    steps: ConsumerSteps = ConsumerSteps()
