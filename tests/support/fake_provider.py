"""The outside world as the tests see it: it remembers every effect, and misbehaves as the input says.

Effects are counted per input event, which is what must never happen twice. The world is not part of
the database: a crash of the worker does not undo what it did.
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

    def __init__(self) -> None:
        self.effects: Counter[int] = Counter()
        self.keys: set[str] = set()
        self._script: defaultdict[int, list[Behaviour]] = defaultdict(list)

    def will(self, event_id: int, *behaviours: Behaviour) -> None:
        self._script[event_id].extend(behaviours)

    def send(self, key: str, events: Sequence[int]) -> dict[str, str]:
        script = self._script[events[0]]
        behaviour = script.pop(0) if script else Behaviour.APPLIES
        if behaviour is Behaviour.REFUSES:
            raise RefusedError("422")
        if behaviour is not Behaviour.TIMES_OUT_BEFORE_APPLYING:
            self.effects.update(events)
            self.keys.add(key)
        if behaviour is not Behaviour.APPLIES:
            raise TimedOutError("read timed out")
        return {"key": key}

    def has(self, key: str) -> bool:
        """What a reconcile asks."""
        return key in self.keys
