"""Comments: when a version is replaced, and when it serves again.

Revision ID: 0006
Revises: 0005
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_REPLACED = (
    "Whether each candidate version serves, as the monitor sees it: another version of its model replaces it once nothing of it was"
    " seen for ten times its usual gap, at least two minutes"
)
_BACK = "Of a version that was replaced: since when its exchanges are seen again; it serves again after two minutes"


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table_comment(
        "serving", f"{_REPLACED}, or half a minute where that version began when this one ended."
    )
    op.alter_column("serving", "back_at", comment=f"{_BACK}, or half a minute where the other one ended.")


def downgrade() -> None:
    """Go one revision back."""
    op.create_table_comment("serving", f"{_REPLACED}.")
    op.alter_column("serving", "back_at", comment=f"{_BACK}.")
