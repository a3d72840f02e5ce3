"""Compare the ledger with the provider's files. A pure function of both records.

The provider's files are the truth. Three things must hold:

- for every key, both sides agree;
- every order has at most one effect. If its operation honours keys, also where a "not found" was wrong;
- no order is lost: it is done, or an operator was notified about its mutation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.chaos.faults import KEYED, OPERATIONS, SEARCH_LAGS, SETTLE
from pipeline.domain.states import MutationStatus, Resolver

#: The outcome is unknown, and an operator is notified.
UNRESOLVED = frozenset({MutationStatus.NEEDS_RECONCILE, MutationStatus.INDETERMINATE})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEffect:
    """An effect that the provider carried out."""

    key: str
    order: str
    operation: str
    at: float = 0.0  #: seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A row of the ledger."""

    key: str
    order: str
    operation: str
    status: str
    is_found_late: bool = False  #: it was resolved as failed, and operators were notified of the late effect
    resolved_by: str | None = None
    resolved_at: float = 0.0  #: seconds since 1970; zero: it is not resolved
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDelivery:
    """The end of an order."""

    order: str
    status: str
    key: str | None = None  #: of the mutation of the run that holds or consumed it


@dataclass(frozen=True, kw_only=True)
class ChaosRecords:
    """Everything that both sides recorded."""

    orders: Sequence[str]
    ledger: Sequence[LedgerEntry]
    effects: Sequence[ProviderEffect]
    deliveries: Sequence[OrderDelivery]
    completed_orders: Sequence[str]  #: orders whose next phase reported them as done
    findings: Sequence[str] = ()  #: problems that the doctor found

    @cached_property
    def by_key(self) -> dict[str, list[ProviderEffect]]:
        """Effects by their key."""
        found: dict[str, list[ProviderEffect]] = defaultdict(list)
        for effect in self.effects:
            found[effect.key].append(effect)
        return found

    @cached_property
    def unresolved(self) -> list[LedgerEntry]:
        """Mutations for an operator: unresolved, or with a late effect that is not the effect of their repeat."""
        return [
            entry
            for entry in self.ledger
            if entry.status in UNRESOLVED or (entry.is_found_late and entry.key not in self.applied_keys)
        ]

    @cached_property
    def applied_keys(self) -> frozenset[str]:
        """Keys of the mutations that happened."""
        return frozenset(entry.key for entry in self.ledger if entry.status == MutationStatus.APPLIED)

    @cached_property
    def wrong_absences(self) -> list[LedgerEntry]:
        """Mutations that a reconcile attempt did not find, although they had happened before."""
        return [
            entry
            for entry in self.ledger
            if entry.status == MutationStatus.FAILED
            and entry.resolved_by == Resolver.RECONCILE
            and any(effect.at < entry.resolved_at for effect in self.by_key.get(entry.key, ()))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A broken promise, with the records of both sides."""

    description: str
    order: str = ""
    key: str = ""
    ledger: str = ""
    provider: str = ""

    def __str__(self) -> str:
        sides = {"order": self.order, "key": self.key, "ledger": self.ledger, "provider": self.provider}
        return f"{self.description} ({'; '.join(f'{name}: {text}' for name, text in sides.items() if text)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFigures:
    """The effects of one operation, counted at the provider."""

    operation: str
    is_keyed: bool
    is_lagging: bool  #: its search lags longer than its settle window
    orders: int  #: with an effect
    effects: int
    doubled: int  #: orders with more than one effect; zero is promised
    wrong_absences: int  #: "not found" although it had happened


def figures(facts: ChaosRecords) -> list[OperationFigures]:
    """Count the effects of each operation."""
    found = []
    for operation in OPERATIONS:
        counted = Counter(effect.order for effect in facts.effects if effect.operation == operation)
        found.append(
            OperationFigures(
                operation=operation,
                is_keyed=operation in KEYED,
                is_lagging=_is_lagging(operation),
                orders=len(counted),
                effects=counted.total(),
                doubled=sum(count > 1 for count in counted.values()),
                wrong_absences=sum(entry.operation == operation for entry in facts.wrong_absences),
            )
        )
    return found


def _is_lagging(operation: str) -> bool:
    lag = SEARCH_LAGS.get(operation)
    return lag is not None and lag > SETTLE


def judge(facts: ChaosRecords) -> list[Problem]:
    """Return every disagreement. An empty list means that the promise was kept."""
    return [
        *row_problems(facts),
        *_unmatched_effects(facts),
        *_order_problems(facts),
        *_delivery_problems(facts),
        *(Problem(description=f"the doctor found: {finding}") for finding in facts.findings),
    ]


def row_problems(facts: ChaosRecords) -> Iterator[Problem]:
    """Check that each row agrees with the provider about its key. The repeat of a row has its key, and its effect."""
    for entry in facts.ledger:
        count = len(facts.by_key.get(entry.key, ()))
        is_repeated = entry.status == MutationStatus.FAILED and entry.key in facts.applied_keys
        what = "" if is_repeated else _disagreement(entry, count)
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
        return "the ledger says that it was found late"
    if entry.status in UNRESOLVED and count > 1:
        return "it happened more than once"
    if entry.status in (MutationStatus.PENDING, MutationStatus.IN_FLIGHT):
        return "the ledger row is not finished"
    return ""


def _unmatched_effects(facts: ChaosRecords) -> Iterator[Problem]:
    """Check that each effect belongs to one row, with the same order and operation."""
    rows: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in facts.ledger:
        rows[entry.key].append(entry)
    for key, effects in facts.by_key.items():
        found = rows.get(key, [])
        same = [entry for entry in found if (entry.order, entry.operation) == (effects[0].order, effects[0].operation)]
        counted = [entry for entry in found if entry.status != MutationStatus.FAILED] or found[-1:]
        if len(counted) != 1 or len(same) != len(found):
            rows_text = f"{len(found)} rows: {', '.join(_describe(entry) for entry in found)}" if found else "no row"
            effect = effects[0]
            yield Problem(
                description="an effect does not belong to exactly one row",
                order=effect.order,
                key=key,
                ledger=rows_text,
                provider=f"{effect.operation} of {effect.order}",
            )


def _order_problems(facts: ChaosRecords) -> Iterator[Problem]:
    """Check that each order has at most one effect, under all its keys together."""
    counted = Counter(effect.order for effect in facts.effects)
    for order, count in counted.items():
        if count > 1:
            rows = [entry for entry in facts.ledger if entry.order == order]
            yield Problem(
                description=_doubled_description(facts, order),
                order=order,
                ledger=", ".join(f"{entry.key}: {_describe(entry)}" for entry in rows),
                provider=", ".join(effect.key for effect in facts.effects if effect.order == order),
            )


def _doubled_description(facts: ChaosRecords, order: str) -> str:
    """Name a doubled effect by what should have prevented it."""
    is_keyed = any(effect.operation in KEYED for effect in facts.effects if effect.order == order)
    return f"an order had its effect more than once{', although its key is honoured' if is_keyed else ''}"


def _delivery_problems(facts: ChaosRecords) -> Iterator[Problem]:
    """Check that no order is lost: it is consumed with its effect and follow-up, or unresolved."""
    applied = facts.applied_keys
    unresolved = {entry.key for entry in facts.ledger if entry.status in UNRESOLVED}
    followed, there = Counter(facts.completed_orders), Counter(delivery.order for delivery in facts.deliveries)
    for order in facts.orders:
        if there[order] != 1:
            yield Problem(description=f"an order was published once and delivered {there[order]} times", order=order)
    for delivery in facts.deliveries:
        is_done = delivery.status == "consumed"
        if delivery.key not in (applied if is_done else unresolved):
            what = "an order was consumed without an effect" if is_done else "an order is neither done nor unresolved"
            yield Problem(description=what, order=delivery.order, key=delivery.key or "", ledger=delivery.status)
        if followed[delivery.order] != int(is_done):
            what = f"an order that is {delivery.status} was reported as done {followed[delivery.order]} times"
            yield Problem(description=what, order=delivery.order, key=delivery.key or "")


def _describe(entry: LedgerEntry) -> str:
    by = f" by {entry.resolved_by}" if entry.resolved_by else ""
    late = ", found late" if entry.is_found_late else ""
    return f"{entry.operation} {entry.status}{by}{late}"
