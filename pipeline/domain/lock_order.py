"""The order in which every transaction locks rows, so that two transactions never wait for each other.

Within a table, rows are locked by id. A claim skips locked rows instead of waiting. The subscriptions of a workflow are
one lock, and come before every row: publishers share it, a deploy that changes them has it alone. No exception exists:
``tests/races/test_lock_order.py`` checks the statements, and ``tests/races/test_lock_order_of_transitions.py`` drives
every transition and every sweep against this order.
"""

from collections.abc import Iterable

#: Tables, first to last. A transaction may leave some out.
LOCK_ORDER = ("workflows", "runs", "mutations", "blocks", "deliveries", "handlers", "sessions")


def is_in_lock_order(tables: Iterable[str]) -> bool:
    """Whether a transaction that locks rows of these tables, one after the other, follows the order.

    The first lock of a table counts: its rows are usually locked already when it is named again.
    """
    ranks = [LOCK_ORDER.index(table) for table in dict.fromkeys(tables)]
    return ranks == sorted(ranks)
