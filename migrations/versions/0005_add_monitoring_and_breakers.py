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
    ADD COLUMN monitor_after INTERVAL,
    ADD COLUMN next_monitor_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN monitor_attempts SMALLINT DEFAULT 0 NOT NULL,
    ADD COLUMN found_late_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN late_result JSONB,
    ADD COLUMN acknowledged_by TEXT,
    ADD CONSTRAINT mutations_only_found_late_is_acknowledged
        CHECK ((acknowledged_by IS NOT NULL) <= (found_late_at IS NOT NULL)),
    ADD CONSTRAINT mutations_only_failed_is_monitored
        CHECK ((next_monitor_at IS NOT NULL) <= (status = 'failed' AND reconcilable)),
    ADD CONSTRAINT mutations_only_failed_is_found_late CHECK ((found_late_at IS NOT NULL) <= (status = 'failed'))
        """
    )
    op.execute(
        "CREATE INDEX mutations_monitor_due ON pipeline.mutations (next_monitor_at) WHERE next_monitor_at IS NOT NULL"
    )
    op.execute("CREATE INDEX mutations_found_late ON pipeline.mutations (id) WHERE found_late_at IS NOT NULL")
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
    op.execute("DROP INDEX pipeline.mutations_found_late")
    op.execute("DROP INDEX pipeline.mutations_monitor_due")
    op.execute(
        """
ALTER TABLE pipeline.mutations
    DROP COLUMN acknowledged_by,
    DROP COLUMN late_result,
    DROP COLUMN found_late_at,
    DROP COLUMN monitor_attempts,
    DROP COLUMN next_monitor_at,
    DROP COLUMN monitor_after,
    DROP COLUMN doubted_at
        """
    )
