"""Text from outside is repeated on one line and within a limit."""

import pytest

from pipeline.text import printable_text, single_line, visible_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ü 世", "plain ü 世"),
        ("a\nb\x1b[2J\0", "a\\nb\\x1b[2J\\x00"),
        ("\ud800\u2028", "\\ud800\\u2028"),
        ("x" * 21, "x" * 20 + "…"),
    ],
)
def test_printable_text_is_escaped_and_cut(text: str, expected: str) -> None:
    assert printable_text(text, 20) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("550-no\r\n550  such\tuser\x1b", "550-no 550 such user"),
        (b"gr\xc3\xbc\xff", "grü\N{REPLACEMENT CHARACTER}"),
        (451, "451"),
        ("x" * 300, "x" * 200),
        ("", ""),
    ],
)
def test_a_single_line_has_no_breaks_and_ends_at_its_limit(text: object, expected: str) -> None:
    assert single_line(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("99,01\u00a0€ ü 世", "99,01\u00a0€ ü 世"),
        ("99\u202e10\u2066", "99\\u202e10\\u2066"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("two\nlines\u2028\x1b[2J", "two\nlines\\u2028\\x1b[2J"),
    ],
)
def test_text_that_hides_or_reorders_characters_is_escaped(text: str, expected: str) -> None:
    assert visible_text(text, keep="\n") == expected
