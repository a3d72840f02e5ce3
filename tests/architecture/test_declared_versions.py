"""What pyproject.toml declares: versions that ``make test-lowest`` runs, and the name that all texts say."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pipeline.config import DISTRIBUTION
from tests.support.source_code import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("servers", "http", "console", "oidc", "otel")
#: Lower versions are declared, and another package of ours needs more than that.
RAISED_BY_OTHERS = {"opentelemetry-api", "opentelemetry-sdk"}


def test_the_lowest_versions_that_are_tested_are_the_declared_ones() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", (ROOT / "requirements-lowest.lock").read_text(), re.MULTILINE))
    tested = {canonicalize_name(name): Version(version) for name, version in pins.items()}
    declared = PROJECT["dependencies"] + [line for name in EXTRAS for line in PROJECT["optional-dependencies"][name]]
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        (floor,) = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
        assert tested[name] >= floor
        assert tested[name] == floor or name in RAISED_BY_OTHERS, f"{name}: {tested[name]} is tested, not {floor}"


def test_packages_whose_classes_are_extended_are_capped_at_the_next_major_version() -> None:
    capped = {
        requirement.name
        for requirement in map(Requirement, PROJECT["dependencies"])
        if any(each.operator == "<" for each in requirement.specifier)
    }
    assert capped == {"celery", "kombu", "sqlalchemy", "typer"}


def test_messages_and_documents_install_our_distribution_with_extras_that_it_has() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "pipeline").rglob("*.py")]
    texts = [file.read_text() for file in files]
    named = {found for text in texts for found in re.findall(r"pip install ['\"]([\w-]+)\[([\w,]+)\]", text)}
    assert named
    for name, extras in named:
        assert name == DISTRIBUTION
        assert {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}
    wheels = {found for text in texts for found in re.findall(r"([\w-]+)-[\d.]+-py3-none-any\.whl", text)}
    assert wheels == {DISTRIBUTION.replace("-", "_")}
