"""What the ``#:`` comments beside members and fields say, so that a meaning is written once, in the code."""

import ast
import inspect
import io
import tokenize
from enum import StrEnum
from pathlib import Path


def meanings(members: type[StrEnum]) -> dict[str, str]:
    """The comment on the line of each member, by the member's value; empty where there is none."""
    source = Path(inspect.getfile(members)).read_text(encoding="utf-8")
    said = line_comments(source)
    (body,) = (
        node.body
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == members.__name__
    )
    lines = {
        target.id: node.end_lineno or node.lineno
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return {member.value: said.get(lines[member.name], "") for member in members}


def line_comments(source: str) -> dict[int, str]:
    """The ``#:`` comments of a module, by their lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.removeprefix("#:").strip()
        for token in tokens
        if token.type == tokenize.COMMENT and token.string.startswith("#:")
    }
