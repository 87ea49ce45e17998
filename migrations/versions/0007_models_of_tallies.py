"""A tally tells of each model what was taken and lost: one that cannot be captured says nothing of the others.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "tally",
        sa.Column(
            "models",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="By model, as far as requests tell theirs: taken, and of these lost, number by reason.",
        ),
    )


def downgrade() -> None:
    """Go one revision back; losses are told by stratum alone then."""
    op.drop_column("tally", "models")
