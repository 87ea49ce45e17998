"""Comments that name the detectors: one more, of the growth of the latency.

Comments alone change: the release before can use the schema as before. It does not know the states of the new detector, which
exist only where `models.budget.latency_growth` asks for it.

Revision ID: 0027
Revises: 0026
"""

from typing import Final

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    for column, (_, after) in _COMMENTS.items():
        op.execute(f"comment on column {column} is '{after}'")


def downgrade() -> None:
    """Go one revision back."""
    for column, (before, _) in _COMMENTS.items():
        op.execute(f"comment on column {column} is '{before}'")


# By column: the comment before and after.
_COMMENTS: Final = {
    "detector.kind": (
        "Kind of detector: budget, change (against a learned baseline) or tail.",
        "Kind of detector: budget, change (against a learned baseline), tail or growth (of the latency).",
    ),
    "baseline.kind": (
        "Detector: budget, change or tail.",
        "Detector: budget, change, tail or growth.",
    ),
}
