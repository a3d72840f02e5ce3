"""Create the table of notices: what people were told already."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
CREATE TABLE pipeline.notices (
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    delivered_at TIMESTAMP WITH TIME ZONE DEFAULT pipeline.clock() NOT NULL,
    CONSTRAINT notices_pk PRIMARY KEY (kind, subject)
)
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE pipeline.notices")
