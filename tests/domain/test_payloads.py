"""What may be stored as JSON, and that a refusal names the value and the path to it."""

import json
import math
from collections import OrderedDict, UserDict
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.domain.errors import InvalidInputError, PayloadError
from pipeline.domain.payloads import (
    checked_json,
    checked_name,
    checked_text,
    distinct_keys,
    is_plain,
    json_copy,
    parsed_json,
    storable_text,
)
from pipeline.domain.values import DEFAULT_LIMITS, Limits

MUCH = 10**6


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: int


def nested(levels: int, core: Any = 1) -> Any:
    for _ in range(levels):
        core = [core]
    return core


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
storable = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)


@given(storable)
def test_every_json_value_that_postgres_accepts_is_returned_unchanged(value: Any) -> None:
    assert checked_json(value, what="payload", limit=MUCH) is value


anything = st.recursive(
    scalars
    | st.floats()
    | st.text()
    | st.sampled_from([Colour.RED, Level.HIGH, b"x"])
    | st.integers(max_value=-(2**70)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(anything, st.integers(min_value=1, max_value=2_000))
def test_what_the_quick_check_accepts_is_accepted_by_the_exact_one(value: Any, limit: int) -> None:
    if is_plain(value, limit):
        assert json_copy(value, what="payload", limit=limit) == value


@pytest.mark.parametrize(
    "value", [{"id": 1, "rate": 0.5, "tags": ["ü", None, True, {"line": "\n"}]}, "x" * 100, [], None]
)
def test_a_usual_payload_needs_the_quick_check_only(value: Any) -> None:
    assert is_plain(value, MUCH)


def test_the_quick_check_ends_before_a_list_that_shares_its_parts_explodes() -> None:
    row = [0] * 1_000
    assert not is_plain([row] * 1_000_000, 10_000)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        10**100,
        0.5,
        -0.0,
        1e308,
        "",
        "ü😀",
        [],
        {},
        (1, 2),
        Point(1, 2),
        {"": 1},
        Colour.RED,
        Level.HIGH,
    ],
)
def test_plain_values_tuples_and_enums_are_accepted(value: Any) -> None:
    assert checked_json(value, what="payload", limit=MUCH) is value


@pytest.mark.parametrize("value", [{"a": 1}, OrderedDict(a=1)], ids=["dict", "ordered"])
def test_dictionaries_are_accepted(value: Any) -> None:
    assert checked_json({"in": value}, what="payload", limit=MUCH) == {"in": value}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("a\0b", "$ has a NUL character"),
        ({"a": ["x", "\0"]}, "$.a[1] has a NUL character"),
        ({"a": {"b": "\ud800"}}, "$.a.b has a NUL character or half a surrogate pair"),
        (["\udfff"], "$[0] has a NUL character or half a surrogate pair"),
        (math.nan, "$ is nan, which JSON does not have"),
        ({"rate": math.inf}, "$.rate is inf"),
        ([0.0, -math.inf], "$[1] is -inf"),
        ({1: "x"}, "$ has the key 1"),
        ({None: "x"}, "$ has the key None"),
        ({("a", "b"): "x"}, "$ has the key ('a', 'b')"),
        ({"in": {"\0": 1}}, r"$.in has the key '\x00'"),
        ({"\ud800": 1}, r"$ has the key '\ud800'"),
        ({"": {"": {"in": "\0"}}}, "$...in has a NUL character"),
        ({1, 2}, "$ is a set"),
        ({"when": datetime(2030, 1, 1, tzinfo=UTC)}, "$.when is a datetime"),
        ([Decimal("0.1")], "$[0] is a Decimal"),
        ({"id": UUID(int=1)}, "$.id is a UUID"),
        ((b"x",), "$[0] is a bytes"),
        ({"f": print}, "$.f is a builtin_function_or_method"),
        (iter([1]), "$ is a list_iterator"),
        ({"a": [1, {"b": {3}}], "c": {4}}, "$.a[1].b is a set"),
    ],
)
def test_an_unstorable_value_is_refused_with_its_path(value: Any, problem: str) -> None:
    with pytest.raises(PayloadError) as caught:
        checked_json(value, what="payload of 'm-1'", limit=MUCH)
    assert str(caught.value).startswith(f"payload of 'm-1': {problem}")
    is_text = "NUL" in problem or "has the key" in problem
    expected = "text without NUL and lone surrogates" if is_text else "a JSON object, array, string, number, boolean"
    assert f"expected {expected}" in str(caught.value)
    assert caught.value.what == "payload of 'm-1'"


@pytest.mark.parametrize(
    "check",
    [
        lambda: checked_name(" " * 200_000, what="key"),
        lambda: checked_name(["x" * 200_000], what="key"),
        lambda: checked_text("\0" * 200_000, what="title"),
        lambda: checked_json({"k" * 200_000: "\0"}, what="payload", limit=MUCH),
        lambda: checked_json({"k\n\x1b[31m": "\0"}, what="payload", limit=MUCH),
        lambda: checked_json({"\0" * 200_000: 1}, what="payload", limit=MUCH),
    ],
)
def test_a_refusal_quotes_little_of_the_input_and_stays_on_one_line(check: Callable[[], object]) -> None:
    with pytest.raises(PayloadError) as caught:
        check()
    words = str(caught.value)
    assert (len(words) < 250, words.isprintable()) == (True, True), words[:500]


