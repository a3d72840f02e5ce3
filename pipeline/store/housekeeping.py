"""Tables beside the model: when a sweep ran and how far it came, what people were told, what was let go of."""

from sqlalchemy import Column, Interval, PrimaryKeyConstraint, Table, Text
from sqlalchemy.dialects.postgresql import JSONB

from pipeline.store.columns import instant, metadata, now, words

sweeps = Table(
    "sweeps",
    metadata,
    Column("name", Text, primary_key=True),
    now("last_run_at"),
    Column("report", JSONB),
)

notices = Table(
    "notices",
    metadata,
    words("kind"),
    words("subject"),
    now("announced_at"),
    PrimaryKeyConstraint("kind", "subject"),
)

#: While it is not closed, no new mutation of the operation is started, but for a probe now and then.
breakers = Table(
    "breakers",
    metadata,
    words("connector"),
    words("operation"),
    words("reason"),
    Column("opened_by", Text),
    now("opened_at"),
    Column("probe_every", Interval, nullable=False),
    instant("probe_at"),
    instant("closed_at"),
    PrimaryKeyConstraint("connector", "operation"),
)

#: Where the cleaning of a table goes on.
walks = Table(
    "walks",
    metadata,
    Column("name", Text, primary_key=True),
    words("position"),
)

#: What workflows no longer keep and do not want dropped. Nothing reads it: copy it elsewhere and empty it at will.
archive = Table(
    "archive",
    metadata,
    words("kind"),
    words("id"),
    Column("workflow", Text),
    now("archived_at"),
    Column("content", JSONB, nullable=False),
    PrimaryKeyConstraint("kind", "id"),
)
