"""Acts on many mutations or events at once, and the checks before such an act is committed. Pure: no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any


class BulkAct(StrEnum):
    """What is done to each item of a bulk preview."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    SKIP = "skip"
    TRY_AGAIN = "try_again"
    APPROVE = "approve"
    REJECT = "reject"
    IMPORT = "import"  #: resolve each mutation as the provider's export says
    RELEASE_EVENT = "release_event"  #: offer quarantined events again
    SKIP_EVENT = "skip_event"  #: never offer quarantined events to their consumers


EVENT_ACTS = frozenset({BulkAct.RELEASE_EVENT, BulkAct.SKIP_EVENT})
MAX_ITEMS = 10_000  #: of one preview
PREVIEW_LIFETIME = timedelta(hours=1)  #: after it a preview is not committed any more
#: After a pause this long the process that ran a commit is taken for dead, and the commit may be taken over.
COMMIT_PAUSE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPreview:
    """A frozen preview: the exact items, each with the state in which it was shown."""

    act: BulkAct
    created_by: str
    workflows: tuple[str, ...]
    request: Mapping[str, Any]  #: what the operator asked for, for people
    items: tuple[Mapping[str, Any], ...]
    refused: Mapping[str, str]  #: of each item that would be refused: why
    left_out: Mapping[str, int]  #: of what is not in the preview: how many, by reason
