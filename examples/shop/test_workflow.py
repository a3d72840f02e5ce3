"""Test the workflow on a real Postgres, also with a worker that dies in a call."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline.testing import CrashPoint, Inline, assert_consumed

from . import connector
from .workflow import Order, messages, paid, shipped, workflow

ORDER = Order(order="4711", to="ada")


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the messages that were sent."""
    monkeypatch.setattr(connector, "SENT", tmp_path / "sent.txt")
    return tmp_path / "sent.txt"


@pytest.fixture
def run(pipeline_run: Callable[..., Inline], sent: Path) -> Inline:
    """The workflow, without events."""
    return pipeline_run(workflow, connectors=[messages])


def test_a_paid_order_gets_one_mail(run: Inline, sent: Path) -> None:
    run.publish(paid, ORDER)
    run.run()
    assert_consumed(run, paid)
    assert sent.read_text().endswith(" ada: Order 4711 is paid\n")


def test_a_dead_worker_sends_no_second_mail(run: Inline, sent: Path) -> None:
    run.publish(paid, ORDER)
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    run.run_until_idle()
    assert_consumed(run, paid)
    assert len(sent.read_text().splitlines()) == 1


def test_an_unknown_text_message_is_a_question(run: Inline, sent: Path) -> None:
    run.publish(shipped, ORDER)
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    run.run_until_idle()
    assert [mutation.status for mutation in run.ledger()] == ["indeterminate"]
    assert len(sent.read_text().splitlines()) == 1
