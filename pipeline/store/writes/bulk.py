"""Guarded writes of bulk previews. Only ``transitions`` may import this."""

from pipeline.store.database import Command, Statement
from pipeline.store.schema import BulkPreviewRow

INSERT_PREVIEW = Statement[BulkPreviewRow]("""
INSERT INTO pipeline.bulk_previews
  (act, created_by, expires_at, workflows, request, items, item_count, left_out, refused)
VALUES (:act, :created_by, pipeline.clock() + CAST(:lifetime AS interval), CAST(:workflows AS text[]),
  CAST(:request AS jsonb), CAST(:items AS jsonb), :item_count, CAST(:left_out AS jsonb), CAST(:refused AS jsonb))
RETURNING *
""")

#: A preview is committed once. A commit whose process died is taken over after a pause, where it stopped.
TAKE_PREVIEW = Statement[BulkPreviewRow]("""
UPDATE pipeline.bulk_previews
SET committed_by = :by, committed_at = coalesce(committed_at, pipeline.clock()), progress_at = pipeline.clock(),
  reason = :reason, refused = CASE WHEN committed_at IS NULL THEN '{}' ELSE refused END
WHERE id = :id AND discarded_at IS NULL AND finished_at IS NULL AND item_count = :item_count
  AND CASE WHEN committed_at IS NULL THEN expires_at > pipeline.clock()
           ELSE progress_at < pipeline.clock() - CAST(:pause AS interval) END
RETURNING *
""")

RECORD_PROGRESS = Statement[BulkPreviewRow]("""
UPDATE pipeline.bulk_previews
SET done_count = done_count + :done, updated = updated || CAST(:updated AS jsonb),
  refused = refused || CAST(:refused AS jsonb), progress_at = pipeline.clock(),
  finished_at = CASE WHEN done_count + :done = item_count THEN pipeline.clock() END
WHERE id = :id AND committed_at IS NOT NULL AND finished_at IS NULL AND done_count = :done_before
RETURNING *
""")

DISCARD_PREVIEW = Statement[BulkPreviewRow]("""
UPDATE pipeline.bulk_previews SET discarded_at = pipeline.clock()
WHERE id = :id AND committed_at IS NULL AND discarded_at IS NULL RETURNING *
""")

#: What became of a preview can be read for a month.
DELETE_OLD_PREVIEWS = Command("""
DELETE FROM pipeline.bulk_previews WHERE id IN (
  SELECT id FROM pipeline.bulk_previews WHERE created_at < pipeline.clock() - interval '30 days'
  ORDER BY created_at LIMIT 10 FOR UPDATE SKIP LOCKED)
""")
