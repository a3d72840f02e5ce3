"""The policies of the consumer engine, with the names and units of its specification.

They are frozen data, checked when they are built, and the same after a trip through JSON. Durations
are seconds as floats. No default loops without a pause or retries without end.

`RetryPolicy` here is not the one of `pipeline.domain.policies`. That one spaces out mutations, with
jitter and always with a cap. This one follows the specification's formula exactly, has a timeout,
and writes "no cap" as 0. Its pauses are the same in every run.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from pipeline.consumer_engine.transactions import freeze, require_json_value, thaw
from pipeline.domain.policies import Policy


def _refuse_bool(value: Any) -> Any:
    """Refuse true and false, which Python would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number, got true or false")
    return value


_MAX_SECONDS = 10 * 365 * 86_400.0  #: ten years; the operating system refuses much longer waits
_Number = BeforeValidator(_refuse_bool)
Seconds = Annotated[float, _Number, Field(ge=0, le=_MAX_SECONDS, allow_inf_nan=False)]
#: 0 is refused: no work fits into it
Timeout = Annotated[float, _Number, Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False)]
Multiplier = Annotated[float, _Number, Field(ge=1, allow_inf_nan=False)]
Count = Annotated[int, _Number, Field(ge=1)]
Arguments = Annotated[
    Mapping[str, Any], AfterValidator(require_json_value), AfterValidator(freeze), PlainSerializer(thaw)
]


class EnginePolicy(Policy):
    """A policy whose errors do not show its input: the arguments of a source may be secret."""

    model_config = ConfigDict(hide_input_in_errors=True)


def delay(backoff: float, multiplier: float, cap: float, index: int) -> float:
    """Return pause ``index`` (from 0): ``backoff * multiplier ** index``, at most ``cap`` unless 0.

    A pause that no float can hold becomes the cap, or the longest pause that is allowed.
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
    """Attempts of one step: how many, how long each may take, and the pauses between."""

    max_attempts: Count = 1  #: the first one included
    timeout: Timeout | None = None  #: seconds for one attempt
    backoff: Seconds = 0.0  #: seconds before the second attempt
    backoff_multiplier: Multiplier = 2.0  #: factor from one pause to the next
    backoff_cap: Seconds = 0.0  #: the longest pause; 0 means no cap

    def pause(self, index: int) -> float:
        """Return the seconds to wait after failure ``index``, counted from 0."""
        return delay(self.backoff, self.backoff_multiplier, self.backoff_cap, index)


class ConcurrencyPolicy(EnginePolicy):
    """How many items are processed at once."""

    value: Count = 1  #: items at once, exactly
    min: Count = 1  #: a bound for a tool that chooses ``value``
    max: Count | None = None  #: a bound for a tool that chooses ``value``

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        _check_bounds("value", self.value, self.min, self.max)
        return self


class BatchPolicy(EnginePolicy):
    """How many items are fetched at once."""

    size: Count = 1  #: items in one fetch, at most
    min_size: Count = 1  #: a bound for a tool that chooses ``size``
    max_size: Count | None = None  #: a bound for a tool that chooses ``size``
    interval: Seconds = 0.0  #: reserved by the specification; nothing reads it

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        _check_bounds("size", self.size, self.min_size, self.max_size)
        return self


class EmptyQueuePolicy(EnginePolicy):
    """Pauses of a streaming loop after empty fetches. They grow until a fetch brings items."""

    backoff: Seconds = 1.0  #: seconds after the first empty fetch
    backoff_multiplier: Multiplier = 2.0  #: factor from one pause to the next
    backoff_cap: Seconds = 30.0  #: the longest pause; 0 means no cap
    interval: Seconds = 0.0  #: reserved by the specification; nothing reads it

    def pause(self, index: int) -> float:
        """Return the seconds to wait after empty fetch ``index`` in a row, counted from 0."""
        return delay(self.backoff, self.backoff_multiplier, self.backoff_cap, index)


class FetchPolicy(EnginePolicy):
    """How items are fetched."""

    retry: RetryPolicy = RetryPolicy()
    #: further arguments for the source; never printed
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
    """The four steps, each with its own attempts."""

    fetch: FetchPolicy = FetchPolicy()
    process: ProcessPolicy = ProcessPolicy()
    success: SuccessPolicy = SuccessPolicy()
    exception: ExceptionPolicy = ExceptionPolicy()


class ConsumerLoopPolicy(EnginePolicy):
    """When the loop fetches, how many items it processes at once, and when it ends."""

    batch: BatchPolicy = BatchPolicy()
    concurrency: ConcurrencyPolicy = ConcurrencyPolicy()
    timeout: Timeout | None = None  #: seconds for the whole loop
    limit: Annotated[int, _Number, Field(ge=0)] | None = None  #: items fetched before the loop ends; 0 fetches none
    transaction_timeout: Timeout | None = None  #: seconds for one item, from the moment a worker starts on it
    streaming: bool = False  #: whether the loop continues after an empty fetch
    empty_queue: EmptyQueuePolicy = EmptyQueuePolicy()


class ConsumerPolicy(EnginePolicy):
    """The whole policy of a consumer."""

    name: str | None = None
    loop: ConsumerLoopPolicy = ConsumerLoopPolicy()
    steps: ConsumerSteps = ConsumerSteps()
