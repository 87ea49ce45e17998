"""In which order the exchanges of a model are folded: by capture, not by the batches in which they were stored.

Six columns and an index are added: the release before can use the schema as before. Batches that it numbers have no marks, and
their rows are folded with them. The index is built while nobody writes a batch.

Revision ID: 0036
Revises: 0034
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0034"
branch_labels = None
depends_on = None

_COLUMNS: tuple[tuple[str, sa.types.TypeEngine[Any], str], ...] = (
    ("compared_model", sa.Text(), "Model of its comparisons; null where it has none."),
    (
        "read_after",
        sa.DateTime(timezone=True),
        "Capture time up to which the model was folded before this batch; null where its rows are folded with it.",
    ),
    (
        "read_until",
        sa.DateTime(timezone=True),
        "Capture time up to which the model was folded with this batch.",
    ),
    (
        "rest_until",
        sa.DateTime(timezone=True),
        "read_until of the batch with which the last of its own rows are folded, at most.",
    ),
    (
        "horizon_s",
        sa.Double(),
        "Seconds for which exchanges of the model wait for earlier ones from this batch on.",
    ),
    (
        "read_from",
        sa.BigInteger(),
        "fold_seq of the earliest batch with rows that may be folded with this one.",
    ),
)
_BEFORE = "One transaction of a shadow worker; the monitor numbers batches and folds them in that order."
_AFTER = (
    "One transaction of a shadow worker; the monitor numbers batches, and folds the exchanges of a model in the order"
    " of their capture."
)

_SESSION_BEFORE = "policy in effect: a new epoch starts a new session."
_SESSION_AFTER = "policy of its first item."


def upgrade() -> None:
    """Go one revision forward."""
    op.alter_column("session", "policy_id", comment=_SESSION_AFTER, existing_comment=_SESSION_BEFORE)
    for name, kind, comment in _COLUMNS:
        op.add_column("batch", sa.Column(name, kind, nullable=True, comment=comment))
    op.create_index("ix_batch_compared_model", "batch", ["compared_model", "fold_seq"])
    op.create_table_comment("batch", _AFTER, existing_comment=_BEFORE)


def downgrade() -> None:
    """Go one revision back. Rows that wait for the read mark of their model are then never folded."""
    op.alter_column("session", "policy_id", comment=_SESSION_BEFORE, existing_comment=_SESSION_AFTER)
    op.create_table_comment("batch", _BEFORE, existing_comment=_AFTER)
    op.drop_index("ix_batch_compared_model", "batch")
    for name, _, _ in reversed(_COLUMNS):
        op.drop_column("batch", name)
