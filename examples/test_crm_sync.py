"""Changes of one customer arrive in order and in few requests; a locked record delays nobody else."""

from collections.abc import Callable
from pathlib import Path

import pytest

from examples import crm_sync
from pipeline.testing import CrashPoint, Inline, assert_consumed


@pytest.fixture
def run(pipeline_run: Callable[..., Inline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inline:
    """The workflow with its stand-in, in an empty folder."""
    monkeypatch.setattr(crm_sync, "CRM", tmp_path / "crm")
    return pipeline_run(crm_sync.sync, connectors=[crm_sync.crm])


def publish(run: Inline, customer: str, *cities: str) -> None:
    """Publish changes with the customer as their key."""
    changes = [crm_sync.Change(customer=customer, city=city) for city in cities]
    run.publish(crm_sync.changed, *changes, key=customer, prefix=f"{customer}:")


def test_changes_of_a_customer_arrive_in_order_and_together(run: Inline) -> None:
    publish(run, "7", "Rome", "Oslo", "Bern")
    publish(run, "8", "Lima")
    run.run_until_idle()
    assert_consumed(run, crm_sync.changed)
    found = crm_sync.crm.record("7")
    assert (found["city"], found["requests"]) == ("Bern", 1)
    assert crm_sync.crm.record("8")["city"] == "Lima"


def test_a_locked_record_holds_its_own_changes_only(run: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crm_sync.crm, "is_busy_for", frozenset({"7"}))
    publish(run, "7", "Rome")
    publish(run, "8", "Lima")
    run.run()
    publish(run, "7", "Oslo")
    run.run()
    assert (crm_sync.crm.record("7"), crm_sync.crm.record("8")["city"]) == ({}, "Lima")
    monkeypatch.setattr(crm_sync.crm, "is_busy_for", frozenset())
    run.run_until_idle()
    assert_consumed(run, crm_sync.changed)
    assert crm_sync.crm.record("7")["city"] == "Oslo", "the later change is not overwritten by the one that waited"


def test_a_worker_that_dies_after_the_request_repeats_nothing(run: Inline) -> None:
    publish(run, "7", "Rome", "Oslo")
    with run.crash_at(CrashPoint.CALLED):
        run.run()
    run.run_until_idle()
    assert_consumed(run, crm_sync.changed)
    assert crm_sync.crm.record("7")["requests"] == 1
