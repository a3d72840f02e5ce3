"""Add the indexes by which people find what a run published, and what was decided about a run or an event."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE INDEX events_created_by ON pipeline.events (created_by_run_id) WHERE created_by_run_id IS NOT NULL"
    )
    op.execute("CREATE INDEX audit_run ON pipeline.audit (run_id) WHERE run_id IS NOT NULL")
    op.execute("CREATE INDEX audit_event ON pipeline.audit (event_id) WHERE event_id IS NOT NULL")


def downgrade() -> None:
    op.execute("DROP INDEX pipeline.audit_event")
    op.execute("DROP INDEX pipeline.audit_run")
    op.execute("DROP INDEX pipeline.events_created_by")
