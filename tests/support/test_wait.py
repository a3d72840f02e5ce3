"""The waiting that every other test relies on."""

import pytest

from tests.support.wait import wait_for


def test_the_first_true_answer_is_returned() -> None:
    answers = iter([0, None, "", "yes", "no"])
    assert wait_for(lambda: next(answers)) == "yes"


def test_an_assertion_that_fails_counts_as_not_yet() -> None:
    answers = iter([1, 2, 3])

    def is_three() -> bool:
        assert next(answers) == 3
        return True

    assert wait_for(is_three)


def test_when_time_is_up_the_last_answer_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"the bell rings: not within 0 s; last seen: \[\]"):
        wait_for(lambda: [], within=0, why="the bell rings")
