"""Roll-ups count the items that nothing was measured of.

The release before leaves the new columns 0 and does not read them.

Revision ID: 0028
Revises: 0027
"""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_COMMENT: Final = (
    "Items that nothing was measured of, for instance sampled answers without log-probabilities."
)


def upgrade() -> None:
    """Go one revision forward."""
    for table in ("rollup_hour", "rollup_day"):
        op.add_column(
            table,
            sa.Column(
                "n_unmeasured", sa.BigInteger(), nullable=False, server_default=sa.text("0"), comment=_COMMENT
            ),
        )


def downgrade() -> None:
    """Go one revision back."""
    for table in ("rollup_day", "rollup_hour"):
        op.drop_column(table, "n_unmeasured")
