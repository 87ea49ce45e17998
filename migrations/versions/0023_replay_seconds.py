"""The seconds of a batch's replay: what the references cost.

The release before leaves the new column null and does not read it.

Revision ID: 0023
Revises: 0022
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "batch",
        sa.Column(
            "replay_s",
            sa.Double(),
            nullable=True,
            comment="Seconds in which the reference computed it, on the device of provenance; null where it computed nothing.",
        ),
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_column("batch", "replay_s")
