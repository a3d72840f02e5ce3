"""Whether the ledger and the world agree: a pure function of what both wrote down.

The world's book is believed. For every key both sides must say the same, for every order there is one
effect at most, and no order is lost: it is done, or it is a question that somebody was asked.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.domain.states import MutationStatus

#: Nobody knows, and somebody was asked.
UNRESOLVED = frozenset({MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEffect:
    """What the world carried out."""

    key: str
    order: str
    operation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A row of the ledger."""

    key: str
    order: str
    operation: str
    status: str
    is_found_late: bool = False  #: it was settled as failed, and people were told that it happened after all
    resolved_by: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDelivery:
    """What became of an order."""

    order: str
    status: str
    key: str | None = None  #: of the mutation of the run that holds or consumed it


@dataclass(frozen=True, kw_only=True)
class ChaosRecords:
    """Everything that was written down by both sides."""

    orders: Sequence[str]
    ledger: Sequence[LedgerEntry]
    effects: Sequence[ProviderEffect]
    deliveries: Sequence[OrderDelivery]
    completed_orders: Sequence[str]  #: orders whose next phase said that they are done
    findings: Sequence[str] = ()  #: what the doctor says

    @cached_property
    def by_key(self) -> dict[str, list[ProviderEffect]]:
        """Effects by their key."""
        found: dict[str, list[ProviderEffect]] = defaultdict(list)
        for effect in self.effects:
            found[effect.key].append(effect)
        return found

    @cached_property
    def unresolved(self) -> list[LedgerEntry]:
        """What a person is asked, and what surfaced after it had been settled."""
        return [entry for entry in self.ledger if entry.status in UNRESOLVED or entry.is_found_late]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A place where what was promised is not so, with both sides."""

    description: str
    order: str = ""
    key: str = ""
    ledger: str = ""
    provider: str = ""

    def __str__(self) -> str:
        sides = {"order": self.order, "key": self.key, "ledger": self.ledger, "world": self.provider}
        return f"{self.description} ({'; '.join(f'{name}: {said}' for name, said in sides.items() if said)})"


def judge(facts: ChaosRecords) -> list[Problem]:
    """Every disagreement. An empty list is the promise kept."""
    return [
        *_row_problems(facts),
        *_unmatched_effects(facts),
        *_order_problems(facts),
        *_delivery_problems(facts),
        *(Problem(description=f"the doctor says: {words}") for words in facts.findings),
    ]


def _row_problems(facts: ChaosRecords) -> Iterator[Problem]:
    """Each row says of its key what the world says of it."""
    for entry in facts.ledger:
        count = len(facts.by_key.get(entry.key, ()))
        what = _disagreement(entry, count)
        if what:
            yield Problem(
                description=what,
                order=entry.order,
                key=entry.key,
                ledger=_describe(entry),
                provider=f"{count} effects of this key",
            )


def _disagreement(entry: LedgerEntry, count: int) -> str:
    if entry.status == MutationStatus.APPLIED and count != 1:
        return "the ledger says that it happened" if count == 0 else "it happened more than once"
    if entry.status == MutationStatus.FAILED and not entry.is_found_late and count:
        return "the ledger says that it did not happen"
    if entry.is_found_late and count != 1:
        return "the ledger says that it surfaced late"
    if entry.status in UNRESOLVED and count > 1:
        return "it happened more than once"
    if entry.status in (MutationStatus.PENDING, MutationStatus.IN_FLIGHT):
        return "the ledger has not come to an end with it"
    return ""


def _unmatched_effects(facts: ChaosRecords) -> Iterator[Problem]:
    """Each effect is that of exactly one row, and of the order and operation that row is about."""
    rows: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in facts.ledger:
        rows[entry.key].append(entry)
    for key, effects in facts.by_key.items():
        found = rows.get(key, [])
        same = [entry for entry in found if (entry.order, entry.operation) == (effects[0].order, effects[0].operation)]
        if len(found) != 1 or len(same) != 1:
            words = f"{len(found)} rows: {', '.join(_describe(entry) for entry in found)}" if found else "no row"
            effect = effects[0]
            yield Problem(
                description="an effect that is not that of one row",
                order=effect.order,
                key=key,
                ledger=words,
                provider=f"{effect.operation} of {effect.order}",
            )


def _order_problems(facts: ChaosRecords) -> Iterator[Problem]:
    """Each order has one effect at most, whatever keys it went out under and whoever was told."""
    counted = Counter(effect.order for effect in facts.effects)
    for order, count in counted.items():
        if count > 1:
            rows = [entry for entry in facts.ledger if entry.order == order]
            yield Problem(
                description="an order had its effect more than once",
                order=order,
                ledger=", ".join(f"{entry.key}: {_describe(entry)}" for entry in rows),
                provider=", ".join(effect.key for effect in facts.effects if effect.order == order),
            )


def _delivery_problems(facts: ChaosRecords) -> Iterator[Problem]:
    """No order is lost: it was consumed with its effect and its follow-up, or it is a question."""
    applied = {entry.key for entry in facts.ledger if entry.status == MutationStatus.APPLIED}
    asked = {entry.key for entry in facts.ledger if entry.status in UNRESOLVED}
    followed, there = Counter(facts.completed_orders), Counter(delivery.order for delivery in facts.deliveries)
    for order in facts.orders:
        if there[order] != 1:
            yield Problem(description=f"an order was published once and delivered {there[order]} times", order=order)
    for delivery in facts.deliveries:
        is_done = delivery.status == "consumed"
        if delivery.key not in (applied if is_done else asked):
            what = "an order was consumed without an effect" if is_done else "an order is neither done nor a question"
            yield Problem(description=what, order=delivery.order, key=delivery.key or "", ledger=delivery.status)
        if followed[delivery.order] != int(is_done):
            what = f"an order that is {delivery.status} was reported as done {followed[delivery.order]} times"
            yield Problem(description=what, order=delivery.order, key=delivery.key or "")


def _describe(entry: LedgerEntry) -> str:
    by = f" by {entry.resolved_by}" if entry.resolved_by else ""
    late = ", surfaced late" if entry.is_found_late else ""
    return f"{entry.operation} {entry.status}{by}{late}"
