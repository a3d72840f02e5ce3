"""Report large modules and functions. Size alone is no fault: a module is split by subject, never by a line count."""

import ast
import warnings

import pytest

from tests.support.source_code import functions, label, modules

MODULE_LINES, FUNCTION_LINES = 600, 60


class LargeSourceWarning(UserWarning):
    """A module or function that is worth a look."""


@pytest.mark.filterwarnings("default::tests.architecture.test_sizes.LargeSourceWarning")
def test_large_modules_and_functions_are_reported() -> None:
    """The report is in the summary of warnings. It fails nothing."""
    large = large_sources({label(path): path.read_text() for path in modules("pipeline", "tests", "tools")})
    if large:
        text = f"over {MODULE_LINES} or {FUNCTION_LINES} lines: {', '.join(large)}"
        warnings.warn(text, LargeSourceWarning, stacklevel=1)


def test_a_large_module_and_a_large_function_are_found() -> None:
    body = "    pass\n" * FUNCTION_LINES
    found = large_sources({"a.py": f"def f():\n{body}", "b.py": "\n" * (MODULE_LINES + 1), "c.py": "def f(): ...\n"})
    assert found == ["a.py f 61", "b.py 601"]


def large_sources(sources: dict[str, str]) -> list[str]:
    """Name the modules and functions over the limits, each with its lines."""
    found = []
    for name, source in sources.items():
        lines = source.count("\n")
        found += [f"{name} {lines}"] if lines > MODULE_LINES else []
        sizes = ((node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions(ast.parse(source)))
        found += [f"{name} {function} {size}" for function, size in sizes if size > FUNCTION_LINES]
    return found
