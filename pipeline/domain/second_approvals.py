"""Which answers a second person must confirm, for a mutation of a high value. Pure: no I/O."""

from enum import StrEnum


class ProposedAct(StrEnum):
    """An answer that states a result or lets a request be sent."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    APPROVE = "approve"
