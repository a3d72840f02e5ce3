"""A shop whose mail may leave its outcome unknown, for tests of what follows."""

from datetime import timedelta
from typing import Any

from pipeline import Backoff, ReconcilePolicy
from pipeline.testing import Inline, scripted
from tests.support.scripted_consumers import UNHURRIED, Shop

STEADY = ReconcilePolicy(backoff=Backoff(base=timedelta(seconds=10), cap=timedelta(minutes=10), jitter=0))


def a_shop(**bounds: Any) -> Shop:
    """A shop whose mail keeps to the usual policy, without chance in its pauses."""
    shop = Shop()
    shop.mail = scripted("mail", mutations=("send",), **{"policy": STEADY, "timeout": UNHURRIED, **bounds})
    return shop


def the_mutation(run: Inline) -> Any:
    """The only row of the ledger."""
    (row,) = run.ledger()
    return row
