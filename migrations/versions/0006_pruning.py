"""What is in force no more goes in time, and batches name the versions without a reference that still serve.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BASELINE = "What each signal is measured against, and every decision about it"
_CONTENT = "The baseline itself, or an imported budget"
_DETECTOR = "A sequential detector of one metric on one slice, as of its last fold"


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "batch",
        sa.Column(
            "unreferenced",
            postgresql.ARRAY(sa.Integer()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="model_version of the exchanges without a reference among those skipped: these versions still serve.",
        ),
    )
    op.create_table_comment("baseline", f"{_BASELINE}: rows stay, their content goes in time.")
    op.alter_column(
        "baseline",
        "content",
        comment=f"{_CONTENT}. Null: a decision about the one in force, or in force no more"
        " for longer than storage.superseded_days.",
    )
    op.create_table_comment("detector", f"{_DETECTOR}; once retired it is kept for storage.superseded_days.")


def downgrade() -> None:
    """Go one revision back; contents and rows that were dropped stay so."""
    op.create_table_comment("detector", f"{_DETECTOR}.")
    op.alter_column("baseline", "content", comment=f"{_CONTENT}; null for a decision about the one in force.")
    op.create_table_comment("baseline", f"{_BASELINE}; rows are never changed.")
    op.drop_column("batch", "unreferenced")
