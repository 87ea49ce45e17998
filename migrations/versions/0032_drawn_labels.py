"""Labels of answers that were drawn for somebody to label, apart from those that came by themselves.

Two columns are added: the release before can use the schema as before.

Revision ID: 0032
Revises: 0031
"""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "label",
        sa.Column(
            "drawn_for",
            sa.Integer(),
            nullable=True,
            comment="Slice of which `quantdrift labels wanted` drew it among the changed answers; null: it was not drawn.",
        ),
    )
    op.add_column(
        "label",
        sa.Column(
            "as_it_came",
            sa.Boolean(),
            nullable=False,
            server_default=sa.true(),
            comment="Whether it was loaded from a file that says nothing of a draw.",
        ),
    )


def downgrade() -> None:
    """Go one revision back: labels that were drawn are deleted, since nothing tells them from the others then."""
    op.execute("delete from label where not as_it_came")
    op.drop_column("label", "as_it_came")
    op.drop_column("label", "drawn_for")
