"""A comment that says when rows of `baseline` are deleted.

The comment alone changes: the release before can use the schema as before.

Revision ID: 0013
Revises: 0012
"""

from typing import Final

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_BEFORE: Final = (
    "Baselines of signals, and every decision about them. Rows stay; content that is no longer in effect is deleted"
    " after 90 days, or storage.retention_days if that is longer."
)
_AFTER: Final = (
    "Baselines of signals, and every decision about them. Content that is no longer in effect is deleted after 90 days,"
    " or storage.retention_days if that is longer, and its row after storage.history_days."
)


def upgrade() -> None:
    """Go one revision forward."""
    op.execute(f"comment on table baseline is '{_AFTER}'")


def downgrade() -> None:
    """Go one revision back."""
    op.execute(f"comment on table baseline is '{_BEFORE}'")
