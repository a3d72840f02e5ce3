"""The outside world as the tests see it: it remembers every effect, and misbehaves as the input says.

Effects are counted per input event, which is what must never happen twice. The world is not part of
the database: a crash of the worker does not undo what it did.

A world that honours keys does a request once per key, and keeps the refusal of a key as well. It may be asked too
early: then it misses what it has done.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import StrEnum


class Behaviour(StrEnum):
    """What the world does with one mutation."""

    APPLIES = "applies"
    REFUSES = "refuses"
    TIMES_OUT_AFTER_APPLYING = "times out after applying"
    TIMES_OUT_BEFORE_APPLYING = "times out before applying"


class RefusedError(Exception):
    """The world says no: nothing happened."""


class TimedOutError(Exception):
    """Nobody knows what happened."""


class World:
    """Does what it is told for an event, once; after that it applies."""

    def __init__(self, *, honours_keys: bool = False, misses: int = 0) -> None:
        self.honours_keys, self.misses = honours_keys, misses
        self.effects: Counter[int] = Counter()
        self.keys: set[str] = set()
        self.refused_keys: set[str] = set()
        self.calls = 0  #: requests and reconciles
        self._missed: Counter[str] = Counter()
        self._script: defaultdict[int, list[Behaviour]] = defaultdict(list)

    def will(self, event_id: int, *behaviours: Behaviour) -> None:
        self._script[event_id].extend(behaviours)

    def send(self, key: str, events: Sequence[int]) -> dict[str, str]:
        self.calls += 1
        if self.honours_keys and key in self.keys:
            return {"key": key}
        if self.honours_keys and key in self.refused_keys:
            raise RefusedError("422, as before")
        script = self._script[events[0]]
        behaviour = script.pop(0) if script else Behaviour.APPLIES
        if behaviour is Behaviour.REFUSES:
            self.refused_keys.add(key)
            raise RefusedError("422")
        if behaviour is not Behaviour.TIMES_OUT_BEFORE_APPLYING:
            self.effects.update(events)
            self.keys.add(key)
        if behaviour is not Behaviour.APPLIES:
            raise TimedOutError("read timed out")
        return {"key": key}

    def has(self, key: str) -> bool:
        """What a reconcile asks. The first answers about a key may be wrong."""
        self.calls += 1
        self._missed[key] += 1
        return key in self.keys and self._missed[key] > self.misses
