"""Run the command ``pipeline`` on a database of the project: ``python manage.py pipeline attention``."""

import argparse
import os
import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from pipeline.cli.main import main
from pipeline.django.project import database_alias, database_url

_VARIABLE = "PIPELINE_DATABASE_URL"


class Command(BaseCommand):  # type: ignore[misc]  # Django ships no types
    """Hand the arguments over to the command ``pipeline``."""

    help = "Run a command of Pipeline on a database of this project, such as `attention` or `db upgrade`."
    requires_system_checks: list[str] = []  # noqa: RUF012 - as Django declares it

    def add_arguments(self, parser: Any) -> None:
        """Add the arguments of `call_command`."""
        _add_using(parser)
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run with the arguments as they were typed; --help is the help of `pipeline`."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        _add_using(parser)
        for name in ("--settings", "--pythonpath"):  # manage.py has followed them
            parser.add_argument(name)
        options, rest = parser.parse_known_args(argv[2:])
        try:
            main(_arguments(rest, options.using))
        except CommandError as error:
            self.stderr.write(str(error))
            sys.exit(error.returncode)

    def handle(self, *, arguments: list[str], using: str | None, **options: Any) -> None:
        """Run for `call_command`. Another exit code than 0 is a CommandError."""
        before = os.environ.get(_VARIABLE)
        output = options.get("stdout")
        try:
            with nullcontext() if output is None else redirect_stdout(output):
                main(_arguments(arguments, using))
        except SystemExit as ended:
            if ended.code:
                raise CommandError(
                    f"`pipeline {' '.join(arguments)}` ended with exit code {ended.code}.", returncode=int(ended.code)
                ) from None
        finally:
            _restore(before)


def _add_using(parser: Any) -> None:
    parser.add_argument("--using", help="Alias of the database; by default that of PIPELINE_DATABASE_ALIAS.")


def _arguments(given: list[str], using: str | None) -> list[str]:
    """Return the arguments with the URL of the database as Django would connect to it now."""
    alias = using or database_alias()
    url = database_url(alias)
    if url is None and using is not None:
        raise CommandError(f"The database {alias!r} of DATABASES is no Postgres with a name.", returncode=2)
    return [*given] if url is None else ["--database-url", url, *given]


def _restore(value: str | None) -> None:
    if value is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = value
