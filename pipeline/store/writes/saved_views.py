"""Writes of saved views. Only ``transitions`` may import this."""

from pipeline.store.database import Command, Statement
from pipeline.store.schema import SavedViewRow

SAVE_VIEW = Statement[SavedViewRow]("""
INSERT INTO pipeline.saved_views (owner, name, page, query) VALUES (:owner, :name, :page, :query)
ON CONFLICT (owner, name) DO UPDATE
SET page = excluded.page, query = excluded.query, saved_at = pipeline.clock()
RETURNING *
""")

DELETE_VIEW = Command("DELETE FROM pipeline.saved_views WHERE owner = :owner AND name = :name")
