"""A name to lock for the monitor that leads, which needs a right that readers do not have.

A view is added that nothing reads: the release before can use the schema as before.

Revision ID: 0011
Revises: 0010
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.execute("create view leader_lock as select 1 as id")
    op.execute(
        "comment on view leader_lock is 'A name without rows: the monitor that leads has it locked. Whoever locks it needs the"
        " right to update it.'"
    )
    op.execute("comment on column leader_lock.id is 'Always 1.'")


def downgrade() -> None:
    """Go one revision back."""
    op.execute("drop view leader_lock")
