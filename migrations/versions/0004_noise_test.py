"""The table `noise_test`: whether the noise of the reference explains what is measured of a slice.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "noise_test",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("slice_id", sa.Integer(), nullable=False, comment="Slice."),
        sa.Column("metric", sa.Text(), nullable=False, comment="flip or divergence."),
        sa.Column(
            "suspect",
            sa.Boolean(),
            nullable=False,
            comment="Whether workers replay all exchanges of the slice twice, as far as their time allows.",
        ),
        sa.Column("budget", sa.Double(), nullable=False, comment="Mean that the test is against."),
        sa.Column("since", _TIME, nullable=False, comment="Exchanges that were captured later count."),
        sa.Column("n", sa.Integer(), nullable=False, comment="Exchanges that were replayed twice since."),
        sa.Column("wealth", sa.ARRAY(sa.Double()), nullable=False, comment="Evidence of each bet."),
        sa.Column(
            "shown",
            sa.Boolean(),
            nullable=False,
            comment="Whether noise was shown not to explain it: the slice may page.",
        ),
        sa.Column(
            "explained",
            sa.Boolean(),
            nullable=False,
            comment="Whether noise explains it, as far as is known: the allowance for noise is added to the budget.",
        ),
        sa.Column(
            "unpaired",
            sa.Boolean(),
            nullable=False,
            comment="Whether second replays did not come although they were waited for: the slice may page.",
        ),
        sa.Column(
            "enough_at",
            _TIME,
            nullable=True,
            comment="Event time since which the evidence would be enough for a page; null while it is not.",
        ),
        sa.Column("enough_groups", sa.Integer(), nullable=False, comment="Exchanges compared until then."),
        sa.Column("enough_n", sa.Integer(), nullable=False, comment="n then."),
        sa.Column(
            "paired_at",
            _TIME,
            nullable=True,
            comment="Fold's time when an exchange that was replayed twice last came, for the slice of all traffic one of the version;"
            " null before the first.",
        ),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Fold that wrote this."),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_test_model_version_id_model_version"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["slice_id"], ["slice.id"], name=op.f("fk_noise_test_slice_id_slice"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("model_version_id", "slice_id", "metric", name=op.f("pk_noise_test")),
        comment="Whether the noise of the reference explains what is measured of a slice: the test on exchanges that were"
        " replayed twice, as of its last fold. Means are divided by the cap. A row of the slice of all traffic stays: it says that"
        " exchanges of the version are replayed twice.",
    )


def downgrade() -> None:
    """Go one revision back."""
    op.drop_table("noise_test")
