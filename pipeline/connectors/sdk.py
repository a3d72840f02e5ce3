"""How an outside system is described: reads, mutations, and how to find out what became of one.

A connector is a class with a name; its operations are methods marked ``read`` or ``mutation``. A
mutation gets a ``Call`` with an idempotency key and a deadline. Raising ``LogicError``,
``TransientError`` or ``AuthError`` from it says that it definitely did not happen; any other
exception leaves the outcome unknown.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Generic, Self, TypeVar

from pipeline.domain.policies import ReconcilePolicy

F = TypeVar("F", bound=Callable[..., Any])
L = TypeVar("L", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One attempt at a mutation, as its connector sees it."""

    idempotency_key: str
    ends_at: float  #: on this process's monotonic clock

    @classmethod
    def within(cls, idempotency_key: str, limit: timedelta) -> Self:
        """A call that may take so long from now."""
        return cls(idempotency_key=idempotency_key, ends_at=time.monotonic() + limit.total_seconds())

    @property
    def remaining(self) -> timedelta:
        """How long the connector may still take. Nothing may be sent once it is zero."""
        return timedelta(seconds=max(0.0, self.ends_at - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Applied:
    """Verdict: it happened, with this result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class NotFound:
    """Verdict: it was looked for and is not there."""

    reason: str = "not found"


@dataclass(frozen=True, slots=True)
class Retry:
    """Verdict: cannot tell yet; ask again."""

    reason: str = ""


Verdict = Applied | NotFound | Retry


@dataclass(slots=True)
class Operation(Generic[F]):
    """A marked method of a connector."""

    function: F
    is_mutation: bool
    timeout: timedelta = timedelta(seconds=30)
    settle: timedelta = timedelta(0)
    policy: ReconcilePolicy = field(default_factory=ReconcilePolicy)
    look: Callable[..., Any] | None = None
    name: str = ""
    signature: inspect.Signature = field(init=False)

    def __post_init__(self) -> None:
        self.signature = inspect.signature(self.function)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def reconcile(self, look: L) -> L:
        """Mark the method that finds out what became of this mutation."""
        self.look = look
        return look

    @property
    def can_reconcile(self) -> bool:
        return self.look is not None

    @property
    def parameters(self) -> tuple[str, ...]:
        """What the operation takes, besides the connector and the call."""
        return tuple(self.signature.parameters)[2 if self.is_mutation else 1 :]

    def check(self, params: dict[str, Any]) -> None:
        """Refuse parameters the operation does not take, before anything is written."""
        leading = [None, None] if self.is_mutation else [None]
        self.signature.bind(*leading, **params)


def read(function: F) -> Operation[F]:
    """Mark a method that only looks."""
    return Operation(function=function, is_mutation=False)


def mutation(
    *,
    timeout: timedelta = timedelta(seconds=30),
    settle: timedelta = timedelta(0),
    policy: ReconcilePolicy | None = None,
) -> Callable[[F], Operation[F]]:
    """Mark a method that changes the outside world.

    ``timeout`` bounds one call; ``settle`` is how long a change may take to become visible, during
    which not finding it proves nothing.
    """

    def mark(function: F) -> Operation[F]:
        return Operation(
            function=function, is_mutation=True, timeout=timeout, settle=settle, policy=policy or ReconcilePolicy()
        )

    return mark


class Connector:
    """An adapter to one outside system. Subclasses name themselves and mark their operations."""

    name: ClassVar[str] = ""
    _operations: ClassVar[dict[str, Operation[Any]]]

    @classmethod
    def operations(cls) -> dict[str, Operation[Any]]:
        """Every marked method by its name, looked up once per class."""
        known = cls.__dict__.get("_operations")
        if known is None:
            found = (inspect.getattr_static(cls, name) for name in dir(cls))
            known = {operation.name: operation for operation in found if isinstance(operation, Operation)}
            cls._operations = known
        return known
