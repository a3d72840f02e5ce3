"""The help of the command: printed from a table, without the commands, and still what the commands say."""

import platform
from importlib.metadata import version

import pytest
import typer.main

from pipeline.cli.main import COMMANDS, build_app, main
from pipeline.config import DISTRIBUTION


def test_the_table_repeats_the_first_paragraph_of_each_help() -> None:
    group = typer.main.get_group(build_app())
    helps = {name: (command.help or "").split("\n\n")[0].replace("\n", " ") for name, command in group.commands.items()}
    assert helps == {name: command.summary for name, command in COMMANDS.items()}


def test_help_without_the_commands_is_the_help_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for names in (COMMANDS, ()):
        with pytest.raises(SystemExit):
            build_app(tuple(names))(args=["--help"], prog_name="pipeline")
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "doctor" in shown[0]


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pubish"])
    assert "publish" in capsys.readouterr().err


def test_a_command_behind_an_option_with_a_value_is_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", "")  # the command sets it, and the end of the test restores it
    with pytest.raises(SystemExit, match="0"):
        main(["--database-url", "postgresql://nowhere/x", "runs", "--help"])
    assert "newest first" in capsys.readouterr().out


def test_completion_knows_the_options_of_each_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pipeline"])
    for name, value in {
        "_PIPELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "pipeline runs --wai",
        "COMP_CWORD": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main()
    assert "--waiting" in capsys.readouterr().out


def test_help_shows_the_groups_in_order_and_no_type_beside_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    overview = capsys.readouterr().out
    titles = [f"─ {group} ─" for group in dict.fromkeys(command.group for command in COMMANDS.values())]
    assert [title for title in titles if title in overview] == titles
    assert sorted(titles, key=overview.index) == titles
    for path in (["runs"], ["quarantine", "list"], ["ingest"], ["db", "upgrade"]):
        with pytest.raises(SystemExit, match="0"):
            main([*path, "--help"])
        overview += capsys.readouterr().out
    assert "--json" in overview
    assert "<bool>" not in overview


def test_version_names_the_versions_that_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == (
        f"pipeline {version(DISTRIBUTION)}, Celery {version('celery')}, Python {platform.python_version()}\n"
    )