def test_sixty_four_levels_are_accepted_and_one_more_is_refused() -> None:
    deepest = nested(64)
    assert checked_json(deepest, what="payload", limit=MUCH) is deepest
    with pytest.raises(PayloadError, match=r"^payload: \$(\[0\])+.*… is nested more than 64 levels deep"):
        checked_json(nested(65), what="payload", limit=MUCH)


def test_a_value_that_contains_itself_is_refused_as_too_deep() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(PayloadError, match="nested more than 64 levels deep") as caught:
        checked_json(loop, what="payload", limit=MUCH)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", ["x" * 98, "ü" * 49, ["a"] * 24 + ["b"], {"k": "v" * 92}])
def test_the_size_is_counted_in_bytes_of_compact_json(value: Any) -> None:
    size = len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    assert checked_json(value, what="state", limit=size) is value
    with pytest.raises(PayloadError, match=f"^state: {size} bytes of JSON; expected at most {size - 1} bytes"):
        checked_json(value, what="state", limit=size - 1)


@pytest.mark.parametrize("name", ["a", "orders.paid", "ümlaut 😀", " a ", "x" * 255, "'; DROP TABLE runs; --"])
def test_printable_text_of_bounded_length_is_a_name(name: str) -> None:
    assert checked_name(name, what="topic") == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "topic: '' is not a name; expected non-empty text"),
        (" \t\n", r"topic: ' \t\n' is not a name; expected non-empty text"),
        (None, "topic: None is not a name"),
        (7, "topic: 7 is not a name"),
        (b"orders", "topic: b'orders' is not a name"),
        (["orders"], "topic: ['orders'] is not a name"),
        ("x" * 256, "topic: 256 characters; expected at most 255 characters"),
        ("a\0", r"topic: 'a\x00' has control characters; expected printable text"),
        ("a\nb", r"topic: 'a\nb' has control characters"),
        ("a\x1fb", r"topic: 'a\x1fb' has control characters"),
        ("\ud800", r"topic: '\ud800' has control characters"),
    ],
)
def test_a_wrong_name_is_refused_with_the_found_and_the_expected_text(name: Any, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        checked_name(name, what="topic")
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("Nothing was written.")


def test_a_name_may_be_given_a_limit_of_its_own() -> None:
    assert checked_name("abc", what="key", limit=3) == "abc"
    with pytest.raises(PayloadError, match="4 characters; expected at most 3 characters"):
        checked_name("abcd", what="key", limit=3)


@pytest.mark.parametrize("name", Limits.model_fields)
def test_every_limit_is_positive_and_frozen(name: str) -> None:
    assert getattr(DEFAULT_LIMITS, name) > 0
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})
    with pytest.raises(ValueError, match="frozen"):
        setattr(DEFAULT_LIMITS, name, 1)


@pytest.mark.parametrize("value", [MappingProxyType({"a": 1}), UserDict(a=1)], ids=["proxy", "user dict"])
def test_a_mapping_that_is_no_dictionary_is_accepted_or_refused_with_our_error(value: Any) -> None:
    try:
        assert checked_json(value, what="payload", limit=MUCH) == {"a": 1}
    except PayloadError as refused:
        assert type(value).__qualname__ in str(refused)  # noqa: PT017 - either answer is right


def test_a_number_too_long_to_write_is_refused_with_our_error() -> None:
    with pytest.raises(PayloadError):
        checked_json({"n": 10**5000}, what="payload", limit=MUCH)


@pytest.mark.parametrize("name", ["a\x7f", "a\x85b", "a\x9b"])
def test_no_control_character_of_any_kind_is_part_of_a_name(name: str) -> None:
    with pytest.raises(PayloadError, match="control characters"):
        checked_name(name, what="topic")


def test_a_list_that_shares_its_parts_is_refused_before_it_explodes() -> None:
    shared: list[Any] = []
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(PayloadError, match="more than 1000 values"):
        checked_json(shared, what="payload", limit=1000)


def test_text_longer_than_its_limit_is_refused_by_its_length() -> None:
    with pytest.raises(PayloadError, match="11 characters; expected at most 10"):
        checked_text("x" * 11, what="reason", limit=10)


def test_text_about_a_failure_is_cleaned_and_cut_but_never_refused() -> None:
    assert storable_text("a\0b\ud800c") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"
    assert len(storable_text("x" * 20_000)) == 10_001


def test_of_two_values_for_one_key_neither_counts() -> None:
    assert json.loads('{"a": {"b": 1}, "b": 2}', object_pairs_hook=distinct_keys) == {"a": {"b": 1}, "b": 2}
    with pytest.raises(ValueError, match=r"the key 'b\\n' is there twice"):
        json.loads('[{"a": 1, "b\\n": 1, "b\\n": 2}]', object_pairs_hook=distinct_keys)


def test_json_from_outside_is_read_or_refused_with_what_it_is() -> None:
    assert parsed_json('{"id": "ch_1"}', what="--result") == {"id": "ch_1"}
    for text, problem in (
        ("{", "Line 3 is no JSON"),
        ('{"a": 1, "a": 2}', "is there twice"),
        ("[" * 100_000, "Line 3 is nested too deeply to be read"),
    ):
        with pytest.raises(InvalidInputError, match=problem):
            parsed_json(text, what="Line 3")
    with pytest.raises(InvalidInputError, match=r"Expected for example 1\.$"):
        parsed_json("", what="--result", expected="for example 1")
