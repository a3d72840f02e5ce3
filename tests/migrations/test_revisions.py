"""The files under migrations/versions: numbered, named for what they do, in one line, reversible."""

import inspect
import re
from types import ModuleType

import pytest
from alembic.script import Script, ScriptDirectory

from pipeline.store import migrate

_NAME = re.compile(r"(?P<number>\d{4})_[a-z]+(_[a-z0-9]+)+\.py")
_VERBS = frozenset({"add", "alter", "backfill", "change", "create", "drop", "move", "rename", "split", "tighten"})


def revisions() -> list[Script]:
    """Oldest first."""
    return list(ScriptDirectory(str(migrate.migrations_path())).walk_revisions())[::-1]


def test_there_is_one_head_and_one_base() -> None:
    scripts = ScriptDirectory(str(migrate.migrations_path()))
    assert scripts.get_heads() == [migrate.expected_version()]
    assert len(scripts.get_bases()) == 1


def test_every_file_in_the_folder_is_a_revision() -> None:
    files = {path.name for path in (migrate.migrations_path() / "versions").glob("*.py")}
    assert files == {_file(revision) for revision in revisions()}


def test_revisions_are_numbered_from_100_without_a_gap_and_each_follows_the_one_before() -> None:
    """Numbers below 100 belong to databases from before the first release, which ``db upgrade`` refuses."""
    ids = [revision.revision for revision in revisions()]
    assert ids == [f"{number:04}" for number in range(100, 100 + len(ids))]
    assert [revision.down_revision for revision in revisions()] == [None, *ids[:-1]]


@pytest.mark.parametrize("revision", revisions(), ids=lambda revision: str(revision.revision))
def test_a_revision_is_a_file_named_by_its_number_a_verb_and_a_noun(revision: Script) -> None:
    match = _NAME.fullmatch(_file(revision))
    assert match, f"{_file(revision)} is not NNNN_verb_noun.py"
    assert match["number"] == revision.revision
    assert _file(revision).split("_")[1].removesuffix(".py") in _VERBS


@pytest.mark.parametrize("revision", revisions(), ids=lambda revision: str(revision.revision))
def test_a_revision_has_a_docstring_and_can_be_undone(revision: Script) -> None:
    module = revision.module
    assert module.__doc__
    assert _body(module, "upgrade")
    assert _body(module, "downgrade")


@pytest.mark.parametrize("revision", revisions(), ids=lambda revision: str(revision.revision))
def test_a_revision_is_frozen_text_and_does_not_follow_the_code_as_it_changes(revision: Script) -> None:
    """A migration that imported the tables would do something else after the next change to them."""
    assert "pipeline" not in re.findall(r"^(?:from|import) (\w+)", inspect.getsource(revision.module), re.MULTILINE)


def _file(revision: Script) -> str:
    return revision.path.rsplit("/", 1)[-1]


def _body(module: ModuleType, name: str) -> bool:
    source = inspect.getsource(getattr(module, name))
    return "op." in source
