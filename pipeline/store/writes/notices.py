"""Writes of notices: which of them were delivered."""

from pipeline.store.database import Command
from pipeline.store.reads.attention import ATTENTION_ITEMS

INSERT_NOTICE = Command("""
INSERT INTO pipeline.notices (kind, subject) VALUES (:kind, :subject) ON CONFLICT DO NOTHING
""")

#: If the same thing needs an operator again, a new notice is sent.
DELETE_ENDED_NOTICES = Command(f"""
DELETE FROM pipeline.notices n WHERE (n.kind, n.subject) NOT IN (SELECT w.kind, w.subject FROM ({ATTENTION_ITEMS}) w)
""")
DELETE_NOTICE = Command("DELETE FROM pipeline.notices WHERE kind = :kind AND subject = :subject")
