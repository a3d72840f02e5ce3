"""Text from outside as a message or a log may repeat it: bounded, and on one line."""


def printable_text(text: str, limit: int = 300) -> str:
    """The text with at most ``limit`` characters. Characters that are not printable are escaped."""
    short = text if len(text) <= limit else f"{text[:limit]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def single_line(text: object, limit: int = 200) -> str:
    """The text with at most ``limit`` characters. Line breaks and what else is not printable become one space."""
    whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return " ".join("".join(char if char.isprintable() else " " for char in whole).split())[:limit]
