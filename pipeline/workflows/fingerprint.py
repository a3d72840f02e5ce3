"""Whether the code of a workflow has changed: by the release that the settings name, or by its source files.

Files are read, and never what happens to be loaded: all workers of one release find the same, whatever else they have
imported and in whatever order.
"""

import hashlib
import inspect
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.workflows.authoring import Workflow

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OURS = __name__.partition(".")[0]


def fingerprint(workflow: Workflow, code_version: str = "") -> str:
    """Changes when the code of a workflow does, or what it listens to: a deploy can end a maintenance, and is known.

    Without a ``code_version`` the code is that of the handlers and every source file of the packages they are in.
    """
    listens = [[name, *(topic.name for topic in given.subscribes)] for name, given in workflow.consumers.items()]
    parts = [workflow.name, str(workflow.version), json.dumps([sorted(listens), sorted(workflow.producers)])]
    if code_version:
        parts.append(code_version)
    else:
        code = [*_code(workflow)]
        modules = {module for each in code if (module := inspect.getmodule(each))}
        parts += [*map(_source, code), *sorted(_digest(*_module_path(module)) for module in modules)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _code(workflow: Workflow) -> list[Any]:
    """The functions and classes that the handlers are."""
    consumers = [consumer.instance for consumer in workflow.consumers.values()]
    functions = [producer.function for producer in workflow.producers.values()]
    return [*functions, *(getattr(each, "function", None) or type(each) for each in consumers)]


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return str(getattr(code, "__qualname__", None) or getattr(code, "__name__", ""))


def _module_path(module: ModuleType) -> tuple[tuple[str, ...], str]:
    """Where the files of a module's package are, and which count. Of Pipeline's own code none do."""
    top = module.__name__.partition(".")[0]
    file = Path(getattr(module, "__file__", None) or "")
    if top == _OURS or not file.name:
        return (), ""
    if folders := getattr(sys.modules.get(top), "__path__", None):
        return tuple(folders), "**/*.py"
    alone = _INSTALLED & set(file.parts)  # else what lies beside a single module is its own
    return (str(file.parent),), file.name if alone else "*.py"


@cache
def _digest(folders: tuple[str, ...], pattern: str) -> str:
    """Name and content of these files. They are read once: the code that runs is the code that was there then."""
    digest = hashlib.sha256()
    for folder in map(Path, folders):
        for file in sorted(folder.glob(pattern)):
            try:
                digest.update(f"{file.relative_to(folder)}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
            except OSError:
                continue  # what cannot be read was not imported from here
    return digest.hexdigest()
