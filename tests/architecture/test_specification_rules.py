"""Every numbered rule has a test, or follows rules that have one."""

from pathlib import Path

import pytest

from tools import rules

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / rules.PAGE).read_text(encoding="utf-8")
RULES = {rule.id: rule for rule in rules.rules(PAGE)}


@pytest.fixture(scope="module")
def carried() -> dict[str, list[str]]:
    """The tests that carry each id."""
    return rules.tests_by_rule(ROOT / "tests")


def test_no_rule_has_two_rows() -> None:
    assert len(RULES) == len(rules.rules(PAGE))


def test_every_line_of_the_page_that_begins_with_an_id_is_a_rule() -> None:
    begun = [line.partition(":")[0].removeprefix("- ") for line in PAGE.splitlines() if line.startswith("- ")]
    assert begun == [*RULES]


def test_every_rule_has_a_test(carried: dict[str, list[str]]) -> None:
    assert [rule.id for rule in RULES.values() if not rule.same_as and rule.id not in carried] == []


def test_a_rule_that_follows_others_follows_rules_with_tests_of_their_own() -> None:
    followed = {other for rule in RULES.values() for other in rule.same_as}
    assert {other for other in followed if other not in RULES or RULES[other].same_as} == set()


def test_every_rule_id_of_a_test_is_a_rule(carried: dict[str, list[str]]) -> None:
    assert set(carried) - set(RULES) == set()


def test_a_rule_that_is_proved_names_a_module_that_exists() -> None:
    needed = {rule.module for rule in RULES.values() if not rule.same_as}
    assert [module for module in sorted(needed) if not (ROOT / "pipeline" / module).is_file()] == []


def test_each_specification_has_rules() -> None:
    assert [letter for letter in "LXREQ" if not any(id_.startswith(f"{letter}-") for id_ in RULES)] == []


def test_an_id_is_found_in_decorators_parameters_and_module_marks(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        'pytestmark = rule("X-1")\n'
        '@rule("X-2", "X-3")\n'
        "def test_a(): ...\n"
        'cases = [pytest.param(1, marks=rule("X-4"))]\n'
        "@pytest.mark.rule('X-5')\n"
        "def test_b(): ...\n",
        encoding="utf-8",
    )
    assert sorted(rules.tests_by_rule(tmp_path)) == ["X-1", "X-2", "X-3", "X-4", "X-5"]


def test_an_id_that_is_not_literal_text_is_refused_because_it_could_not_be_found(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("@rule(name)\ndef test_a(): ...\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: expected rule ids as literal text"):
        rules.tests_by_rule(tmp_path)


def test_the_tests_of_a_rule_are_filled_in_and_taken_out_again() -> None:
    line = "- X-1: A rule. (`a.py`: )\n"
    filled = rules.fill_in_tests(line, {"X-1": ["unit/test_a.py"]})
    assert filled == "- X-1: A rule. (`a.py`: `unit/test_a.py`)\n"
    assert rules.fill_in_tests(filled, {}) == line
