"""One table says how people meet an error: as a problem of the API and as an exit code."""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import pipeline
from pipeline.admin.problem_types import PROBLEM_TYPES, exit_code, problem_type
from pipeline.cli.main import EXIT_CODES
from pipeline.config import SettingsError
from pipeline.domain.errors import (
    IllegalTransitionError,
    InvalidInputError,
    NotFoundError,
    PipelineError,
    SchemaVersionError,
)


def subclasses(kind: type[PipelineError]) -> Iterator[type[PipelineError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses(child)


def test_every_error_of_the_package_is_a_problem_with_an_exit_code() -> None:
    for module in pkgutil.walk_packages(pipeline.__path__, "pipeline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for kind in subclasses(PipelineError):
        found = problem_type(kind.__new__(kind))
        assert found is not None
        assert found.exit_code in EXIT_CODES, kind


def test_slugs_are_unique_and_only_errors_have_exit_codes() -> None:
    slugs = [each.slug for each in PROBLEM_TYPES]
    assert len(set(slugs)) == len(slugs)
    assert [each.slug for each in PROBLEM_TYPES if bool(each.errors) != (each.exit_code is not None)] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("x"), 2),
        (SchemaVersionError(None, "0100"), 3),
        (NotFoundError("run", "x"), 5),
        (IllegalTransitionError("run", "x", verb="skip", found="a", allowed=["b"]), 6),
        (PipelineError("x"), 6),
        (SettingsError(["x"]), 78),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes_tell_usage_unknown_refused_and_settings_apart(error: Exception, code: int) -> None:
    assert exit_code(error) == code
