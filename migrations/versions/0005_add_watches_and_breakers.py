"""Add what a mutation settled on weak evidence is watched by, and the breakers of operations."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
ALTER TABLE pipeline.mutations
    ADD COLUMN doubted_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN watch INTERVAL,
    ADD COLUMN watch_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN watched SMALLINT DEFAULT 0 NOT NULL,
    ADD COLUMN surfaced_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN surfaced JSONB,
    ADD COLUMN acknowledged_by TEXT,
    ADD CONSTRAINT mutations_only_surfaced_is_acknowledged
        CHECK ((acknowledged_by IS NOT NULL) <= (surfaced_at IS NOT NULL)),
    ADD CONSTRAINT mutations_only_failed_is_watched
        CHECK ((watch_at IS NOT NULL) <= (status = 'failed' AND reconcilable)),
    ADD CONSTRAINT mutations_only_failed_surfaces CHECK ((surfaced_at IS NOT NULL) <= (status = 'failed'))
        """
    )
    op.execute("CREATE INDEX mutations_watched ON pipeline.mutations (watch_at) WHERE watch_at IS NOT NULL")
    op.execute("CREATE INDEX mutations_surfaced ON pipeline.mutations (id) WHERE surfaced_at IS NOT NULL")
    op.execute(
        """
CREATE TABLE pipeline.breakers (
    connector TEXT NOT NULL,
    operation TEXT NOT NULL,
    reason TEXT NOT NULL,
    opened_by TEXT,
    opened_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    probe_every INTERVAL NOT NULL,
    probe_at TIMESTAMP WITH TIME ZONE,
    closed_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT breakers_pk PRIMARY KEY (connector, operation)
)
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE pipeline.breakers")
    op.execute("DROP INDEX pipeline.mutations_surfaced")
    op.execute("DROP INDEX pipeline.mutations_watched")
    op.execute(
        """
ALTER TABLE pipeline.mutations
    DROP COLUMN acknowledged_by,
    DROP COLUMN surfaced,
    DROP COLUMN surfaced_at,
    DROP COLUMN watched,
    DROP COLUMN watch_at,
    DROP COLUMN watch,
    DROP COLUMN doubted_at
        """
    )
