"""Noise of slices: the slices that an item counts for, an estimate for each slice, and when it was too high in a slice.

The release before does not use the new table, leaves the new columns null, and reads neither.

Revision ID: 0005
Revises: 0004
"""

from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "noise",
        sa.Column(
            "slice_ids",
            postgresql.ARRAY(sa.Integer()),
            nullable=True,
            comment="Slices that it counts for, which are some of those of its comparison; null from an older worker: the"
            " slice of all traffic alone.",
        ),
    )
    op.add_column(
        "noise_change",
        sa.Column(
            "slice_id", sa.Integer(), nullable=True, comment="Slice; null: all traffic of the version."
        ),
    )
    op.create_foreign_key(
        op.f("fk_noise_change_slice_id_slice"), "noise_change", "slice", ["slice_id"], ["id"]
    )
    op.create_table(
        "noise_slice",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("side", sa.Text(), nullable=False, comment="reference or candidate."),
        sa.Column("metric", sa.Text(), nullable=False, comment="flip or divergence."),
        _double("scale", "One unit of the values below, in the metric's own unit."),
        sa.Column("older_n", sa.Integer(), nullable=False, comment="Exchanges in the window in use."),
        _double("older_weight", "Sum of their weights."),
        _double("older_total", "Sum of their weighted values."),
        sa.Column("newer_n", sa.Integer(), nullable=False, comment="Exchanges in the next window."),
        _double("newer_weight", "Sum of their weights."),
        _double("newer_total", "Sum of their weighted values."),
        _double("low", "Time-uniform lower bound of the mean."),
        _double("high", "Time-uniform upper bound of the mean."),
        sa.Column(
            "own",
            sa.Boolean(),
            nullable=False,
            comment="Whether the slice uses the two figures below; if not, it uses those of its version in noise_floor.",
        ),
        _double("added", "Amount added to the budget of the slice."),
        _double("budget", "Accepted mean that the noise is compared with."),
        sa.Column(
            "exceeds",
            sa.Boolean(),
            nullable=False,
            comment="Whether noise exceeds half of the budget, or is not yet shown to be below: the slice is then unknown.",
        ),
        sa.Column(
            "announced",
            sa.Boolean(),
            nullable=False,
            comment="Whether a noise_change says that it exceeds; there is none while the noise of the version exceeds too.",
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Event time of the fold that wrote this.",
        ),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Number of that fold."),
        sa.CheckConstraint("side in ('reference', 'candidate')", name=op.f("ck_noise_slice_side")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_slice_model_version_id_model_version"),
        ),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_noise_slice_slice_id_slice")),
        sa.PrimaryKeyConstraint(
            "model_version_id", "slice_id", "side", "metric", name=op.f("pk_noise_slice")
        ),
        comment="Estimated noise of a reference or candidate in one slice, as of its last fold; that of the slice of all"
        " traffic is in noise_floor. Values are divided by `scale`. Deleted when the slice is retired.",
    )
    for what, (_, after) in _COMMENTS.items():
        _comment(what, after)


def downgrade() -> None:
    """Go one revision back."""
    for what, (before, _) in _COMMENTS.items():
        _comment(what, before)
    op.drop_table("noise_slice")
    op.drop_column("noise_change", "slice_id")
    op.drop_column("noise", "slice_ids")


def _double(name: str, comment: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=False, comment=comment)


def _comment(what: str, comment: str) -> None:
    quoted = comment.replace("'", "''")
    op.execute(f"comment on {what} is '{quoted}'")


_COMMENTS: Final = {
    "table noise_floor": (
        "Estimated noise of a reference or candidate, as of its last fold. Values are divided by `scale`.",
        "Estimated noise of a reference or candidate over all traffic, as of its last fold. Values are divided by `scale`.",
    ),
    "column noise_floor.added": (
        "Amount added to every budget of the version.",
        "Amount added to the budget of the slice of all traffic, and of each slice without a figure of its own.",
    ),
    "column noise_floor.exceeds": (
        "Whether noise exceeds half of the budget: the version's slices are then unknown.",
        (
            "Whether noise exceeds half of the budget: the slice of all traffic, and each slice without a figure of its own,"
            " are then unknown."
        ),
    ),
}
