"""A command whose output nobody reads any more ends quietly, and never with a code that means something else."""

import os
import subprocess
import sys

import pytest

from pipeline.cli.main import EXIT_BROKEN_PIPE, EXIT_CODES
from pipeline.store.database import Database
from tests.factories import a_workflow, some_events

_COMMAND = "from pipeline.cli.main import main; main()"


def unread(*words: str, database_url: str) -> tuple[int, str]:
    """How a command ends whose reader left before it said a word, and what it says to people."""
    end, begin = os.pipe()
    os.close(end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, *words],
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
    "words",
    [
        pytest.param(("events",), id="a list"),
        pytest.param(("events", "--json"), id="JSON"),
        pytest.param(("--help",), id="help"),
    ],
)
def test_a_command_whose_reader_left_ends_quietly_as_if_by_the_signal(
    db: Database, database_url: str, words: tuple[str, ...]
) -> None:
    a_workflow(db)
    some_events(db, "order-1")
    assert unread(*words, database_url=database_url) == (EXIT_BROKEN_PIPE, "")


def test_the_code_is_documented_and_no_other() -> None:
    assert EXIT_BROKEN_PIPE == 141
    assert "reader" in EXIT_CODES[EXIT_BROKEN_PIPE]
