"""A command whose reader left exits quietly, with an exit code of its own."""

import os
import subprocess
import sys

import pytest

from pipeline.cli.main import EXIT_BROKEN_PIPE, EXIT_CODES
from pipeline.store.database import Database
from tests.factories import a_workflow, some_events

_COMMAND = "from pipeline.cli.main import main; main()"


def unread(*arguments: str, database_url: str) -> tuple[int, str]:
    """Return exit code and stderr of a command whose reader left before its first output."""
    end, begin = os.pipe()
    os.close(end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, *arguments],
            env={**os.environ, "PIPELINE_DATABASE_URL": database_url},
            stdout=begin,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(begin)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("events",), id="a list"),
        pytest.param(("events", "--json"), id="JSON"),
        pytest.param(("--help",), id="help"),
    ],
)
def test_a_command_whose_reader_left_exits_quietly_with_141(
    db: Database, database_url: str, arguments: tuple[str, ...]
) -> None:
    a_workflow(db)
    some_events(db, "order-1")
    assert unread(*arguments, database_url=database_url) == (EXIT_BROKEN_PIPE, "")


def test_the_exit_code_is_documented_and_unique() -> None:
    assert EXIT_BROKEN_PIPE == 141
    assert "reader" in EXIT_CODES[EXIT_BROKEN_PIPE]
