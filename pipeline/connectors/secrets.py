"""Find the credentials that an object holds: in attributes, in slots, in its class and in its settings.

Only models, data classes, plain namespaces and containers are searched, because reading them runs no foreign code. A
credential inside a client object is not found.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass
from types import MappingProxyType, MemberDescriptorType, SimpleNamespace
from typing import Any

from pydantic import BaseModel, Secret, SecretBytes, SecretStr


def secret_values(holder: object) -> list[str]:
    """Return every credential of an object as text, the longest first. One may be part of another."""
    seen = {id(holder)}
    found = {text for part in _parts(holder) for text in _secrets_in(part, seen)}
    return sorted(found - {""}, key=lambda text: (-len(text), text))


def _secrets_in(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield the credentials inside a value. Each object is visited once, since objects may refer to each other."""
    if isinstance(value, SecretStr | SecretBytes | Secret):
        secret = value.get_secret_value()
        yield secret.decode(errors="replace") if isinstance(secret, bytes) else str(secret)
    elif id(value) not in seen:
        seen.add(id(value))
        for part in _members(value):
            yield from _secrets_in(part, seen)


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict | MappingProxyType):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    is_settings = isinstance(value, BaseModel | SimpleNamespace) or is_dataclass(value)
    return _parts(value) if is_settings and not isinstance(value, type) else []


def _parts(holder: object) -> list[Any]:
    """Return the values of an object's own attributes, of its slots, and of its class."""
    parts = list(getattr(holder, "__dict__", {}).values())
    for kind in type(holder).__mro__:
        for name, value in list(vars(kind).items()):
            if isinstance(value, MemberDescriptorType):
                parts.append(getattr(holder, name, None))
            elif not name.startswith("__"):
                parts.append(value)
    return parts
