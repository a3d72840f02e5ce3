"""The item that the engine processes, read-only at every depth.

It is the same after a trip through JSON if payload and metadata are JSON. The engine does not
require that: a payload is opaque to it, and may be any object of a source in this process.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, PlainSerializer, StringConstraints


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    plain = "dict" if isinstance(self, dict) else "list"
    raise TypeError(f"this {plain} is read-only; change a copy instead: {plain}(it)")


class FrozenDict(dict[Any, Any]):
    """A read-only dict. ``json.dumps``, ``==`` and ``isinstance`` treat it like any other."""

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenDict":
        return self


class FrozenList(list[Any]):
    """A read-only list. ``json.dumps``, ``==`` and ``isinstance`` treat it like any other."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenList, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenList":
        return self


_FROZEN = frozenset({str, int, float, bool, type(None), FrozenDict, FrozenList})


def freeze(value: Any) -> Any:
    """Return the value with read-only dicts, lists and sets at every depth.

    Objects of other types are kept as they are.
    """
    kind = type(value)
    if kind in _FROZEN:
        return value
    if kind is dict or isinstance(value, Mapping):
        return FrozenDict({key: freeze(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return FrozenList([freeze(inner) for inner in value])
    if kind is tuple:
        return tuple(freeze(inner) for inner in value)
    return frozenset(value) if isinstance(value, set) else value


def thaw(value: Any) -> Any:
    """Return the value with plain dicts and lists, for serialization."""
    if isinstance(value, Mapping):
        return {key: thaw(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [thaw(inner) for inner in value]
    return tuple(thaw(inner) for inner in value) if type(value) is tuple else value


def require_json_value(value: Any, path: str = "it") -> Any:
    """Return the value if JSON keeps it; else raise a ``ValueError``.

    The error names the place, not the value.
    """
    kind = type(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is not str:
                raise ValueError(f"{path} has a key of type {type(key).__name__}; expected text, which JSON keeps")
            require_json_value(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            require_json_value(inner, f"{path}[{number}]")
    elif not (value is None or kind in (bool, int) or _is_json_scalar(value)):
        found = (
            f"something of type {kind.__name__}"
            if kind not in (str, float)
            else f"a {kind.__name__} that JSON cannot hold"
        )
        raise ValueError(f"{path} is {found}; expected text, a number, true, false, null, a list or a table")
    return value


def _is_json_scalar(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    try:
        return type(value) is str and value.encode() is not None  # a lone surrogate cannot be encoded
    except UnicodeEncodeError:
        return False


TransactionId = Annotated[str, StringConstraints(strip_whitespace=False, min_length=1, max_length=1024, pattern=r"\S")]


class Transaction(BaseModel):
    """One item, with an id that is unique and the same in every delivery.

    A transform makes a new transaction with its own id and names the old one in ``parent_id``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    transaction_id: TransactionId
    payload: Annotated[Any, AfterValidator(freeze), PlainSerializer(thaw)] = None  #: opaque to the engine
    created_at: Annotated[AwareDatetime, AfterValidator(lambda at: at.astimezone(UTC))]
    source: str | None = None  #: where it comes from
    correlation_id: str | None = None  #: what it belongs to
    parent_id: str | None = None  #: the transaction it was made from
    traceparent: str | None = None  #: the trace that made it, as W3C traceparent
    metadata: Annotated[Mapping[str, Any], AfterValidator(freeze), PlainSerializer(thaw)] = freeze({})

    @classmethod
    def of_entry(
        cls,
        transaction_id: str,
        payload: Mapping[str, Any],
        created_at: datetime,
        *,
        source: str,
        traceparent: str | None,
        metadata: FrozenDict,
    ) -> "Transaction":
        """Build an item from parts that are known to fit: JSON, and a time in UTC. Nothing is checked."""
        if not _FROZEN.issuperset(map(type, payload.values())):
            payload = {key: inner if type(inner) in _FROZEN else freeze(inner) for key, inner in payload.items()}
        known = {
            "transaction_id": transaction_id,
            "payload": FrozenDict(payload),
            "created_at": created_at,
            "source": source,
            "correlation_id": None,
            "parent_id": None,
            "traceparent": traceparent,
            "metadata": metadata,
        }
        made = cls.__new__(cls)
        object.__setattr__(made, "__dict__", known)
        object.__setattr__(made, "__pydantic_fields_set__", _ALL_FIELDS)
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made

    def __repr__(self) -> str:
        """Show the id only: a payload does not belong in logs."""
        return f"Transaction({self.transaction_id!r})"

    __str__ = __repr__


_ALL_FIELDS = set(Transaction.model_fields)  #: of items that `of_entry` built; a copy of an item copies it
