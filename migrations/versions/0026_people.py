"""The days of a window in slice_now count a session as one, as the window does; the processor time of relays.

The columns of the view keep their names and types. The release before leaves the new column null and does not read it.

Revision ID: 0026
Revises: 0025
"""

from importlib import import_module
from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "tally",
        sa.Column(
            "relay_cpu_s",
            sa.Double(),
            nullable=True,
            comment="Processor seconds of the relay workers of the whole sidecar since its boot; null if unknown.",
        ),
    )
    views = _of_0019()
    (now,) = views["_old"]("0002_ties_and_weights", "_SLICE_NOW")
    added = {**views["_NOW"], "window_days": views["_Column"](_WINDOW_DAYS, _WINDOW_DAYS_COMMENT)}
    views["_create"](views["_extended"](now, added, views["_NOW_JOINS"] + _EVER))


def downgrade() -> None:
    """Go one revision back."""
    op.drop_column("tally", "relay_cpu_s")
    views = _of_0019()
    views["_create"](views["_views"]()[0])


def _of_0019() -> dict[str, Any]:
    return vars(import_module("quantdrift.migrations.versions.0019_views"))


# Roll-ups count exchanges, `verdict.n_groups` counts sessions: their ratio is the share of exchanges that begin a session. Both
# count from the slice's first comparison. Where roll-ups have reached their end, the ratio would be above 1.
_EVER: Final = """
        left join (
            select model_version_id, slice_id, sum(n_groups) as n_groups from rollup_day group by 1, 2
        ) e on e.model_version_id = v.model_version_id + 0 and e.slice_id = v.slice_id + 0
"""
_WINDOW_DAYS: Final = (
    "greatest((v.estimate #>> '{flip,n}')::bigint, (v.estimate #>> '{divergence,n}')::bigint)"
    " / nullif(d.n_groups * least(v.n_groups / nullif(e.n_groups, 0)::double precision, 1), 0)::double precision"
)
_WINDOW_DAYS_COMMENT: Final = (
    "About how many days the window spans: its exchanges, divided by those that were compared in the last 24 hours of data. A session"
    " counts as one in both: of how many exchanges one is made is the mean since the slice's first comparison. Null: none was compared"
    " in these hours."
)
