"""Command ``pipeline init``: write a first workflow into a folder of its own."""

import keyword
import re
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import common
from pipeline.domain.errors import InvalidInputError

_PACKAGE = Path(__file__).parent.parent
#: The project that is written: inside the package in a wheel, among the examples in a checkout.
_TEMPLATES = (_PACKAGE / "project", _PACKAGE.parent / "examples/shop")
_TEMPLATE_NAME = re.compile(r"\bshop\b")


def init(
    name: Annotated[str, typer.Argument(help="Name of the package and of the workflow.", show_default=False)],
) -> None:
    """Write a new package with a workflow, a connector, their test and settings into this folder."""
    folder = Path.cwd() / name
    if problem := _name_problem(name):
        raise InvalidInputError(f"{name!r} cannot be the name of a package: {problem}")
    if folder.exists() or folder.is_symlink():
        raise InvalidInputError(f"{name} exists in this folder, and nothing was written; expected a name that is free.")
    try:
        written = _write(folder)
    except OSError as error:
        raise InvalidInputError(
            f"{name} cannot be written ({error.strerror}); expected a folder in which you may write files."
        ) from error
    common.print_lines(
        *(f"Wrote {name}/{file}" for file in written),
        f"Next, start everything in this terminal: pipeline dev {name}.workflow",
        f"Its test: python -m pytest {name}",
    )


def _name_problem(name: str) -> str:
    """Describe why a name cannot be that of a package; empty if it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name) or keyword.iskeyword(name):
        return "expected small letters, digits and `_`, a letter first, and no keyword of Python."
    found = _import_origin(name)
    return f"it would hide {found} from every import here; expected a name that no package has." if found else ""


def _import_origin(name: str) -> str:
    """Describe what this name imports, apart from the current folder; empty if nothing."""
    if name in sys.stdlib_module_names:
        return f"the module {name!r} of Python"
    here = Path.cwd().resolve()
    spec = PathFinder.find_spec(name, [each for each in sys.path if Path(each).resolve() != here])
    if spec is None:
        return ""
    return f"the installed package {name!r} ({spec.origin or 'a folder'})"


def _write(folder: Path) -> list[str]:
    """Write the project whole or not at all, and return the names of its files."""
    template = next(each for each in _TEMPLATES if each.is_dir())
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(template.iterdir()) if file.is_file()}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
        draft = Path(place) / folder.name
        draft.mkdir()
        for name, text in texts.items():
            (draft / name).write_text(_TEMPLATE_NAME.sub(folder.name, text), encoding="utf-8")
        draft.rename(folder)
    return [*texts]
