"""The noise floor: items that were computed again, what is known of their noise, and events of its own.

A monitor of the release before leaves the new tables alone. It cannot send an event of noise: there is none before the
new one has folded.

Revision ID: 0009
Revises: 0008
"""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_SIDES = "side in ('reference', 'candidate')"
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Go one revision forward."""
    _noise()
    _noise_floor()
    _noise_change()
    op.add_column(
        "detector",
        sa.Column(
            "noise",
            sa.Double(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Part of `budget` that is noise: what the owner accepts is the rest.",
        ),
    )
    op.add_column(
        "outbox",
        sa.Column(
            "noise_change_id", sa.BigInteger(), nullable=True, comment="Or this, where a reference is noisy."
        ),
    )
    op.create_foreign_key(
        op.f("fk_outbox_noise_change_id_noise_change"), "outbox", "noise_change", ["noise_change_id"], ["id"]
    )
    op.alter_column("outbox", "transition_id", nullable=True)
    op.create_check_constraint(
        op.f("ck_outbox_event"), "outbox", "num_nonnulls(transition_id, noise_change_id) = 1"
    )


def downgrade() -> None:
    """Go one revision back; what is known of noise is lost, and its events that wait are not sent."""
    op.drop_constraint(op.f("ck_outbox_event"), "outbox")
    op.execute("delete from outbox where transition_id is null")
    op.alter_column("outbox", "transition_id", nullable=False)
    op.drop_column("outbox", "noise_change_id")
    op.drop_column("detector", "noise")
    op.drop_table("noise_change")
    op.drop_table("noise_floor")
    op.drop_table("noise")


def _noise() -> None:
    op.create_table(
        "noise",
        sa.Column(
            "exchange_id", sa.UUID(as_uuid=False), nullable=False, comment="Exchange, as in comparison."
        ),
        sa.Column("item", sa.SmallInteger(), nullable=False, comment="Row of the exchange, from 0."),
        sa.Column("side", sa.Text(), nullable=False, comment="reference or candidate: whose noise it is."),
        sa.Column(
            "captured_at", _TIME, nullable=False, comment="When the response was complete, as in comparison."
        ),
        sa.Column(
            "batch_id",
            sa.BigInteger(),
            nullable=False,
            comment="batch that stored it: one after that of its comparison.",
        ),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="model_version it belongs to."),
        sa.Column("policy_id", sa.Integer(), nullable=False, comment="policy in force when it was taken."),
        sa.Column("pi1", sa.Double(), nullable=False, comment="First-phase inclusion probability."),
        sa.Column(
            "pi2",
            sa.Double(),
            nullable=False,
            comment="Second-phase inclusion probability; weight = 1 / (pi1 * pi2).",
        ),
        sa.Column("flip", sa.Boolean(), nullable=True, comment="Whether the two decisions differ."),
        sa.Column(
            "divergence",
            sa.Double(),
            nullable=True,
            comment="Graded divergence of the second output from the first, as in comparison; infinity is kept.",
        ),
        sa.CheckConstraint(_SIDES, name=op.f("ck_noise_side")),
        sa.CheckConstraint(
            "pi1 > 0 and pi1 <= 1 and pi2 > 0 and pi2 <= 1", name=op.f("ck_noise_inclusion_probability")
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name=op.f("fk_noise_batch_id_batch"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("exchange_id", "item", "side", name=op.f("pk_noise")),
        comment="The divergence of one item from itself: replayed again in another batch, or asked of the candidate"
        " again. Kept as long as its batch.",
    )
    op.create_index("ix_noise_batch_id", "noise", ["batch_id"])


def _noise_floor() -> None:
    numbers: list[tuple[str, Any, str]] = [
        ("scale", sa.Double(), "What one unit of the following is in the metric's own unit."),
        ("older_n", sa.Integer(), "Exchanges in the window that is shown."),
        ("older_weight", sa.Double(), "Their weights, summed."),
        ("older_total", sa.Double(), "Their weighted values, summed."),
        ("newer_n", sa.Integer(), "Exchanges in the window that will be shown next."),
        ("newer_weight", sa.Double(), "Their weights, summed."),
        ("newer_total", sa.Double(), "Their weighted values, summed."),
        ("low", sa.Double(), "Time-uniform lower bound of the mean."),
        ("high", sa.Double(), "Time-uniform upper bound of the mean."),
        ("added", sa.Double(), "What is added to every budget of the version."),
        ("budget", sa.Double(), "Accepted mean that it is held against."),
    ]
    op.create_table(
        "noise_floor",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("side", sa.Text(), nullable=False, comment="reference or candidate."),
        sa.Column("metric", sa.Text(), nullable=False, comment="flip or divergence."),
        *(sa.Column(name, kind, nullable=False, comment=comment) for name, kind, comment in numbers),
        sa.Column(
            "exceeds",
            sa.Boolean(),
            nullable=False,
            comment="Whether it is more than monitor.noise_bound of the budget: its slices are unknown.",
        ),
        sa.Column("updated_at", _TIME, nullable=False, comment="Event time of the fold that wrote this."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="That fold."),
        sa.CheckConstraint(_SIDES, name=op.f("ck_noise_floor_side")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_floor_model_version_id_model_version"),
        ),
        sa.PrimaryKeyConstraint("model_version_id", "side", "metric", name=op.f("pk_noise_floor")),
        comment="What is known of the noise of a reference or candidate, as of its last fold. Values are over `scale`.",
    )


def _noise_change() -> None:
    op.create_table(
        "noise_change",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column("side", sa.Text(), nullable=False, comment="reference or candidate."),
        sa.Column("metric", sa.Text(), nullable=False, comment="flip or divergence."),
        sa.Column("exceeds", sa.Boolean(), nullable=False, comment="Whether it is too much from here on."),
        sa.Column("at", _TIME, nullable=False, comment="Event time."),
        sa.Column("fold_seq", sa.BigInteger(), nullable=False, comment="Fold that made it."),
        sa.Column(
            "details",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Attributes of the event that is sent.",
        ),
        sa.CheckConstraint(_SIDES, name=op.f("ck_noise_change_side")),
        sa.ForeignKeyConstraint(
            ["model_version_id"],
            ["model_version.id"],
            name=op.f("fk_noise_change_model_version_id_model_version"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_noise_change")),
        comment="When noise was shown to be above monitor.noise_bound of the budget, and when below again.",
    )
    op.create_index("ix_noise_change_at", "noise_change", ["at"])
