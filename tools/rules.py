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
_ROW = re.compile(rf"^\| ({_ID}) \| (.+?) \| (\S+) \| (.+?) \| ?(.*?) ?\|$")
_LIST = "## Being built"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the page."""

    id: str
    sentence: str
    module: str
    state: str  #: built, building, "planned: subject" or "as ids"

    @property
    def same_as(self) -> tuple[str, ...]:
        """The rules that are proved in this one's place."""
        return tuple(re.findall(_ID, self.state)) if self.state.startswith("as ") else ()


def rules(page: str) -> list[Rule]:
    """Every rule of the page, in its order."""
    rows = (_ROW.match(line) for line in page.splitlines())
    return [Rule(id=row[1], sentence=row[2], module=row[3], state=row[4]) for row in rows if row]


def unproved_rules(page: str) -> set[str]:
    """The ids that may still be without a test."""
    _, _, rest = page.partition(_LIST)
    return set(re.findall(_ID, rest.partition("\n## ")[0]))


def tests_by_rule(tests: Path) -> dict[str, list[str]]:
    """For each id the test files that carry it, relative to the folder of the tests."""
    found: dict[str, set[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        for id_ in _ids(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(id_, set()).add(path.relative_to(tests).as_posix())
    return {id_: sorted(files) for id_, files in found.items()}


def fill_in_tests(page: str, carried: Mapping[str, Sequence[str]]) -> str:
    """The page with its last column filled in from the marks."""
    return "\n".join(_fill_in_row(line, carried) for line in page.splitlines()) + "\n"


def _fill_in_row(line: str, carried: Mapping[str, Sequence[str]]) -> str:
    row = _ROW.match(line)
    if row is None:
        return line
    files = ", ".join(f"`{file}`" for file in carried.get(row[1], ()))
    return f"| {row[1]} | {row[2]} | {row[3]} | {row[4]} | {files} |" if files else f"{line[: row.start(5)].rstrip()} |"


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
