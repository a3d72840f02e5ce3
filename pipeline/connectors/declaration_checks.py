"""Describe what is wrong with the declaration of an operation. Empty text means nothing is.

These checks run where the operation is declared. Found later by a worker, the same mistake would crash a run or leave
an unknown outcome to an operator.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from decimal import Decimal
from string import Formatter
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pipeline.domain.operations import KEY_FIELD, template_fields
from pipeline.domain.policies import BreakerPolicy, MutationRetryPolicy, ReconcilePolicy
from pipeline.domain.redaction import Redaction

_LINK = re.compile(r"https?://[^\s/?#@{}]+(?:[/?#]\S*)?")
_KINDS: dict[str, type] = {
    "timeout": timedelta,
    "settle": timedelta,
    "policy": ReconcilePolicy,
    "retry": MutationRetryPolicy,
    "breaker": BreakerPolicy,
    "shows": str,
    "look_up": str,
    "value": str,
}


def option_problem(option: Callable[[str], Any]) -> str:
    """Describe the first option that has a wrong type or value."""
    for name, kind in _KINDS.items():
        if not isinstance(option(name), kind):
            return f"has {name} {option(name)!r}; expected a {kind.__name__}"
    if option("timeout") <= timedelta(0):
        return f"has timeout {option('timeout')}; expected a positive span"
    if option("settle") < timedelta(0):
        return f"has settle {option('settle')}; expected no negative span"
    lifetime = option("key_lifetime")
    if lifetime is not None and not (isinstance(lifetime, timedelta) and lifetime > timedelta(0)):
        return f"has key_lifetime {lifetime!r}; expected a positive timedelta, or None"
    if lifetime is not None and not option("keyed"):
        return "has key_lifetime without keyed=True; expected both, or neither"
    return ""


def shows_problem(shows: str, names: Collection[str], *, takes_anything: bool) -> str:
    """Describe why ``shows`` could not be formatted. All values are text at that point."""
    try:
        fields = [field for _, field, _, _ in Formatter().parse(shows) if field is not None]
    except ValueError as error:
        return f"shows {shows!r}: {error}"
    wrong = [name for name in fields if not (name in names or (takes_anything and name.isidentifier()))]
    if wrong:
        return f"shows {shows!r}: it does not take {wrong[0]!r}; expected one of: {', '.join(names) or 'none'}"
    try:
        shows.format_map(dict.fromkeys(fields, "text"))
    except (ValueError, LookupError) as error:
        return f"shows {shows!r}: {error}; expected formats for text, which is what every value is shown as"
    return ""


def look_up_problem(look_up: str, names: Collection[str], redaction: Redaction, *, takes_anything: bool) -> str:
    """Describe why ``look_up`` is no link that can be filled with the key and parameters."""
    if not look_up:
        return ""
    problem = _link_problem(look_up)
    if problem:
        return f"has look_up {look_up!r}: {problem}"
    for name in set(template_fields(look_up)) - {KEY_FIELD}:
        if not (name in names or (takes_anything and name.isidentifier())):
            known = ", ".join((KEY_FIELD, *names))
            return f"has look_up {look_up!r}: it does not take {name!r}; expected one of: {known}"
        if redaction.hides(name):
            return f"has look_up {look_up!r}: {name!r} is hidden; expected a parameter that may be shown"
    return ""


def _link_problem(look_up: str) -> str:
    try:
        has_formats = any(spec or conversion for _, _, spec, conversion in Formatter().parse(look_up))
    except ValueError as error:
        return str(error)
    if has_formats:
        return "expected names in braces without formats"
    if not _LINK.fullmatch(look_up):
        return "expected a link with https:// or http://, a fixed host without a user, and no blanks"
    return ""


def value_problem(value: str, above: Any, hints: Mapping[str, Any], names: Collection[str]) -> str:
    """Describe why ``value`` and ``four_eyes_above`` do not say when two people must decide."""
    if not value and above is None:
        return ""
    if not value or above is None:
        return "has value without four_eyes_above, or the reverse; expected both, or neither"
    parameter, _, inside = value.partition(".")
    if parameter not in names:
        return f"has value {value!r}, which it does not take; expected one of: {', '.join(names) or 'none'}"
    if isinstance(above, bool) or not isinstance(above, int | Decimal) or not Decimal(above).is_finite():
        return f"has four_eyes_above {above!r}; expected an int or a Decimal"
    if not inside and not _is_number(hints.get(value, Any)):
        return f"has value {value!r}, which is no number; expected a parameter of type int, float or Decimal"
    return ""


def _is_number(kind: Any) -> bool:
    """Return whether an annotation stands for a number, or says nothing."""
    if get_origin(kind) is Annotated:
        return _is_number(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return all(inner is NoneType or _is_number(inner) for inner in get_args(kind))
    is_numeric = isinstance(kind, type) and issubclass(kind, int | float | Decimal) and not issubclass(kind, bool)
    return kind is Any or is_numeric


def reconcile_problem(function: Callable[..., Any], names: Collection[str]) -> str:
    """Describe why a reconcile method cannot take the parameters of its mutation."""
    return _binding_problem(function, names, "be reconciled by")


def fetch_problem(function: Callable[..., Any]) -> str:
    """Describe why a fetch method cannot take the outside system's id."""
    return _binding_problem(function, ["external_id"], "fetch its result by")


def _binding_problem(function: Callable[..., Any], names: Collection[str], purpose: str) -> str:
    given: Mapping[str, None] = dict.fromkeys(names)
    try:
        inspect.signature(function).bind(None, None, **given)
    except TypeError as error:
        takes = ", ".join(("self", "call", *names))
        return f"cannot {purpose} {_function_name(function)}: {error}; expected it to take {takes}"
    except ValueError:
        return ""  # a function written in C may have no signature
    return ""


def overriding_method(cls: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of this class that overrides the given one, or the given one itself."""
    name = _function_name(function)
    is_method = any(vars(base).get(name) is function for base in cls.__mro__)
    found = inspect.getattr_static(cls, name, None) if is_method else None
    return found if inspect.isfunction(found) else function


def _function_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
