"""What may become of an event on its way to one consumer."""

import pytest

from pipeline.domain.states import DELIVERY_TRANSITIONS, DeliveryStatus


def test_every_status_has_a_row_in_the_transition_table() -> None:
    assert set(DELIVERY_TRANSITIONS) == set(DeliveryStatus)


def test_the_transitions_are_exactly_these() -> None:
    assert {(source.value, target.value) for source, targets in DELIVERY_TRANSITIONS.items() for target in targets} == {
        ("pending", "reserved"),
        ("pending", "skipped"),
        ("pending", "quarantined"),
        ("reserved", "consumed"),
        ("reserved", "skipped"),
        ("reserved", "pending"),
        ("reserved", "quarantined"),
        ("quarantined", "pending"),
        ("quarantined", "skipped"),
    }


def test_a_consumed_or_skipped_event_is_never_handed_out_again() -> None:
    done = [status for status in DeliveryStatus if not DELIVERY_TRANSITIONS[status]]
    assert done == [DeliveryStatus.CONSUMED, DeliveryStatus.SKIPPED]


def test_only_a_reserved_event_is_consumed() -> None:
    sources = [source for source, targets in DELIVERY_TRANSITIONS.items() if DeliveryStatus.CONSUMED in targets]
    assert sources == [DeliveryStatus.RESERVED]


@pytest.mark.parametrize("status", DeliveryStatus)
def test_no_status_leads_to_itself(status: DeliveryStatus) -> None:
    assert status not in DELIVERY_TRANSITIONS[status]


@pytest.mark.parametrize("status", [DeliveryStatus.PENDING, DeliveryStatus.RESERVED, DeliveryStatus.QUARANTINED])
def test_an_operator_can_skip_every_event_that_is_not_done(status: DeliveryStatus) -> None:
    assert DeliveryStatus.SKIPPED in DELIVERY_TRANSITIONS[status]
