"""The page of public Python names, written from the packages themselves."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from enum import Enum

from tools.markdown import code, page, section, table

#: Classes that callers receive and never make.
_RECEIVED = {"Attempt", "MutateContext", "NextContext", "PrepareContext", "ProducerContext", "Scripted", "Topic"}
#: Every package with public names, in the order of the page, and what it is for.
PACKAGES = {
    "pipeline": "For authors of workflows and connectors, and for services that publish.",
    "pipeline.client": "For services that publish events. [Guide](../guides/publish-events.md).",
    "pipeline.celery": "For teams with a Celery app of their own. [Guide](../guides/from-celery.md).",
    "pipeline.connectors": "The connector SDK. [Guide](../guides/write-a-connector.md).",
    "pipeline.connectors.http": "The connector for HTTP APIs. [Reference](connectors-http.md).",
    "pipeline.connectors.sql": "The connector for SQL databases. [Reference](connectors-sql.md).",
    "pipeline.connectors.email": "The connector for SMTP and IMAP. [Reference](connectors-email.md).",
    "pipeline.connectors.gmail": "The connector for the Gmail API. [Reference](connectors-gmail.md).",
    "pipeline.connectors.celery": "The connector for existing Celery tasks. [Guide](../guides/from-celery.md).",
    "pipeline.testing": "The test kit. Guides: [workflows](../guides/test-your-workflow.md), "
    "[connectors](../guides/test-your-connector.md).",
    "pipeline.api": "The HTTP API and the console as an ASGI app. "
    "Guides: [access](../guides/access.md), [console](../guides/console.md).",
    "pipeline.ingest": "Redis streams. [Guide](../guides/ingest-a-stream.md).",
    "pipeline.consumer_engine": "Items of any source. [Guide](../guides/consume-items.md), [reference](engine.md).",
}
_STARS: Mapping[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_CONSTANT = r"^(?:#: (?P<above>[^\n]+)\n)?{name}(?:: [^=\n]+)? = [^\n]*?(?:  #: (?P<beside>[^\n]+))?$"


def api_page() -> str:
    """Every public name with its parameters and the first line of its docstring."""
    seen: set[str] = set()
    return page(
        "Python names",
        "These names are public: import them from the packages below. Every deeper module is private and may change "
        "with every version. The [glossary](../glossary.md) explains the words.",
        *(_package(name, seen) for name in PACKAGES),
    )


def public_names(package: str) -> list[str]:
    """The names that a package exports, sorted."""
    return sorted(importlib.import_module(package).__all__)


def description(package: str, name: str) -> str:
    """The first line that a public name says about itself; empty if it has none."""
    value = getattr(importlib.import_module(package), name)
    own = vars(value).get("__doc__") if isinstance(value, type) else None
    if inspect.isfunction(value):
        own = value.__doc__
    if own is None and not isinstance(value, type):
        own = _comment(package, name)
    first = (own or "").strip().partition("\n")[0]
    return "" if first.startswith(f"{name}(") else first.replace("``", "`")


def _package(package: str, seen: set[str]) -> str:
    names = public_names(package)
    new = [name for name in names if name not in seen]
    again = [code(name) for name in names if name in seen]
    seen.update(names)
    rows = ((code(name + _parameters(package, name)), description(package, name)) for name in new)
    parts = [PACKAGES[package], table(["name", "what it is"], rows)]
    parts += [f"Also here: {', '.join(again)}."] if again else []
    return section(package, *parts)


def _parameters(package: str, name: str) -> str:
    """Join the names of parameters; enums, errors, protocols and received values have none that a caller gives."""
    value = getattr(importlib.import_module(package), name)
    if not callable(value) or (isinstance(value, type) and _is_without_parameters(value)):
        return ""
    return f"({', '.join(_marked_parameters(inspect.signature(value)))})"


def _is_without_parameters(kind: type) -> bool:
    return issubclass(kind, Enum | BaseException) or getattr(kind, "_is_protocol", False) or kind.__name__ in _RECEIVED


def _marked_parameters(signature: inspect.Signature) -> Iterator[str]:
    is_after_star = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_after_star:
            yield "*"
            is_after_star = True
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_after_star = True
        yield _STARS.get(parameter.kind, "") + parameter.name


def _comment(package: str, name: str) -> str | None:
    """Find the ``#:`` comment above or beside a constant, where it is assigned."""
    source = inspect.getsource(importlib.import_module(package))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return _comment(node.module, name)
    found = re.search(_CONSTANT.format(name=name), source, re.MULTILINE)
    return found and (found["above"] or found["beside"])
