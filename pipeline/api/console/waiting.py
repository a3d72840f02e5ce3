"""Read what waits for an operator, once for requests that come together, and show each caller the own part."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID
from weakref import WeakKeyDictionary

from pipeline.admin import attention, incidents
from pipeline.admin.attention import AttentionItem
from pipeline.admin.incidents import Incident
from pipeline.admin.resolutions import MutationSummary
from pipeline.api.access import Caller
from pipeline.api.context import Services

MAX_OF_KIND = 200  #: items of one kind that a page lists
_DEAD_LETTERS = "pipeline.dead_letters"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingItems:
    """What waits for one caller."""

    items: tuple[AttentionItem, ...]
    incidents: tuple[Incident, ...]
    mutations: dict[UUID, MutationSummary]  #: of the items that are about one
    counts: Counter[str]  #: by kind, complete

    @property
    def count(self) -> int:
        return self.counts.total()


@dataclass(slots=True)
class _Read:
    at: float
    found: WaitingItems


_reads: WeakKeyDictionary[Services, _Read] = WeakKeyDictionary()
_lock = threading.Lock()


def waiting_items(services: Services, caller: Caller) -> WaitingItems:
    """Return what waits in the scope of a caller."""
    return _scoped(_shared_read(services), caller)


def _shared_read(services: Services) -> WaitingItems:
    """Return a read that began after this call: of calls that wait for one, the next read serves all.

    An older read would miss the change because of which a page asks again.
    """
    called_at = time.monotonic()
    with _lock:
        known = _reads.get(services)
        if known is None or known.at < called_at:
            known = _reads[services] = _Read(at=time.monotonic(), found=_read(services))
        return known.found


def _read(services: Services) -> WaitingItems:
    items = attention.items(services.resolutions, limit=MAX_OF_KIND, recent=None)
    count = _dead_letter_count(services)
    items += [attention.dead_letters(count)] if count else []
    unknown = services.resolutions.unresolved_mutations(limit=MAX_OF_KIND)
    approvals = services.resolutions.pending_approvals(limit=MAX_OF_KIND)
    return WaitingItems(
        items=tuple(items),
        incidents=tuple(incidents.open_incidents(services.resolutions)),
        mutations={each.id: each for each in (*unknown, *approvals)},
        counts=Counter(),
    )


def _dead_letter_count(services: Services) -> int:
    """Return how many messages workers refused; 0 while the broker is away or not known here."""
    found = services.queue_lengths((_DEAD_LETTERS,)) if services.queue_lengths is not None else None
    return (found or {}).get(_DEAD_LETTERS, 0)


def _scoped(found: WaitingItems, caller: Caller) -> WaitingItems:
    items = [each for each in found.items if caller.workflows is None or each.workflow in caller.workflows]
    groups = [each for each in found.incidents if all(map(caller.can_see_workflow, each.workflows))]
    return WaitingItems(
        items=tuple(items), incidents=tuple(groups), mutations=found.mutations, counts=_counts(items, groups)
    )


def _counts(items: Sequence[AttentionItem], groups: Sequence[Incident]) -> Counter[str]:
    """Count by kind. Incidents know of more unknown outcomes than are listed."""
    found = Counter(each.kind for each in items)
    unknown = max(found["indeterminate"], sum(each.count for each in groups))
    if unknown:
        found["indeterminate"] = unknown
    return found
