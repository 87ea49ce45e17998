"""Places of values that clients choose: their shares, and when a slice or version lost its place.

The release before does not use the new table and columns; it stores values first come, first served.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "slice",
        sa.Column(
            "lapsed_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Since when its value has no place among its rule's slices and counts as `(other)`; null: it has one.",
        ),
    )
    op.add_column(
        "model_version",
        sa.Column(
            "lapsed_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Since when the version has no place among those of its model and counts as `(other)`; null: it has one.",
        ),
    )
    op.create_table(
        "value_share",
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "source",
            sa.Text(),
            nullable=False,
            comment="Key of the attribute, name of the crossed rule with a colon and a space, or `version`.",
        ),
        sa.Column(
            "places",
            sa.Integer(),
            nullable=False,
            comment="Most values that have a slice, or version, of their own.",
        ),
        sa.Column(
            "counted_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Time of the weights: they halve every day.",
        ),
        sa.Column("total", sa.Double(), nullable=False, comment="Weight of all items."),
        sa.Column(
            "error",
            sa.Double(),
            nullable=False,
            comment="What each weight in the sketch can be too low by.",
        ),
        sa.Column(
            "counts",
            postgresql.JSONB(),
            nullable=False,
            comment="Per value: predicate (or version), name, conditions, weight.",
        ),
        sa.Column(
            "reserved",
            postgresql.ARRAY(sa.Text()),
            nullable=False,
            comment="Versions that were given a place and have no row in model_version yet.",
        ),
        sa.PrimaryKeyConstraint("model", "source", name=op.f("pk_value_share")),
        comment="How much of the recent traffic has each value of an attribute, as a sketch of bounded size: the"
        " values with the largest shares are slices, or versions, of their own.",
    )
    op.create_table(
        "slice_change",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of changes."
        ),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column(
            "status",
            sa.Text(),
            nullable=False,
            comment="lapsed: its items count as `(other)` from here on, and its detectors end. admitted: it is a slice again.",
        ),
        sa.Column(
            "made_by",
            sa.Text(),
            nullable=False,
            comment="Who changed it: a user name, monitor or shadow.",
        ),
        sa.Column(
            "made_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was changed.",
        ),
        sa.Column("reason", sa.Text(), nullable=False, comment="Reason in words."),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="The fold applies it from here on; null until the monitor has taken it over.",
        ),
        sa.CheckConstraint("status in ('admitted', 'lapsed')", name=op.f("ck_slice_change_status")),
        sa.ForeignKeyConstraint(["slice_id"], ["slice.id"], name=op.f("fk_slice_change_slice_id_slice")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slice_change")),
        comment="When a slice made of a value lost its place or got it back, with who and why; rows are never changed.",
    )
    op.create_index("ix_slice_change_slice", "slice_change", ["slice_id", "id"])
    op.create_index(
        "ix_slice_change_unfolded", "slice_change", ["id"], postgresql_where=sa.text("fold_seq is null")
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("slice_change")
    op.drop_table("value_share")
    op.drop_column("model_version", "lapsed_at")
    op.drop_column("slice", "lapsed_at")
