"""Hide what must not be shown: parameters that an operation names, and fields that look like secrets or cards. Pure.

Every process that shows a request, a headline, an error, a payload or a result uses these rules. A field is hidden if
its operation redacts its name, or if the name looks like a secret and the operation does not declare it to be shown.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from pipeline.domain.codec import description, is_sealed

HIDDEN = "•••"

#: A name with one of these as a whole word is hidden, also in the plural: ``pin``, ``card_holder``, ``cvv2``.
_SECRET_WORDS = frozenset(
    [
        "auth",
        "bearer",
        "card",
        "ccv",
        "cookie",
        "cvc",
        "cvv",
        "iban",
        "jwt",
        "otp",
        "pan",
        "passcode",
        "pin",
        "pwd",
        "ssn",
        "totp",
    ]
)
#: A name with one of these inside a word is hidden: ``userpassword``, ``accessToken``.
_SECRET_PARTS = (
    "accesskey",
    "apikey",
    "authorisation",
    "authorization",
    "cardno",
    "cardnumber",
    "creditcard",
    "credential",
    "debitcard",
    "passphrase",
    "passwd",
    "password",
    "privatekey",
    "secret",
    "signingkey",
    "token",
)
#: A name with two such words after each other is hidden: ``api_key``.
_SECRET_PAIRS = frozenset(
    {
        ("access", "key"),
        ("account", "number"),
        ("api", "key"),
        ("private", "key"),
        ("security", "code"),
        ("signing", "key"),
        ("social", "security"),
        ("sort", "code"),
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
#: ``name=value`` and ``"name": value`` in a text, and the header that carries credentials.
_NAMED_VALUE = re.compile(
    r"""(?P<name>[\w-]+)(?P<sign>["']?\s*=\s*["']?|["']\s*:\s*["']?)(?P<value>[^\s"',;&)}\]]+)"""
    r"""|(?P<header>\b(?:proxy-)?authorization\b\s*:\s*)(?P<credentials>(?:[A-Za-z]+\s+)?[^\s"',;]+)""",
    re.IGNORECASE,
)
_SHORT = 3  #: values up to this length are part of ordinary text


@lru_cache(maxsize=10_000)
def is_secret_name(name: str) -> bool:
    """Return whether the name of a field looks like a secret or the number of a card."""
    words = [word.lower() for word in _WORD.findall(name)]
    if any(word in _SECRET_WORDS or word.removesuffix("s") in _SECRET_WORDS for word in words):
        return True
    if any(part in word for word in words for part in _SECRET_PARTS):
        return True
    return any((first, second.removesuffix("s")) in _SECRET_PAIRS for first, second in pairwise(words))


@dataclass(frozen=True, slots=True, kw_only=True)
class Redaction:
    """Which names are hidden, at any depth of a value."""

    hidden: frozenset[str] = frozenset()  #: names that the operation redacts
    shown: frozenset[str] = frozenset()  #: names that look like secrets and may be shown

    def hides(self, name: str) -> bool:
        """Return whether the value under this name is hidden."""
        return name in self.hidden or (name not in self.shown and is_secret_name(name))

    def field(self, name: str, value: Any) -> Any:
        """Return the value of a field as it may be shown."""
        return HIDDEN if self.hides(name) else self.value(value)

    def value(self, value: Any) -> Any:
        """Return a value with every hidden field inside it replaced. One that stayed encrypted is described."""
        if is_sealed(value):
            return description(value)
        if isinstance(value, Mapping):
            return {name: self.field(str(name), inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def text(self, text: str, params: Any = None) -> str:
        """Return the text without the hidden values of the parameters, and without ``name=value`` of hidden names."""
        for secret in sorted(set(self.hidden_texts(params)), key=len, reverse=True):
            if len(secret) > _SHORT:
                text = text.replace(secret, HIDDEN)
        return _NAMED_VALUE.sub(self._redacted_match, text)

    def _redacted_match(self, found: re.Match[str]) -> str:
        if found["header"]:
            return f"{found['header']}{HIDDEN}"
        return f"{found['name']}{found['sign']}{HIDDEN}" if self.hides(found["name"]) else found[0]

    def hidden_texts(self, value: Any) -> Iterator[str]:
        """Yield the texts and numbers of hidden fields, at any depth."""
        if isinstance(value, Mapping):
            for name, inner in value.items():
                yield from leaf_texts(inner) if self.hides(str(name)) else self.hidden_texts(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                yield from self.hidden_texts(inner)


#: For values that belong to no operation.
BY_NAME = Redaction()


def leaf_texts(value: Any) -> Iterator[str]:
    """Yield every text and number inside a value, as text. Empty text is left out."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaf_texts(item)
    elif value not in (None, "") and not isinstance(value, bool):
        yield str(value)
