"""What becomes of an event on its way to one consumer.

An event never changes; its *delivery* to each subscribed consumer does. The specs' "event status"
is the status of that delivery.
"""

from collections.abc import Mapping
from enum import StrEnum


class DeliveryStatus(StrEnum):
    """Where one event stands for one consumer."""

    PENDING = "pending"  #: waits to be selected by a prepare
    RESERVED = "reserved"  #: pinned as the input of exactly one run
    CONSUMED = "consumed"  #: its run committed
    SKIPPED = "skipped"  #: a person chose to go on without it
    QUARANTINED = "quarantined"  #: set aside with the error that its runs met


DELIVERY_MOVES: Mapping[DeliveryStatus, frozenset[DeliveryStatus]] = {
    DeliveryStatus.PENDING: frozenset({DeliveryStatus.RESERVED, DeliveryStatus.SKIPPED, DeliveryStatus.QUARANTINED}),
    DeliveryStatus.RESERVED: frozenset(
        {
            DeliveryStatus.CONSUMED,
            DeliveryStatus.SKIPPED,
            DeliveryStatus.PENDING,
            DeliveryStatus.QUARANTINED,
        }
    ),
    DeliveryStatus.QUARANTINED: frozenset({DeliveryStatus.PENDING, DeliveryStatus.SKIPPED}),
    DeliveryStatus.CONSUMED: frozenset(),
    DeliveryStatus.SKIPPED: frozenset(),
}
