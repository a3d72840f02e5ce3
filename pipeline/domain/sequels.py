"""What became of a run that stopped: what continued it, or what it waits for. Pure: no I/O.

The status of a stopped run says why it stopped and never changes. So a list of statuses does not tell what still waits.
"""

from enum import StrEnum

from pipeline.domain.states import UNRESOLVED, MutationOutcome, MutationStatus, RunStatus


class Sequel(StrEnum):
    """What became of a run that stopped."""

    NONE = ""  #: it has not stopped, or it is committed
    RETRIED = "retried"  #: a retry continued it
    RELEASED = "inputs released"  #: it is over; its inputs went back for another run, or were quarantined
    ENDED = "ended"  #: it is over; it had no inputs, or they are settled
    WAITS_FOR_APPROVAL = "waits for approval"  #: an operator approves or rejects its request
    WAITS_FOR_RECONCILE = "waits for reconcile"  #: its mutation is in doubt
    WAITS_FOR_OPERATOR = "waits for an operator"  #: its mutation is indeterminate
    WAITS_FOR_RETRY = "waits for a retry"  #: its outcome is known, and a new run continues from there


def sequel_of(
    status: RunStatus,
    outcome: MutationOutcome,
    mutation: MutationStatus | None,
    *,
    has_inputs: bool,
    is_retry_pending: bool,
    is_retried: bool,
) -> Sequel:
    """Return what became of a run, from its own row, its mutation, and whether a retry exists."""
    if status in (RunStatus.ACTIVE, RunStatus.COMMITTED):
        return Sequel.NONE
    if is_retried:
        return Sequel.RETRIED
    if mutation is MutationStatus.PENDING:
        return Sequel.WAITS_FOR_APPROVAL
    if mutation is MutationStatus.INDETERMINATE:
        return Sequel.WAITS_FOR_OPERATOR
    if mutation in UNRESOLVED:
        return Sequel.WAITS_FOR_RECONCILE
    return _after_resolution(outcome, has_inputs=has_inputs, is_retry_pending=is_retry_pending)


def _after_resolution(outcome: MutationOutcome, *, has_inputs: bool, is_retry_pending: bool) -> Sequel:
    if is_retry_pending:
        return Sequel.WAITS_FOR_RETRY
    is_settled = outcome in (MutationOutcome.SUCCESS, MutationOutcome.SKIPPED)
    return Sequel.RELEASED if has_inputs and not is_settled else Sequel.ENDED
