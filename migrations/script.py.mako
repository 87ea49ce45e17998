"""${message}.

The compatibility rule: this revision must leave the schema usable by the release before it, because workers of
both run during a roll-out. Add columns nullable or with a default; take away or rename in two releases: first stop
using it, then drop it. Build indexes on tables that are written to with `postgresql_concurrently`. Views that read
what you change are dropped before and created after, comments and all.

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """Go one revision forward."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Go one revision back."""
    ${downgrades if downgrades else "pass"}
