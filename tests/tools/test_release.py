"""A release with a fault is not ready: each check finds its own."""

import pytest

from tools import release

PROJECT = '[project]\nversion = "0.1.0"\n'
METADATA = b"""Metadata-Version: 2.4
Name: celery-durable-effects
Version: 0.1.0
License-Expression: Apache-2.0
Description-Content-Type: text/markdown

# Pipeline
"""
WHEEL = [
    "pipeline/migrations/env.py",
    "pipeline/py.typed",
    "celery_durable_effects/__init__.py",
    "x.dist-info/METADATA",
]


@pytest.mark.parametrize(
    ("changelog", "problem"),
    [
        ("## [Unreleased]\n\n## [0.1.0] - 2026-11-19\n", ""),
        ("## [0.2.0] - 2026-11-19\n## [0.1.0] - 2026-11-01\n", "has version 0.1.0, CHANGELOG.md 0.2.0"),
        ("## [Unreleased]\n", "has no release"),
    ],
)
def test_the_version_is_that_of_the_changelog(changelog: str, problem: str) -> None:
    found = release.version_problem(PROJECT, changelog)
    assert problem in found
    assert bool(problem) == bool(found)


def test_the_version_of_this_checkout_is_in_its_changelog() -> None:
    project, changelog = (release.ROOT / name for name in ("pyproject.toml", "CHANGELOG.md"))
    assert release.version_problem(project.read_text(), changelog.read_text()) == ""


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (WHEEL, ""),
        ([*WHEEL, "pipeline/testing/inline.py", "pipeline/project/test_workflow.py"], ""),
        ([*WHEEL, "tests/conftest.py"], "tests/conftest.py is in it; expected only"),
        ([*WHEEL, "pipeline/test_config.py"], "pipeline/test_config.py is in it; expected no tests"),
        ([*WHEEL, "pipeline/cli/__pycache__/main.pyc"], "expected no tests, caches or hidden files"),
        ([*WHEEL, "pipeline/.env"], "expected no tests, caches or hidden files"),
        (WHEEL[1:], "pipeline/migrations/env.py is missing"),
    ],
)
def test_a_stray_or_missing_file_is_named(names: list[str], problem: str) -> None:
    found = release.contents_problem(names, is_wheel=True)
    assert problem in found
    assert bool(problem) == bool(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (METADATA, ""),
        (METADATA.replace(b"Version: 0.1.0", b"Version: one"), "not valid"),
        (METADATA.replace(b"License-Expression: Apache-2.0\n", b""), "no licence"),
        (METADATA.replace(b"text/markdown", b"text/plain"), "no description in Markdown"),
    ],
)
def test_metadata_that_an_index_would_refuse_is_found(text: bytes, problem: str) -> None:
    found = release.metadata_problem(text)
    assert problem in found
    assert bool(problem) == bool(found)
