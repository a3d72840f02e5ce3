"""Sets of statuses and phases as SQL lists, for conditions that several statements share.

A single status is written in an f-string: ``status = '{RunStatus.ACTIVE}'``. ``tests/architecture`` refuses text that
names a member without its enum.
"""

from enum import StrEnum

from pipeline.domain.states import DeliveryStatus, MutationStatus, Phase


def sql_list(*members: StrEnum) -> str:
    """Write members of an enum as a SQL list: ``('applied', 'failed')``."""
    return f"({', '.join(repr(member.value) for member in members)})"


RESOLVED_MUTATION = sql_list(MutationStatus.APPLIED, MutationStatus.FAILED)
OPEN_MUTATION = sql_list(
    MutationStatus.PENDING, MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE
)
#: Its outcome is unknown, and no call of it is under way.
MUTATION_IN_DOUBT = sql_list(MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE)
#: It was sent, and is not known to have failed.
MUTATION_MAY_HAVE_HAPPENED = sql_list(
    MutationStatus.IN_FLIGHT, MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE, MutationStatus.APPLIED
)
#: The run has not chosen its inputs yet.
BEFORE_PREPARED = sql_list(Phase.PENDING, Phase.PREPARING)
#: The outcome of the run's mutation is known, and the run is not committed.
AFTER_MUTATION = sql_list(Phase.MUTATED, Phase.EMITTING)
#: A run holds the delivery, or may.
OPEN_DELIVERY = sql_list(DeliveryStatus.PENDING, DeliveryStatus.RESERVED)
#: No run holds the delivery, and it is not done.
UNOWNED_DELIVERY = sql_list(DeliveryStatus.PENDING, DeliveryStatus.QUARANTINED)
DONE_DELIVERY = sql_list(DeliveryStatus.CONSUMED, DeliveryStatus.SKIPPED)
#: An input of a run that is not over.
HELD_INPUT = sql_list(DeliveryStatus.RESERVED, DeliveryStatus.SKIPPED)
