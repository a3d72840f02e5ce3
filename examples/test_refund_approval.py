"""Small refunds go out at once, large ones when they are approved, and rejected ones never."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from examples import refund_approval as example
from pipeline.testing import Inline, assert_consumed


@pytest.fixture
def run(pipeline_run: Callable[..., Inline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inline:
    """The workflow with its stand-in, and two returns."""
    monkeypatch.setattr(example, "BANK", tmp_path / "bank.txt")
    run = pipeline_run(example.returns, connectors=[example.bank])
    returns = {"small": Decimal("9.90"), "large": Decimal("250.00")}
    run.publish(example.accepted, *(example.Return(order=order, euros=euros) for order, euros in returns.items()))
    run.run()
    return run


def booked() -> list[list[str]]:
    """The refunds of the bank: order and amount."""
    return sorted(line.split()[1:] for line in example.BANK.read_text().splitlines())


def test_only_the_small_refund_needs_no_approval(run: Inline) -> None:
    assert booked() == [["small", "9.90"]]
    (waiting,) = [row for row in run.ledger() if row.status != "applied"]
    assert (waiting.status, waiting.headline) == ("pending", "Refund 250.00 EUR for order large")


def test_an_approved_refund_is_booked_once(run: Inline) -> None:
    (waiting,) = [row for row in run.ledger() if row.status != "applied"]
    run.approve(waiting)
    run.run_until_idle()
    assert_consumed(run, example.accepted)
    assert booked() == [["large", "250.00"], ["small", "9.90"]]


def test_a_rejected_refund_is_never_booked(run: Inline) -> None:
    (waiting,) = [row for row in run.ledger() if row.status != "applied"]
    run.reject(waiting)
    run.run_until_idle()
    assert booked() == [["small", "9.90"]]
    assert [event.message_id for event in run.events(example.refunded)] == ["refunded:small"]
