"""Build commands whose help shows no type beside a flag."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _PlainFlags:
    """Leave the type of flags out of the help: ``--json`` instead of ``--json <bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class PlainCommand(_PlainFlags, TyperCommand):
    """A command."""


class PlainGroup(_PlainFlags, TyperGroup):
    """A command with subcommands."""


class CommandGroup(typer.Typer):
    """Collect commands of one group."""

    def __init__(self, *, cls: type[PlainGroup] = PlainGroup, **options: Any) -> None:
        super().__init__(cls=cls, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Add a command."""
        return super().command(name, cls=PlainCommand, **options)
