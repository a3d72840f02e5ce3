"""Compute a fingerprint of a workflow's code: from the code version of the settings, or from its source files.

Only files are read, not loaded modules. So all workers of one deployment compute the same fingerprint, whatever else
they have imported and in whatever order.
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
    """Return a value that changes with the code of a workflow or with its subscriptions.

    By it a deployment is recognised, and ends a maintenance. Without a ``code_version`` the code is that of the
    handlers and every source file of their packages.
    """
    subscriptions = [[name, *(topic.name for topic in given.subscribes)] for name, given in workflow.consumers.items()]
    parts = [workflow.name, str(workflow.version), json.dumps([sorted(subscriptions), sorted(workflow.producers)])]
    if code_version:
        parts.append(code_version)
    else:
        code = [*_code(workflow)]
        modules = {module for each in code if (module := inspect.getmodule(each))}
        parts += [*map(_source, code), *sorted(_digest(*_module_path(module)) for module in modules)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _code(workflow: Workflow) -> list[Any]:
    """Return the functions and classes of the handlers."""
    consumers = [consumer.instance for consumer in workflow.consumers.values()]
    functions = [producer.function for producer in workflow.producers.values()]
    return [*functions, *(getattr(each, "function", None) or type(each) for each in consumers)]


def _source(code: Any) -> str:
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return str(getattr(code, "__qualname__", None) or getattr(code, "__name__", ""))


def _module_path(module: ModuleType) -> tuple[tuple[str, ...], str]:
    """Return the folders of a module's package and the pattern of its files. Pipeline's own code has none."""
    top = module.__name__.partition(".")[0]
    file = Path(getattr(module, "__file__", None) or "")
    if top == _OURS or not file.name:
        return (), ""
    if folders := getattr(sys.modules.get(top), "__path__", None):
        return tuple(folders), "**/*.py"
    alone = _INSTALLED & set(file.parts)  # else the files beside a single module belong to it
    return (str(file.parent),), file.name if alone else "*.py"


@cache
def _digest(folders: tuple[str, ...], pattern: str) -> str:
    """Return a digest of names and contents. Files are read once: the running code is the code of that time."""
    digest = hashlib.sha256()
    for folder in map(Path, folders):
        for file in sorted(folder.glob(pattern)):
            try:
                digest.update(f"{file.relative_to(folder)}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
            except OSError:
                continue  # an unreadable file was not imported from here
    return digest.hexdigest()
