"""How an incident is named."""

from datetime import UTC, datetime, timedelta

from pipeline.domain.incidents import incident_id, is_same_incident

START = datetime(2000, 1, 1, tzinfo=UTC)


def named(minutes: int, error: str = "TimeoutError") -> str:
    return incident_id("pay.charge", error, START + timedelta(minutes=minutes))


def test_an_incident_keeps_its_name_while_its_oldest_questions_are_resolved() -> None:
    assert is_same_incident(named(0), named(0))
    assert is_same_incident(named(9), named(0))


def test_the_name_of_an_incident_is_not_that_of_another_one() -> None:
    assert not is_same_incident(named(0, error="WorkerLost"), named(0))
    assert not is_same_incident(named(16), named(0)), "it began too late to be the same"
    assert not is_same_incident(named(0), named(5)), "it began earlier"
    assert not is_same_incident(named(0), "inc-1")
