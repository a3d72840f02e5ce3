"""The code of a workflow as it lies on disk: the modules of its handlers, and what those import of their own.

Files are read, and never what happens to be loaded: all workers of one release find the same, whatever else they have
imported and in whatever order.
"""

import ast
import hashlib
import inspect
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_OURS = Path(__file__).absolute().parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_INSTALLED = frozenset({"site-packages", "dist-packages"})

#: What a file imports: how many packages up it begins, the module, and the names from it.
_ImportTable = tuple[tuple[int, str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _ModulePath:
    """A module by its name, and the folder in which that name is looked up."""

    root: Path
    name: str

    @property
    def file(self) -> Path | None:
        """Where its source is, if it is a module of this folder and its code counts."""
        base = self.root.joinpath(*self.name.split("."))
        either = (base / "__init__.py", base.with_name(f"{base.name}.py"))  # Python prefers the package
        found = next((file for file in either if os.path.isfile(file)), None)  # raises nothing
        return None if found is None or _OURS in found.parents else found

    def imports(self, level: int, module: str, names: tuple[str, ...]) -> Iterator["_ModulePath"]:
        """The modules that one import may load: what it names, each name in it, and the packages they are in."""
        parts = self.name.split(".")
        if self.file is not None and self.file.name == "__init__.py":
            parts.append("")  # a package is its own parent
        base = parts[: max(0, len(parts) - level)] if level else []
        full = [*base, *module.split(".")] if module else base
        for end in range(1, len(full) + 1):
            yield _ModulePath(self.root, ".".join(full[:end]))
        yield from (_ModulePath(self.root, ".".join([*full, name])) for name in names)


def is_own(module: ModuleType | None, package: str) -> bool:
    """Whether code is a user's: in the package of a handler, or not installed and not Python's."""
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return True
    path = Path(file).absolute()
    return _top(module.__name__) == package or not (_OURS in path.parents or _is_installed(path))


def digests(code: Iterable[Any]) -> set[str]:
    """A digest of every source file that the code is in, and of all those it imports from its own folder.

    Where that is a folder of installed packages, only the package that the code is in is its own.
    """
    modules = {module for item in code if (module := inspect.getmodule(item))}
    found: dict[Path | str, str] = {
        module.__name__: _source_text(module) for module in modules if not _module_path(module)
    }
    todo = [place for module in modules if (place := _module_path(module))]
    packages = {_top(place.name) for place in todo}
    seen = set(todo)
    while todo:
        place = todo.pop()
        if (file := place.file) is None:
            continue
        found[file], imports = _cached_imports(file)
        for each in (each for given in imports for each in place.imports(*given)):
            if each not in seen and (_top(each.name) in packages or not _is_installed(each.root)):
                seen.add(each)
                todo.append(each)
    return set(found.values())


def _module_path(module: ModuleType) -> _ModulePath | None:
    """Where to look for a module, or None when it has no source file whose imports could be followed."""
    file = Path(str(getattr(module, "__file__", None) or "")).absolute()
    steps = module.__name__.split(".")
    path = file.parent if file.name == "__init__.py" else file.with_suffix("")
    fits = list(path.parts[-len(steps) :]) == steps
    # a script, or a module that was given another name, is looked for beside itself
    found = _ModulePath(path.parents[len(steps) - 1], module.__name__) if fits else _ModulePath(file.parent, file.stem)
    return found if found.file == file else None


def _source_text(module: ModuleType) -> str:
    """What can be told of a module that is in no file, such as one in an archive."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return module.__name__


def _cached_imports(file: Path) -> tuple[str, _ImportTable]:
    try:
        stat = file.stat()
        return _read(file, stat.st_mtime_ns, stat.st_size)
    except OSError:
        return "", ()  # what cannot be read was not imported from here


@cache
def _read(file: Path, changed_at: int, size: int) -> tuple[str, _ImportTable]:
    """The digest of a file and its imports, wherever in it they stand. A file that changed is read again."""
    del changed_at, size
    source = file.read_bytes()
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        nodes = []
    plain = [(0, each.name, ()) for node in nodes if isinstance(node, ast.Import) for each in node.names]
    named = [
        (node.level, node.module or "", tuple(each.name for each in node.names))
        for node in nodes
        if isinstance(node, ast.ImportFrom)
    ]
    return hashlib.sha256(source).hexdigest(), (*plain, *named)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_installed(path: Path) -> bool:
    return bool(_INSTALLED & set(path.parts)) or path == _STANDARD or _STANDARD in path.parents
