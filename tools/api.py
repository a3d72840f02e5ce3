"""The page of public Python names, written from the packages themselves."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from enum import Enum

from tools.markdown import code, page, section

#: Classes that callers receive and never make.
_RECEIVED = {"Attempt", "MutateContext", "NextContext", "PrepareContext", "ProducerContext", "Scripted", "Topic"}
#: Every package with public names, in the order of the page, and what it is for.
PACKAGES = {
    "pipeline": "For authors of workflows and connectors, and for services that publish.",
    "pipeline.client": "For services that publish events. [Guide](../guides/publish-events.md).",
    "pipeline.celery": "For teams with a Celery app of their own. [Guide](../guides/from-celery.md).",
    "pipeline.django": "For Django projects, as an installed app. [Guide](../guides/web-frameworks.md#django).",
    "pipeline.fastapi": "For FastAPI and Starlette. [Guide](../guides/web-frameworks.md#fastapi-and-starlette).",
    "pipeline.flask": "For Flask. [Guide](../guides/web-frameworks.md#flask).",
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
    seen: dict[str, object] = {}
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


def _package(package: str, seen: dict[str, object]) -> str:
    values = {name: getattr(importlib.import_module(package), name) for name in public_names(package)}
    again = [code(name) for name, value in values.items() if seen.get(name) is value]
    new = [name for name in values if code(name) not in again]
    seen.update(values)
    lines = [f"- {code(name + _parameters(package, name))}: {_words(package, name)}" for name in new]
    parts = [PACKAGES[package], *(["\n".join(lines)] if lines else [])]
    parts += [f"Also here: {', '.join(again)}."] if again else []
    return section(package, *parts)


def _words(package: str, name: str) -> str:
    """Its description and, of a class, what it has besides its parameters."""
    has = [code(member) for member in members(getattr(importlib.import_module(package), name))]
    return " ".join([description(package, name), *([f"Has {', '.join(has)}."] if has else [])])


def members(value: object) -> list[str]:
    """The members of an enum; what another class has besides the parameters of its constructor."""
    if not isinstance(value, type):
        return []
    if issubclass(value, Enum):
        return [member.name for member in value]
    given = set() if _is_without_parameters(value) else set(inspect.signature(value).parameters)
    own = [base for base in reversed(value.__mro__) if base.__module__.partition(".")[0] == "pipeline"]
    found: dict[str, str] = {}
    for base in own:
        for name in (*vars(base).get("__annotations__", {}), *vars(base)):
            if not name.startswith(("_", "model_")) and name not in given:
                found[name] = _member(name, vars(base).get(name))
    return [*found.values()]


def _member(name: str, value: object) -> str:
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not inspect.isfunction(function):
        return name
    parameters = inspect.signature(function)
    bound = [each for each in parameters.parameters.values() if each.name not in ("self", "cls")]
    return f"{name}({', '.join(_marked_parameters(parameters.replace(parameters=bound)))})"


def _parameters(package: str, name: str) -> str:
    """Join the names of parameters; enums, errors, protocols and received values have none that a caller gives."""
    value = getattr(importlib.import_module(package), name)
    if not callable(value) or (isinstance(value, type) and _is_without_parameters(value)):
        return _raised(value) if isinstance(value, type) and issubclass(value, BaseException) else ""
    return f"({', '.join(_marked_parameters(inspect.signature(value)))})"


def _raised(kind: type[BaseException]) -> str:
    """The parameters of an error that has a constructor of its own."""
    own = next((base for base in kind.__mro__ if "__init__" in vars(base)), kind)
    if own.__module__.partition(".")[0] != "pipeline":
        return ""
    parameters = inspect.signature(vars(own)["__init__"])
    bound = [each for each in parameters.parameters.values() if each.name != "self"]
    return f"({', '.join(_marked_parameters(parameters.replace(parameters=bound)))})"


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
