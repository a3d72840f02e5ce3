"""The few shapes that generated pages are made of."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)


def page(title: str, *parts: str) -> str:
    """A whole page that says it is generated; parts are separated by one empty line."""
    notice = "<!-- Written by `make docs` from the code. Edit the code, not this page. -->"
    return "\n\n".join((f"# {title}", notice, *(part.strip("\n") for part in parts))) + "\n"


def section(title: str, *parts: str) -> str:
    """A heading with what stands under it."""
    return "\n\n".join((f"## {title}", *parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold anything, a pipe is escaped."""
    first, *rest = [f"| {' | '.join(_cell(cell) for cell in line)} |" for line in (head, *rows)]
    return "\n".join((first, "|" + "---|" * len(head), *rest))


def diagram(moves: Mapping[State, frozenset[State]], births: Iterable[State]) -> str:
    """A state diagram: where things come into being, every move, and where nothing follows."""
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state.value or "none"}" as {state.name}' for state in moves]
    lines += [f"    [*] --> {state.name}" for state in moves if state in set(births)]
    for state, targets in moves.items():
        lines += [f"    {state.name} --> {target.name}" for target in moves if target in targets]
        lines += [f"    {state.name} --> [*]"] if not targets else []
    return "\n".join(("```mermaid", *lines, "```"))


def code(text: str) -> str:
    """Text as it is typed; nothing stays nothing."""
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
