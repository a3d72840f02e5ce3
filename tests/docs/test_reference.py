"""The generated reference leaves nothing out: an example for each command, and the fields of each public name."""

import re
import shlex
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pipeline import Grade, PrepareContext
from pipeline.cli.main import build_app
from tests.deploy.test_documented_commands import understood, whole
from tools import api, commands


def test_every_command_has_an_example_that_its_parser_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("charges.csv", "policy.toml"):
        Path(file).touch()
    assert [*commands.EXAMPLES] == [name for name, _ in commands.commands_of(build_app())]
    for name, rest in commands.EXAMPLES.items():
        understood(f"pipeline {name} {rest}")
        command: Any = whole()
        for word in name.split():
            command = command.commands[word]
        command.make_context("it", shlex.split(rest))


@pytest.mark.parametrize("package", api.PACKAGES)
def test_every_field_of_a_public_name_is_on_the_page(package: str) -> None:
    lines = dict(re.findall(r"^- `(\w+)(.*)$", api.api_page(), re.MULTILINE))
    missing = []
    for name in api.public_names(package):
        value = getattr(import_module(package), name)
        given = fields(value) if isinstance(value, type) and is_dataclass(value) else ()
        named = [each.name for each in given if not each.name.startswith("_")]
        if isinstance(value, type) and issubclass(value, Enum):
            named = [member.name for member in value]
        missing += [f"{name}.{each}" for each in named if not re.search(rf"\b{each}\b", lines[name])]
    assert missing == []


def test_methods_of_a_class_that_callers_receive_are_on_the_page() -> None:
    assert "peek(topic, limit)" in api.members(PrepareContext)
    assert api.members(Grade) == ["A", "B", "C", "D"]
