"""Add which releases of its version a workflow was registered by, oldest first."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE pipeline.workflows ADD COLUMN known_fingerprints TEXT[] DEFAULT '{}' NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE pipeline.workflows DROP COLUMN known_fingerprints")
