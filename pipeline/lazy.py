"""Load the public names of a package when they are first used.

``import pipeline`` costs nothing although ``from pipeline import publish`` needs SQLAlchemy and psycopg2. The pytest
plugin, the command line and the worker load only the modules that they use. Type checkers read the imports below
``TYPE_CHECKING`` in the same ``__init__.py``; a test compares both.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package from its public names, by the module that defines them."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
