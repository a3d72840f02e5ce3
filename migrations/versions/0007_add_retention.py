"""Add how long workflows keep their past, where the cleaning goes on, and an archive for what they let go of."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
ALTER TABLE pipeline.workflows
    ADD COLUMN keep_done INTERVAL,
    ADD COLUMN keep_ledger INTERVAL,
    ADD COLUMN archives BOOLEAN DEFAULT false NOT NULL,
    ADD CONSTRAINT workflows_ledger_outlives_done
        CHECK ((keep_ledger IS NOT NULL) <= coalesce(keep_ledger >= keep_done, false))
        """
    )
    op.execute("CREATE INDEX blocks_run ON pipeline.blocks (run_id)")
    op.execute(
        """
CREATE TABLE pipeline.cursors (
    name TEXT NOT NULL,
    position TEXT NOT NULL,
    CONSTRAINT cursors_pk PRIMARY KEY (name)
)
        """
    )
    op.execute(
        """
CREATE TABLE pipeline.archive (
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    workflow TEXT,
    archived_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    content JSONB NOT NULL,
    CONSTRAINT archive_pk PRIMARY KEY (kind, id)
)
        """
    )
    op.execute(
        "CREATE FUNCTION pipeline.oldest_compatible_code() RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '0007' $$"
    )


def downgrade() -> None:
    op.execute("DROP FUNCTION pipeline.oldest_compatible_code()")
    op.execute("DROP TABLE pipeline.archive")
    op.execute("DROP TABLE pipeline.cursors")
    op.execute("DROP INDEX pipeline.blocks_run")
    op.execute(
        """
ALTER TABLE pipeline.workflows
    DROP COLUMN archives,
    DROP COLUMN keep_ledger,
    DROP COLUMN keep_done
        """
    )
