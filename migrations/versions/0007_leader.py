"""The row that says which monitor leads.

The release before does not use the new table: it relies on the advisory lock, which monitors of this release take as well.

Revision ID: 0007
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "leader",
        sa.Column("id", sa.SmallInteger(), autoincrement=False, nullable=False, comment="Always 1."),
        sa.Column(
            "term",
            sa.BigInteger(),
            nullable=False,
            comment="Number of the present lead; it rises whenever a monitor takes the lead.",
        ),
        sa.Column(
            "holder", sa.Text(), nullable=False, comment="Host name and process id of the monitor that leads."
        ),
        sa.Column(
            "since",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it took the lead, by the database's clock.",
        ),
        sa.CheckConstraint("id = 1", name=op.f("ck_leader_singleton")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
        comment="The monitor that leads: one row. Its transactions lock the row for share and compare the term.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("leader")
