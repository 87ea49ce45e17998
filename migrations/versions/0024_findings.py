"""What diagnose, repair and gate have found about an alert, beside the note that says it in words.

The release before leaves the new column null, and shows such rows as the notes that they are.

Revision ID: 0024
Revises: 0023
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "alert_action",
        sa.Column(
            "finding",
            JSONB(),
            nullable=True,
            comment="Of a note that a command wrote: what it found, with `kind` cause, repair or gate; null: a person wrote the note.",
        ),
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_column("alert_action", "finding")
