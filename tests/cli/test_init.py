"""``pipeline init`` writes a project that can be used at once, and nothing where it would do harm."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.config import EXIT_USAGE

FILES = ["__init__.py", "connector.py", "settings.env", "test_workflow.py", "workflow.py"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the command is given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(name: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["init", name])
    return int(ended.value.code or 0)


def test_a_project_has_the_given_name_and_the_command_says_what_to_type_next(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init("billing") == 0
    assert sorted(file.name for file in folder.iterdir()) == ["billing"]
    assert sorted(file.name for file in (folder / "billing").iterdir()) == FILES
    assert capsys.readouterr().out.splitlines() == [
        *(f"Wrote billing/{name}" for name in FILES),
        "Next, start everything in this terminal: pipeline dev billing.workflow",
        "Its test: python -m pytest billing",
    ]
    texts = [file.read_text() for file in (folder / "billing").iterdir()]
    assert 'Workflow("billing"' in "".join(texts)
    assert not [text for text in texts if "shop" in text]


def test_a_project_is_clean_by_the_rules_of_ruff(folder: Path) -> None:
    init("billing")
    ruff = Path(sys.executable).parent / "ruff"
    if not ruff.exists():
        pytest.skip("ruff is not installed in this environment")
    for arguments in (["check", "--select", "B,E,F,I,UP"], ["format", "--check"]):
        done = subprocess.run([ruff, *arguments, "--isolated", folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_nothing_that_exists_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "mine.py").write_text("mine")
    assert init("shop") == EXIT_USAGE
    assert "shop exists in this folder, and nothing was written" in capsys.readouterr().err
    assert [file.name for file in (folder / "shop").iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Shop", "expected small letters"),
        ("my-shop", "expected small letters"),
        ("4shops", "expected small letters"),
        ("../shop", "expected small letters"),
        ("lambda", "no keyword of Python"),
        ("email", "it would hide the module 'email' of Python"),
        ("celery", "it would hide the installed package 'celery'"),
        ("pipeline", "it would hide the installed package 'pipeline'"),
    ],
)
def test_a_name_that_cannot_be_imported_or_hides_a_package_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert init(name) == EXIT_USAGE
    assert said in capsys.readouterr().err
    assert [*folder.iterdir()] == []


def test_a_folder_that_cannot_be_written_is_named_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/proc")
    assert init("shop") == EXIT_USAGE
    assert "expected a folder in which you may write files" in capsys.readouterr().err
