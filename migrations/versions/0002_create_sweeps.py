"""Create the table of sweeps: when each background duty last ran, and what it did."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
CREATE TABLE pipeline.sweeps (
    name TEXT NOT NULL,
    last_run_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    report JSONB,
    CONSTRAINT sweeps_pk PRIMARY KEY (name)
)
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE pipeline.sweeps")
