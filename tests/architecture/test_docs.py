"""The documents agree with the code, and every link and name in them exists."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import Settings
from pipeline.domain.states import Phase
from pipeline.domain.values import DEFAULT_LIMITS
from pipeline.store.reads.invariants import INVARIANTS
from tools import docs, rules
from tools.comments import meanings

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
IN_THE_PROJECT = re.compile(r"`((?:pipeline|tests|tools|migrations|docs)/[\w./-]+?)(?:::(\w+))?`")


def _wrong(check: Callable[[Path, str], object]) -> dict[str, object]:
    """What a check finds wrong, by page."""
    found = ((page, check(page, page.read_text(encoding="utf-8"))) for page in PAGES)
    return {page.relative_to(ROOT).as_posix(): wrong for page, wrong in found if wrong}


def test_every_generated_page_is_up_to_date() -> None:
    assert [str(path) for path in docs.stale_pages(ROOT)] == [], "run `make docs`"


def test_a_stale_page_is_reported_and_then_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check"], tmp_path) == 1
    assert "docs/reference/states.md is stale" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists()
    assert docs.main([], tmp_path) == 0
    assert docs.main(["--check"], tmp_path) == 0


def test_the_meaning_of_a_state_is_the_comment_beside_its_member() -> None:
    assert meanings(Phase)["mutated"] == "the mutate phase is over and its outcome is known"


def test_the_size_limits_of_settings_are_those_that_transitions_enforce() -> None:
    promised = Settings()
    assert (promised.max_payload_bytes, promised.max_prepare_result_bytes, promised.max_state_bytes) == (
        DEFAULT_LIMITS.payload,
        DEFAULT_LIMITS.prepare_result,
        DEFAULT_LIMITS.state,
    )


def test_every_link_leads_to_a_file() -> None:
    def broken(page: Path, text: str) -> list[str]:
        links = [link for link in LINK.findall(text) if "://" not in link]
        return [link for link in links if not (page.parent / link).exists()]

    assert _wrong(broken) == {}


def test_every_file_and_test_that_is_named_exists() -> None:
    def missing(_: Path, text: str) -> list[str]:
        return [path for path, test in IN_THE_PROJECT.findall(text) if not _exists(path, test)]

    assert _wrong(missing) == {}


def test_every_row_of_the_crash_matrix_names_a_test_that_exists() -> None:
    page = (ROOT / "docs/design/failures.md").read_text(encoding="utf-8")
    rows = [
        line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| where", "| what |"))
    ]
    named = {row: IN_THE_PROJECT.findall(row.rpartition(" | ")[2]) for row in rows}
    assert len(rows) > 30
    assert [row for row, tests in named.items() if not [path for path, test in tests if test]] == []
    assert [test for tests in named.values() for path, test in tests if not _exists(path, test)] == []


def test_every_rule_that_is_named_is_a_rule() -> None:
    known = {rule.id for rule in rules.rules((ROOT / rules.PAGE).read_text(encoding="utf-8"))}
    assert _wrong(lambda _, text: set(re.findall(r"\b[LXREQ]-[A-Z]?\d+\b", text)) - known) == {}


def test_every_invariant_that_is_named_is_one() -> None:
    known = {invariant.name for invariant in INVARIANTS}

    def unknown(_: Path, text: str) -> set[str]:
        lists = re.findall(r"invariants? (`[a-z-]+`(?:(?:,| and) `[a-z-]+`)*)", text)
        return {name for each in lists for name in re.findall(r"`([a-z-]+)`", each)} - known

    assert _wrong(unknown) == {}


def test_every_decision_that_is_named_was_taken() -> None:
    taken = {path.name[:4] for path in (ROOT / docs.ADRS).glob("[0-9]*.md")}

    def unknown(_: Path, text: str) -> set[str]:
        lists = re.findall(r"ADR (\d{4}(?:, \d{4})*)", text)
        return {number for each in lists for number in each.split(", ")} - taken

    assert _wrong(unknown) == {}


def test_every_transition_of_the_execution_model_is_explained() -> None:
    page = (ROOT / "docs/design/execution.md").read_text(encoding="utf-8")
    missing = [
        f"{path.stem}.{verb}"
        for path in sorted((ROOT / "pipeline/transitions").glob("*.py"))
        for verb in _public_functions(path)
        if f"`{path.stem}.{verb}`" not in page
    ]
    assert missing == []


def test_every_decision_record_has_status_context_decision_and_consequences() -> None:
    wanted = ("\nStatus: ", "\n## Context\n", "\n## Decision\n", "\n## Consequences\n")
    for path in (ROOT / docs.ADRS).glob("[0-9]*.md"):
        text = path.read_text(encoding="utf-8")
        assert [part for part in wanted if part not in text] == [], path.name
        assert text.startswith(f"# {path.name[:4]} "), path.name
        assert len(text.splitlines()) <= 60, f"{path.name} is longer than a page"


def test_every_decision_record_has_a_number_of_its_own() -> None:
    numbers = [path.name[:4] for path in (ROOT / docs.ADRS).glob("[0-9]*.md")]
    assert len(numbers) == len(set(numbers))


def _exists(path: str, test: str) -> bool:
    if not (ROOT / path).exists():
        return False
    return not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


#: Steps that verbs share inside the layer; nothing outside calls them.
_SHARED = {
    "results.match_results",
    "results.requested_events",
    "results.reservation_error",
    "audit.record",
    "audit.subject_of",
    "events.event_rows",
    "events.unknown_topic_error",
    "mutations.illegal_transition",
}


def _public_functions(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return [name for name in found if f"{path.stem}.{name}" not in _SHARED and path.stem != "payload_schemas"]
