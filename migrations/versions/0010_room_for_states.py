"""Room in the pages of what the fold writes again and again.

Revision ID: 0010
Revises: 0009
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_REWRITTEN = ("detector", "verdict", "rollup_day")


def upgrade() -> None:
    """Go one revision forward."""
    for table in _REWRITTEN:
        op.execute(f"alter table {table} set (fillfactor = 50)")


def downgrade() -> None:
    """Go one revision back."""
    for table in _REWRITTEN:
        op.execute(f"alter table {table} reset (fillfactor)")
