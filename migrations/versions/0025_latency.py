"""The candidate's latency of each exchange, as the relay saw it.

The release before leaves the new columns null and does not read them.

Revision ID: 0025
Revises: 0024
"""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_COLUMNS: Final = {
    "latency_s": (
        "Seconds that the candidate took for the whole exchange, as the relay saw it: from the last byte of the request to"
        " the last byte of the response, waiting at the server included. Null for other ways in, and before revision 0025."
    ),
    "first_token_s": (
        "Of a stream, seconds from the last byte of the request to the first byte of the response's content; else null."
    ),
    "per_token_s": "Of a stream whose tokens are counted, seconds for each token after the first; else null.",
}


def upgrade() -> None:
    """Go one revision forward."""
    for name, comment in _COLUMNS.items():
        op.add_column("comparison", sa.Column(name, sa.Double(), nullable=True, comment=comment))


def downgrade() -> None:
    """Go one revision back."""
    for name in reversed(_COLUMNS):
        op.drop_column("comparison", name)
