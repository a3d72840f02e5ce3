"""The combinations of versions are those that are declared, and what cannot be run is said."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from pipeline.embedded.binaries import MINIMUM_POSTGRES
from tools import versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]


def numbers(kind: str) -> list[str]:
    """The versions of a kind, in their order."""
    return list(dict.fromkeys(each.name.split("-")[1] for each in versions.chosen([kind])))


def test_every_declared_python_and_the_lowest_celery_and_postgres_are_among_the_combinations() -> None:
    named = "Programming Language :: Python :: 3."
    declared = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith(named)]
    assert numbers("python") == declared
    (celery,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "celery")
    assert f">={numbers('celery')[0]}" in str(celery.specifier)
    assert numbers("postgres")[0] == str(MINIMUM_POSTGRES)


def test_the_tests_of_every_combination_exist() -> None:
    for each in versions.COMBINATIONS:
        assert [name for name in each.tests.split() if not (versions.ROOT / "tests" / name).exists()] == []


def test_a_python_that_is_not_on_this_machine_is_named_as_not_run(tmp_path: Path) -> None:
    absent = versions.Combination(str(tmp_path / "absent"), versions.newest_on("3.99"), "")
    assert versions.outcome(absent, []).startswith("not run: ")
