"""Describe what is wrong with the declaration of an operation. Empty text means nothing is.

These checks run where the operation is declared. Found later by a worker, the same mistake would crash a run or leave
an unknown outcome to an operator.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from string import Formatter
from typing import Any

from pipeline.domain.policies import BreakerPolicy, MutationRetryPolicy, ReconcilePolicy

_KINDS: dict[str, type] = {
    "timeout": timedelta,
    "settle": timedelta,
    "policy": ReconcilePolicy,
    "retry": MutationRetryPolicy,
    "breaker": BreakerPolicy,
    "shows": str,
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
