"""Freeze, take, report and discard bulk previews.

A preview names its exact items, each with the state in which it was shown. A commit acts on each item in a transaction
of its own, so that this module only keeps who took the commit and how far it is.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from pipeline.domain.acts import COMMIT_PAUSE, MAX_ITEMS, PREVIEW_LIFETIME, NewPreview
from pipeline.domain.codec import seal
from pipeline.domain.errors import IllegalTransitionError, InvalidInputError, NotFoundError, StaleWriteError
from pipeline.domain.values import Actor
from pipeline.store.codecs import codec_for
from pipeline.store.database import Transaction
from pipeline.store.reads import access
from pipeline.store.schema import BulkPreviewRow
from pipeline.store.writes import bulk as bulk_store


def freeze(tx: Transaction, new: NewPreview) -> BulkPreviewRow:
    """Store a preview for an hour. Previews of a month ago are deleted."""
    if len(new.items) > MAX_ITEMS:
        raise InvalidInputError(
            f"The preview has {len(new.items)} items; expected {MAX_ITEMS} at most. Narrow the filter."
        )
    tx.execute(bulk_store.DELETE_OLD_PREVIEWS)
    return tx.one(
        bulk_store.INSERT_PREVIEW,
        act=str(new.act),
        created_by=new.created_by,
        lifetime=PREVIEW_LIFETIME,
        workflows=list(new.workflows),
        request=json.dumps(dict(new.request)),
        items=json.dumps([_sealed_item(tx, item) for item in new.items]),
        item_count=len(new.items),
        left_out=json.dumps(dict(new.left_out)),
        refused=json.dumps(dict(new.refused)),
    )


def _sealed_item(tx: Transaction, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it is stored: what a result of an encrypted workflow is, and what it is based on, is sealed."""
    private = [name for name in ("result", "evidence") if item.get(name)]
    codec = codec_for(tx, item["workflow"]) if private else None
    if codec is None:
        return dict(item)
    return {**item, **{name: seal(codec, item[name], "preview", item["subject"], name) for name in private}}


def take(tx: Transaction, preview_id: UUID, by: Actor, *, item_count: int) -> BulkPreviewRow:
    """Take the commit of a preview for an operator who saw this many items. Only one caller gets it."""
    row = tx.first(
        bulk_store.TAKE_PREVIEW, id=preview_id, by=by.name, reason=by.reason, item_count=item_count, pause=COMMIT_PAUSE
    )
    if row is not None:
        return row
    found = _preview(tx, preview_id)
    if found.item_count != item_count:
        raise StaleWriteError(
            "bulk preview",
            preview_id,
            verb="commit",
            expected=f"{item_count} items",
            found=f"a preview of {found.item_count} items",
        )
    raise _refused(tx, found, "commit")


def record_progress(
    tx: Transaction,
    preview_id: UUID,
    *,
    done_before: int,
    done: int,
    updated: Sequence[str],
    refused: Mapping[str, str],
) -> BulkPreviewRow:
    """Keep what a commit did to its next items. Refused if another process took the commit over."""
    row = tx.first(
        bulk_store.RECORD_PROGRESS,
        id=preview_id,
        done=done,
        done_before=done_before,
        updated=json.dumps(list(updated)),
        refused=json.dumps(dict(refused)),
    )
    if row is None:
        found = _preview(tx, preview_id)
        raise StaleWriteError(
            "bulk preview", preview_id, verb="record progress", expected=done_before, found=found.done_count
        )
    return row


def discard(tx: Transaction, preview_id: UUID) -> BulkPreviewRow:
    """Throw a preview away before it is committed. Nothing else changes."""
    row = tx.first(bulk_store.DISCARD_PREVIEW, id=preview_id)
    if row is None:
        raise _refused(tx, _preview(tx, preview_id), "discard")
    return row


def _refused(tx: Transaction, row: BulkPreviewRow, verb: str) -> IllegalTransitionError:
    if row.discarded_at is not None:
        found = "discarded"
    elif row.finished_at is not None:
        found = f"committed by {row.committed_by} and finished"
    elif row.committed_at is not None:
        found = f"being committed by {row.committed_by}"
    else:
        found = "expired" if row.expires_at <= tx.clock() else "open"
    return IllegalTransitionError("bulk preview", row.id, verb=verb, found=found, allowed=["open and not expired"])


def _preview(tx: Transaction, preview_id: UUID) -> BulkPreviewRow:
    row = access.bulk_preview(tx, preview_id)
    if row is None:
        raise NotFoundError("bulk preview", preview_id, hint="Previews are kept for 30 days. Nothing was changed.")
    return row
