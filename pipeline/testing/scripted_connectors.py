"""Connectors for tests: each call follows a script, and the connector remembers what really happened.

``scripted("mail", mutations=["send"])`` makes a connector. Each call follows the next line of its script, and applies
when the script is empty. The connector remembers effects by idempotency key, whatever the caller learned about them. A
reconcile reads that memory, as an outside system would.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from pipeline.connectors.sdk import Call, Connector, Operation
from pipeline.domain.errors import AuthError, LogicError, TransientError
from pipeline.domain.policies import MutationRetryPolicy
from pipeline.domain.reconciliation import Applied, NotFound, Retry, Verdict

Predicate = Callable[[dict[str, Any]], bool]


class Does(StrEnum):
    """What the outside system does with one call of a mutation."""

    APPLIES = "applies"
    REFUSES = "refuses"  #: definitely not applied, and never will be: LogicError
    FAILS = "fails"  #: definitely not applied this time: TransientError
    DENIES = "denies"  #: definitely not applied, an operator must act: AuthError
    TIMES_OUT_AFTER = "times out after applying"
    TIMES_OUT_BEFORE = "times out before applying"
    CRASHES = "crashes"  #: the connector ends with SystemExit after applying
    HANGS = "hangs after applying"  #: returns only after its deadline


_APPLYING = {Does.APPLIES, Does.TIMES_OUT_AFTER, Does.CRASHES, Does.HANGS}
_ERRORS: Mapping[Does, Callable[[], BaseException]] = {
    Does.REFUSES: lambda: LogicError("the script says: refused"),
    Does.FAILS: lambda: TransientError("the script says: not now"),
    Does.DENIES: lambda: AuthError("the script says: not allowed"),
    Does.TIMES_OUT_AFTER: lambda: TimeoutError("the script says: timed out after applying"),
    Does.TIMES_OUT_BEFORE: lambda: TimeoutError("the script says: timed out before applying"),
    Does.CRASHES: lambda: SystemExit("the script says: crash"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEffect:
    """An effect that really happened in the outside system."""

    operation: str
    key: str
    params: dict[str, Any]


@dataclass(slots=True)
class _ScriptLine:
    """What the next calls that match do."""

    operation: str | None
    when: Predicate
    remaining: deque[Does]


class Scripted(Connector):
    """A connector that follows a script. ``scripted`` makes it."""

    def __init__(self, make_result: Callable[[RecordedEffect], Any]) -> None:
        self.make_result = make_result
        self.effects: list[RecordedEffect] = []
        self.calls: list[RecordedEffect] = []  #: every call of a mutation, whether it applied or not
        self.reconciled_keys: list[str] = []  #: the keys of every reconcile
        self._lines: list[_ScriptLine] = []
        self._undecided = 0
        self._lock = threading.Lock()
        self._never = threading.Event()

    def will(self, *does: Does, operation: str | None = None, when: Predicate | None = None) -> None:
        """Let the next matching calls do this, one after the other. ``when`` reads the parameters."""
        with self._lock:
            self._lines.append(_ScriptLine(operation, when or (lambda _: True), deque(does)))

    def cannot_tell(self, times: int = 1) -> None:
        """Let the next reconciles return ``Retry``."""
        self._undecided += times

    def times(self, **params: Any) -> int:
        """Return how often an effect with at least these parameters really happened."""
        with self._lock:
            return sum(params.items() <= effect.params.items() for effect in self.effects)

    def _act(self, operation: str, call: Call, params: dict[str, Any]) -> Any:
        effect = RecordedEffect(operation=operation, key=call.idempotency_key, params=params)
        with self._lock:
            does = self._next(operation, params)
            self.calls.append(effect)
            if does in _APPLYING:
                self.effects.append(effect)
        if does is Does.HANGS:
            self._never.wait(call.remaining.total_seconds() + 0.2)
        if does in _ERRORS:
            raise _ERRORS[does]()
        return self.make_result(effect)

    def _next(self, operation: str, params: dict[str, Any]) -> Does:
        for line in self._lines:
            if line.remaining and line.operation in (None, operation) and line.when(params):
                return line.remaining.popleft()
        return Does.APPLIES

    def _reconcile(self, operation: str, call: Call) -> Verdict:
        with self._lock:
            self.reconciled_keys.append(call.idempotency_key)
            if self._undecided:
                self._undecided -= 1
                return Retry("the script says: cannot tell yet")
            known = {(effect.operation, effect.key): effect for effect in self.effects}
        found = known.get((operation, call.idempotency_key))
        return Applied(self.make_result(found)) if found else NotFound()


def scripted(
    name: str,
    *,
    mutations: Iterable[str] = ("send",),
    reads: Mapping[str, Callable[..., Any]] | None = None,
    make_result: Callable[[RecordedEffect], Any] | None = None,
    can_reconcile: bool = True,
    timeout: timedelta = timedelta(seconds=5),
    **bounds: Any,
) -> Scripted:
    """Make a connector whose mutations follow a script and whose reads call these functions.

    ``make_result`` makes the result of an effect. ``bounds`` are options of ``pipeline.mutation``, such as ``settle``
    and ``policy``. A call that fails is not attempted again inside its run, unless ``retry`` allows it.
    """
    bounds.setdefault("retry", MutationRetryPolicy(max_attempts=1))
    operations: dict[str, Any] = {read: _read(function) for read, function in (reads or {}).items()}
    for mutation in mutations:
        operation = Operation(function=_sender(mutation), is_mutation=True, timeout=timeout, **bounds)
        operation.reconcile_function = _reconciler(mutation) if can_reconcile else None
        operations[mutation] = operation
    kind = type(f"Scripted_{name}", (Scripted,), {"name": name, **operations})
    made: Scripted = kind(make_result or (lambda effect: {"id": effect.key}))
    return made


def _read(function: Callable[..., Any]) -> Operation[Any]:
    def read(_: Scripted, **params: Any) -> Any:
        return function(**params)

    return Operation(function=read, is_mutation=False)


def _sender(name: str) -> Callable[..., Any]:
    def send(self: Scripted, call: Call, **params: Any) -> Any:
        return self._act(name, call, params)

    return send


def _reconciler(name: str) -> Callable[..., Any]:
    def reconcile(self: Scripted, call: Call, **_: Any) -> Verdict:
        return self._reconcile(name, call)

    return reconcile
