"""The order of row locks as a rule."""

import itertools

import pytest

from pipeline.domain.lock_order import LOCK_ORDER, is_in_lock_order
from tests.support.source_code import ROOT


def test_a_transaction_may_leave_tables_out_and_stay_at_one() -> None:
    assert is_in_lock_order(LOCK_ORDER)
    assert is_in_lock_order(())
    assert is_in_lock_order(["workflows", "runs", "runs", "blocks"])


@pytest.mark.parametrize(("first", "then"), [*itertools.pairwise(LOCK_ORDER)])
def test_no_transaction_goes_back(first: str, then: str) -> None:
    assert is_in_lock_order([first, then])
    assert not is_in_lock_order([then, first])


def test_the_documents_show_the_same_order() -> None:
    shown = " → ".join(table.removesuffix("s").replace("deliverie", "delivery") for table in LOCK_ORDER)
    assert f"**{shown}**" in (ROOT / "docs/design/execution.md").read_text()
