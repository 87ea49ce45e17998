"""The fold keeps the time of its exchanges apart from that of the tallies, which are folded before them.

A nullable column is added, with the fold's time until now.

Revision ID: 0039
Revises: 0038
"""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None

_COMMENTS = {
    "event_time": (
        "Running maximum of capture times: the fold's clock.",
        "Running maximum of the times of exchanges and tallies: the fold's time.",
    ),
    "mass": (
        "Lambda: integral of dt / (30 days * live detectors).",
        "Lambda: integral of dt / (30 days * live detectors) until exchange_time.",
    ),
}


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "fold",
        sa.Column(
            "exchange_time",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Running maximum of capture times of exchanges: the clock of the allowance.",
        ),
    )
    op.execute("update fold set exchange_time = event_time")
    for column, (before, after) in _COMMENTS.items():
        op.alter_column("fold", column, comment=after, existing_comment=before)


def downgrade() -> None:
    """Go one revision back."""
    for column, (before, after) in _COMMENTS.items():
        op.alter_column("fold", column, comment=before, existing_comment=after)
    op.drop_column("fold", "exchange_time")
