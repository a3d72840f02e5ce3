"""Policies from files and from the environment: read, merged, checked, and refused by name."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.consumer_engine import policies
from pipeline.consumer_engine.policies import ConsumerPolicy, PolicyError
from tests.support.rule import rule

TOML = """
name = "orders"

[loop]
streaming = true
concurrency = { value = 8 }
batch = { size = 100 }

[steps.process.retry]
max_attempts = 3
timeout = 30
"""
YAML = """
name: orders
loop:
  streaming: true
  concurrency: {value: 8}
  batch: {size: 100}
steps:
  process:
    retry: {max_attempts: 3, timeout: 30}
"""
VALUES: dict[str, Any] = {
    "name": "orders",
    "loop": {"streaming": True, "concurrency": {"value": 8}, "batch": {"size": 100}},
    "steps": {"process": {"retry": {"max_attempts": 3, "timeout": 30}}},
}
ENVIRON = {
    "CONSUME_NAME": "orders",
    "CONSUME_LOOP__STREAMING": "true",
    "CONSUME_LOOP__CONCURRENCY__VALUE": "8",
    "CONSUME_LOOP__BATCH__SIZE": "100",
    "CONSUME_STEPS__PROCESS__RETRY__MAX_ATTEMPTS": "3",
    "CONSUME_STEPS__PROCESS__RETRY__TIMEOUT": "30",
    "PATH": "/bin",
}
WANTED = ConsumerPolicy.model_validate(VALUES)


@rule("E-2")
@pytest.mark.parametrize(
    ("name", "text"), [("p.toml", TOML), ("p.yaml", YAML), ("p.yml", YAML), ("p.json", json.dumps(VALUES))]
)
def test_e1_a_policy_reads_the_same_from_every_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert policies.load_policy(tmp_path / name, {}) == WANTED


def test_e1_a_policy_reads_the_same_from_the_environment() -> None:
    assert policies.load_policy(None, ENVIRON) == WANTED


def test_the_environment_overrides_the_file_and_the_file_overrides_the_task(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("[loop]\nlimit = 5\ntimeout = 9\n")
    base = ConsumerPolicy.model_validate({"loop": {"limit": 1, "streaming": True}, "name": "mine"})
    made = policies.load_policy(tmp_path / "p.toml", {"CONSUME_LOOP__TIMEOUT": "none"}, base)
    assert (made.loop.limit, made.loop.timeout, made.loop.streaming, made.name) == (5, None, True, "mine")


def test_arguments_for_the_source_are_merged_one_by_one_and_never_shown(tmp_path: Path) -> None:
    base = ConsumerPolicy.model_validate({"steps": {"fetch": {"extra": {"old": 1, "TopicName": "a"}}}})
    (tmp_path / "p.toml").write_text('[steps.fetch.extra]\nblock_ms = 5\ntext = ["a"]\npassword = "hunter2"\n')
    environ = {"STREAM": "orders", "TOPICNAME": "b", "BLOCK_MS": "9", "TEXT": "x", "N": "7"}
    named = {f"CONSUME_STEPS__FETCH__EXTRA__{name}": text for name, text in environ.items()}
    made = policies.load_policy(tmp_path / "p.toml", named, base)
    assert made.steps.fetch.extra == {
        "old": 1,
        "TopicName": "b",
        "block_ms": 9,
        "text": "x",
        "password": "hunter2",
        "stream": "orders",
        "n": "7",
    }
    assert "hunter2" not in repr(made)
    with pytest.raises(PolicyError) as caught:
        policies.build_policy({"steps": {"fetch": {"extra": "hunter2"}}})
    assert "hunter2" not in str(caught.value)
    assert "steps.fetch.extra: expected a table" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOOP__LIMIT": "abc"}, "The environment cannot be used: CONSUME_LOOP__LIMIT (loop.limit): expected a whole"),
        ({"FOO": "1"}, "CONSUME_FOO (foo) is not a field"),
        ({"LOOP__STREAMING": ""}, "CONSUME_LOOP__STREAMING (loop.streaming): expected true or false, got nothing"),
        ({"LOOP__STREAMING": "maybe"}, "expected true or false, got 'maybe'"),
        ({"LOOP__TIMEOUT": "soon"}, "expected a number, got 'soon'"),
        ({"LOOP": "7"}, "CONSUME_LOOP (loop): expected a table, got '7'"),
        ({"LOOP__LIMIT__X": "3"}, "CONSUME_LOOP__LIMIT__X (loop.limit): expected a whole number"),
    ],
)
def test_a_wrong_value_in_the_environment_is_blamed_on_its_variable(
    tmp_path: Path, environ: dict[str, str], expected: str
) -> None:
    (tmp_path / "p.toml").write_text("[loop]\nlimit = 5\n")
    with pytest.raises(PolicyError) as caught:
        policies.load_policy(tmp_path / "p.toml", {f"CONSUME_{name}": text for name, text in environ.items()})
    assert expected in str(caught.value)
    assert "p.toml" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.toml", "loop = [", "cannot be used"),
        ("p.yaml", "a: [", "cannot be used"),
        ("p.yaml", "a: [", "(line 1)"),
        ("p.json", "[" * 100_000, "it is nested too deep"),
        ("p.json", "[1]", "it holds something of type list; expected a table with loop and steps"),
        ("p.json", '{"loop": null}', "loop: expected a table, got nothing"),
        ("p.yaml", "{steps: {fetch: {extra: {1: 2}}}}", "steps.fetch.extra.1.[key]: expected text"),
        ("p.yaml", "{loop: {1: 2}}", "loop.1: expected text as the name of a field, got 1"),
        ("p.toml", "[loop]\nlimit = true", "loop.limit: expected a number, got true or false"),
        ("p.toml", "[loop.batch]\nsize = true", "loop.batch.size: expected a number, got true or false"),
        ("p.toml", "[loop]\ntimeout = 1e12", "loop.timeout: expected less than or equal to 315360000"),
        ("p.toml", "[steps.fetch.extra]\nat = 2030-01-01", "steps.fetch.extra: it.at is something of type date"),
        ("p.ini", "", "its name ends in '.ini'; expected .toml, .yaml, .yml or .json"),
        ("p.toml", "[loop]\nlimit = -1", "loop.limit: expected greater than or equal to 0, got -1"),
        ("p.toml", "[loop]\nlimt = 1", "loop.limt is not a field (did you mean loop.limit?)"),
        ("p.toml", "[loop.concurrency]\nvalue = 5\nmax = 2", "value is 5; expected at least 1 and at most 2"),
    ],
)
def test_the_problem_of_a_file_names_the_file(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PolicyError) as caught:
        policies.load_policy(tmp_path / name, {})
    assert expected in str(caught.value)
    assert "Nothing was started" in str(caught.value)


def test_a_file_that_is_not_there_and_variables_that_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="No such file") as caught:
        policies.load_policy(tmp_path / "gone.toml", {})
    assert str(caught.value).count("gone.toml") == 1
    with pytest.raises(PolicyError, match="set as a whole too"):
        policies.load_policy(None, {"CONSUME_LOOP": "x", "CONSUME_LOOP__LIMIT": "1"})


def test_yaml_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(PolicyError, match="YAML needs the package pyyaml; install it, or write TOML"):
        policies.load_policy(tmp_path / "p.yaml", {})


def test_every_field_of_a_policy_is_in_the_reference(project: Path) -> None:
    page = (project / "docs/reference/engine.md").read_text(encoding="utf-8")
    leaves = {name for name, _ in policies.fields()}
    shared = {f"steps.{step}.retry.{leaf}" for step in ("process", "success", "exception") for leaf in _RETRY}
    missing = [name for name in sorted(leaves - shared) if f"`{name}`" not in page]
    assert missing == []


_RETRY = ("max_attempts", "timeout", "backoff", "backoff_multiplier", "backoff_cap")
