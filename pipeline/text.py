"""Show text from outside: hidden characters escaped, on one line, at a bounded length. Parse ids in it."""

import unicodedata

#: Unicode's control, format (bidi and zero width), private, surrogate and unassigned characters, and line separators.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"})


def visible_text(text: str, keep: str = "") -> str:
    """Return the text with every character escaped that an operator would not see, or that reorders others.

    Text from outside could otherwise move a cursor, fake a line, or show another amount than the stored one.
    """
    if text.isprintable():
        return text
    return "".join(char if char in keep or not _is_hidden(char) else ascii(char)[1:-1] for char in text)


def printable_text(text: str, limit: int = 300) -> str:
    """Return at most ``limit`` characters of the text, with hidden ones escaped."""
    return visible_text(text if len(text) <= limit else f"{text[:limit]}…")


def single_line(text: object, limit: int = 200) -> str:
    """Return at most ``limit`` characters of the text; line breaks and hidden characters become one space."""
    whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return " ".join("".join(" " if _is_hidden(char) else char for char in whole).split())[:limit]


def parse_id(text: str) -> int | None:
    """Return the number that a text of decimal digits is; None if it is not one that Postgres takes as an id.

    Python refuses to convert more than 4,300 digits, with an error of its own.
    """
    return number if text.isdecimal() and len(text) < 100 and (number := int(text)) < 2**63 else None


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN_CATEGORIES
