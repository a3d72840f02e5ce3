"""Add the schedule of a producer, and the mark of an event whose run died with its process."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE pipeline.handlers ADD COLUMN schedule TEXT")
    op.execute("ALTER TABLE pipeline.deliveries ADD COLUMN suspect BOOLEAN DEFAULT false NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE pipeline.deliveries DROP COLUMN suspect")
    op.execute("ALTER TABLE pipeline.handlers DROP COLUMN schedule")
