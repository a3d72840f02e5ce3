"""Test the receipts workflow as a user does. The fixtures come with the package."""

from collections.abc import Callable

import pytest

from examples.receipts import OrderPaid, paid, receipts, sent
from pipeline.testing import CrashPoint, Does, Inline, Scripted, assert_consumed, assert_runs, scripted

ORDER = OrderPaid(order="4711", email="ada@example.org")


@pytest.fixture
def mail() -> Scripted:
    """The outside system: it replaces the real mail connector."""
    return scripted("mail", mutations=["send"], make_result=lambda effect: {"message_id": effect.key})


@pytest.fixture
def run(pipeline_run: Callable[..., Inline], mail: Scripted) -> Inline:
    """The workflow, with one paid order."""
    inline = pipeline_run(receipts, connectors=[mail])
    inline.publish(paid, ORDER)
    return inline


def test_a_paid_order_gets_one_receipt(run: Inline, mail: Scripted) -> None:
    run.run()
    assert_consumed(run, paid)
    assert mail.times(to="ada@example.org") == 1
    assert [event.message_id for event in run.events(sent)] == ["receipt:4711"]


def test_a_mail_server_that_is_busy_is_asked_again_later(run: Inline, mail: Scripted) -> None:
    mail.will(Does.FAILS)
    run.run()
    assert_runs(run, "paused:transient")
    run.run_until_idle()
    assert_runs(run, "paused:transient", "committed")
    assert mail.times(to="ada@example.org") == 1


def test_a_mail_whose_answer_was_lost_is_not_sent_again(run: Inline, mail: Scripted) -> None:
    mail.will(Does.TIMES_OUT_AFTER)
    run.run()
    assert_consumed(run, paid)
    assert mail.times(to="ada@example.org") == 1


@pytest.mark.parametrize(
    "point", [CrashPoint.IN_FLIGHT, CrashPoint.CALLED, CrashPoint.OUTCOME_SAVED, CrashPoint.NEXT_RAN]
)
def test_a_worker_that_dies_sends_no_second_mail(run: Inline, mail: Scripted, point: CrashPoint) -> None:
    with run.crash_at(point):
        run.run()
    run.run_until_idle()
    assert_consumed(run, paid)
    assert mail.times(to="ada@example.org") == 1
