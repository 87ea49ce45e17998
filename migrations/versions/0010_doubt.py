"""What references' outputs say against the configuration, for the report.

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
    op.create_table(
        "doubt",
        sa.Column("model", sa.Text(), nullable=False, comment="Name of the model."),
        sa.Column(
            "reference_digest",
            sa.Text(),
            nullable=False,
            comment="SHA-256 of the reference that was looked at.",
        ),
        sa.Column("option", sa.Text(), nullable=False, comment="Option that may be wrong, or empty."),
        sa.Column(
            "doubt",
            sa.Text(),
            nullable=False,
            comment="What seems to be wrong, and what to set; empty: nothing.",
        ),
        sa.Column(
            "found_at", sa.DateTime(timezone=True), nullable=False, comment="When a worker looked last."
        ),
        sa.PrimaryKeyConstraint("model", "reference_digest", name=op.f("pk_doubt")),
        comment="Whether the outputs of a reference look like what the configuration says of them, as a worker saw it last.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("doubt")
