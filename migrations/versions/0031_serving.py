"""Whether each candidate version serves, why alerts are over, and alerts that people close.

A table, columns and an allowed value are added: the release before can use the schema as before. It does not know `close`: a page
of the release before that shows such an alert fails.

Revision ID: 0031
Revises: 0030
"""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "serving",
        sa.Column("model_version_id", sa.Integer(), nullable=False, comment="Candidate and reference."),
        sa.Column(
            "last_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Capture time of its newest exchange.",
        ),
        sa.Column(
            "gap_s",
            sa.Double(),
            nullable=False,
            comment="Usual gap between its exchanges in seconds: their mean over the last hour, weighted by their lengths.",
        ),
        sa.Column(
            "gaps_s",
            sa.Double(),
            nullable=False,
            comment="Seconds that gap_s is a mean of, at most an hour.",
        ),
        sa.Column(
            "replaced_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Event time at which it was found that another version serves instead; null while it serves.",
        ),
        sa.Column(
            "back_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Of a version that was replaced: since when its exchanges are seen again; it serves again after two minutes.",
        ),
        sa.ForeignKeyConstraint(
            ["model_version_id"], ["model_version.id"], name=op.f("fk_serving_model_version_id_model_version")
        ),
        sa.PrimaryKeyConstraint("model_version_id", name=op.f("pk_serving")),
        comment="Whether each candidate version serves, as the monitor sees it: another version of its model replaces it once nothing"
        " of it was seen for ten times its usual gap, at least two minutes.",
    )
    op.add_column(
        "alert",
        sa.Column(
            "ended",
            sa.Text(),
            nullable=True,
            comment="Why it is over: recovered (by evidence), replaced (its version serves no more; null again if it does), retired (its"
            " slice is not compared any more) or closed (by a person). Null while it lasts, and of alerts that an earlier release ended.",
        ),
    )
    op.create_check_constraint(
        op.f("ck_alert_ended"), "alert", "ended in ('recovered', 'replaced', 'retired', 'closed')"
    )
    op.add_column(
        "alert_action",
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=True,
            comment="Of close: in effect from this fold on; null until the monitor has taken it over.",
        ),
    )
    _allow("'ack', 'unack', 'note', 'escalate', 'close'")
    op.create_index(
        "ix_alert_action_unfolded",
        "alert_action",
        ["id"],
        postgresql_where=sa.text("action = 'close' and fold_seq is null"),
    )
    op.execute(_ACTION.format("ack, unack, note or close (by a person)"))


def downgrade() -> None:
    """Go one revision back."""
    op.execute(_ACTION.format("ack, unack or note (by a person)"))
    op.drop_index("ix_alert_action_unfolded", "alert_action")
    op.execute("delete from alert_action where action = 'close'")
    _allow("'ack', 'unack', 'note', 'escalate'")
    op.drop_column("alert_action", "fold_seq")
    op.drop_constraint(op.f("ck_alert_ended"), "alert")
    op.drop_column("alert", "ended")
    op.drop_table("serving")


_ACTION: Final = "comment on column alert_action.action is '{}; escalate: the alert has become worse, and is not acknowledged any more.'"


def _allow(actions: str) -> None:
    op.drop_constraint(op.f("ck_alert_action_action"), "alert_action")
    op.create_check_constraint(op.f("ck_alert_action_action"), "alert_action", f"action in ({actions})")
