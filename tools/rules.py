"""The numbered rules of docs/design/rules.md and the tests that carry their ids.

Both are read without running anything: the page as text, the tests as syntax trees.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path("docs/design/rules.md")
_ID = r"[LXREQ]-[A-Z]?\d+"
_PROVED = re.compile(rf"^- ({_ID}): (.+) \(`([^`]+)`: ?(.*)\)$")
_SAME = re.compile(rf"^- ({_ID}): as ((?:{_ID}(?:, )?)+)(?:\. .+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the page: with a module, or the rules that are proved in this one's place."""

    id: str
    sentence: str = ""
    module: str = ""  #: below pipeline/
    same_as: tuple[str, ...] = ()


def rules(page: str) -> list[Rule]:
    """Every rule of the page, in its order."""
    found = (_rule(line) for line in page.splitlines())
    return [rule for rule in found if rule]


def _rule(line: str) -> Rule | None:
    if same := _SAME.match(line):
        return Rule(id=same[1], same_as=tuple(re.findall(_ID, same[2])))
    if proved := _PROVED.match(line):
        return Rule(id=proved[1], sentence=proved[2], module=proved[3])
    return None


def tests_by_rule(tests: Path) -> dict[str, list[str]]:
    """For each id the test files that carry it, relative to the folder of the tests."""
    found: dict[str, set[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for id_ in _ids(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(id_, set()).add(path.relative_to(tests).as_posix())
    return {id_: sorted(files) for id_, files in found.items()}


def fill_in_tests(page: str, carried: Mapping[str, Sequence[str]]) -> str:
    """The page with the tests of each rule, from the marks."""
    return "\n".join(_fill_in_line(line, carried) for line in page.splitlines()) + "\n"


def _fill_in_line(line: str, carried: Mapping[str, Sequence[str]]) -> str:
    rule = _PROVED.match(line)
    if rule is None:
        return line
    files = ", ".join(f"`{file}`" for file in carried.get(rule[1], ()))
    return f"- {rule[1]}: {rule[2]} (`{rule[3]}`: {files})"


def _ids(tree: ast.AST) -> Iterator[str]:
    """Ids in ``rule(...)``, wherever it stands: a decorator, a module's ``pytestmark``, a parameter's marks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "rule":
            for argument in node.args:
                yield from _literals(argument)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _literals(argument: ast.expr) -> Iterator[str]:
    if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
        raise ValueError(f"line {argument.lineno}: expected rule ids as literal text, so that they can be found")
    yield argument.value
