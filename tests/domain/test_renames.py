"""What a declared rename means, without a database."""

import pytest

from pipeline.domain.renames import (
    NameKind,
    Rename,
    declared_renames,
    in_present_names,
    rename_problem,
    reverted_renames,
)
from pipeline.domain.values import HandlerSpec, TopicSpec, WorkflowSpec


def spec(name: str = "billing", *, renamed_from: str = "", **given: str) -> WorkflowSpec:
    """A workflow with the topics ``t`` and ``u`` and the consumers ``h`` and ``k``, with former names if given."""
    return WorkflowSpec(
        name=name,
        renamed_from=renamed_from,
        topics=tuple(TopicSpec(name=each, renamed_from=given.get(each, "")) for each in ("t", "u")),
        handlers=tuple(
            HandlerSpec(name=each, subscribes=("t",), renamed_from=given.get(each, "")) for each in ("h", "k")
        ),
    )


def test_the_declared_renames_are_those_with_a_former_name() -> None:
    assert declared_renames(spec(t="s", k="j")) == [
        Rename(kind=NameKind.TOPIC, former="s", name="t"),
        Rename(kind=NameKind.HANDLER, former="j", name="k"),
    ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (spec(), None),
        (spec(t="s", h="g", renamed_from="payments"), None),
        (spec(renamed_from="billing"), "renamed from itself"),
        (spec(t="u"), "which is declared as well"),
        (spec(h="g", k="g"), "and so is 'h'"),
        (spec(t="x", h="x"), None),
    ],
)
def test_a_former_name_is_gone_from_the_code_and_named_once(given: WorkflowSpec, problem: str | None) -> None:
    found = rename_problem(given)
    assert (found is None) if problem is None else (found is not None and problem in found)


@pytest.mark.parametrize(
    ("declared", "existing", "reverts"),
    [
        ({"a"}, {"b"}, True),
        ({"a", "b"}, {"b"}, False),  # both are declared: two things
        ({"a"}, set(), False),  # nothing to take back
        ({"c"}, {"b"}, False),
    ],
)
def test_code_that_declares_only_the_former_name_takes_a_rename_back(
    declared: set[str], existing: set[str], reverts: bool
) -> None:
    found = reverted_renames(NameKind.HANDLER, declared, existing, {"a": "b"})
    assert found == ([Rename(kind=NameKind.HANDLER, former="b", name="a")] if reverts else [])


def test_older_code_is_read_in_the_present_names() -> None:
    read = in_present_names(spec(), {"t": "topic"}, {"h": "handler"})
    assert [topic.name for topic in read.topics] == ["topic", "u"]
    assert [(each.name, each.subscribes) for each in read.handlers] == [("handler", ("topic",)), ("k", ("topic",))]
