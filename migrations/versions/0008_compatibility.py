"""The oldest release that can work with the schema.

The release before does not use the new table.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "compatibility",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False, comment="Always 1."),
        sa.Column(
            "oldest_revision",
            sa.Text(),
            nullable=False,
            comment="Newest revision that the oldest of these releases knows.",
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_compatibility_singleton")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_compatibility")),
        comment="The oldest release that can work with this schema: one row, written by `quantdrift db upgrade`.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("compatibility")
