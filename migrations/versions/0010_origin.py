"""How an exchange came in, and who sent it, beside each of its comparisons.

The release before leaves the new column empty: as for an exchange of the relay.

Revision ID: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "comparison",
        sa.Column(
            "origin",
            sa.Text(),
            nullable=True,
            comment="How it came in, and a space and the caller where that was checked, as `intake NAME`; null: through the"
            " relay.",
        ),
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_column("comparison", "origin")
