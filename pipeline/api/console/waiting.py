"""Read what waits for an operator, once for requests that come together, and show each caller the own part."""

import threading
import time
from collections import Counter
from dataclasses import dataclass
from uuid import UUID
from weakref import WeakKeyDictionary

from pipeline.admin import attention
from pipeline.admin.attention import AttentionItem, Incident
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
    return _scoped(services, _shared_read(services), caller)


def waiting_count(services: Services, caller: Caller) -> int:
    """Return how much waits in the scope of a caller, without reading the items."""
    return _counts(services, caller).total()


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
    resolutions = services.resolutions
    groups = attention.open_incidents(resolutions)
    unknown = resolutions.unresolved_mutations(limit=MAX_OF_KIND)
    mutations = (*unknown, *resolutions.pending_approvals(limit=MAX_OF_KIND))
    items = attention.items(resolutions, limit=MAX_OF_KIND, recent=None, incidents=groups, mutations=mutations)
    count = _dead_letter_count(services)
    items += [attention.dead_letters(count)] if count else []
    return WaitingItems(
        items=tuple(items),
        incidents=tuple(groups),
        mutations={each.id: each for each in mutations},
        counts=Counter(),
    )


def _dead_letter_count(services: Services) -> int:
    """Return how many messages workers refused; 0 while the broker is away or not known here."""
    found = services.queue_lengths((_DEAD_LETTERS,)) if services.queue_lengths is not None else None
    return (found or {}).get(_DEAD_LETTERS, 0)


def _scoped(services: Services, found: WaitingItems, caller: Caller) -> WaitingItems:
    items = [each for each in found.items if caller.workflows is None or each.workflow in caller.workflows]
    groups = [each for each in found.incidents if all(map(caller.can_see_workflow, each.workflows))]
    return WaitingItems(
        items=tuple(items), incidents=tuple(groups), mutations=found.mutations, counts=_counts(services, caller)
    )


def _counts(services: Services, caller: Caller) -> Counter[str]:
    """Count by kind what waits in the scope of a caller."""
    found = Counter[str]()
    for (kind, workflow), number in attention.counts(services.db).items():
        if caller.workflows is None or workflow in caller.workflows:
            found[kind] += number
    letters = _dead_letter_count(services) if caller.workflows is None else 0
    return found + Counter(dead_letter=letters)  # without kinds of which there is none
