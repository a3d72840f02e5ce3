"""PromQL, taken apart: which metrics and labels an expression names."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

#: What Grafana puts in before it asks Prometheus.
VARIABLES = {"$__rate_interval": "5m"}
_PARTS = ("expr", "lhs", "rhs", "vector_selector", "param")
_SUFFIXES = ("_bucket", "_sum", "_count")


def parsed(expression: str) -> Any:
    """The tree of an expression, or the parser's complaint."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every metric with the labels it is chosen by."""
    for node in _nodes(parsed(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name or "", {matcher.name: matcher.value for matcher in node.matchers.matchers}


def grouped_by(expression: str) -> set[str]:
    """Labels that the expression keeps, other than the bounds of a histogram."""
    kept = re.findall(r"\bby \(([^)]*)\)", expression)
    return {name.strip() for names in kept for name in names.split(",")} - {"le"}


def family(metric: str, known: set[str]) -> str:
    """The name that a metric was registered under: a histogram is read by its parts."""
    return next((metric.removesuffix(end) for end in _SUFFIXES if metric.removesuffix(end) in known), metric)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for part in _PARTS:
        if (child := getattr(node, part, None)) is not None and not isinstance(child, str):
            yield from _nodes(child)
    for child in getattr(node, "args", ()):
        yield from _nodes(child)
