"""What people do about alerts, and deliveries to a webhook.

A table and columns are added: the release before can use the schema as before.

Revision ID: 0015
Revises: 0014
"""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_OUTBOX: Final = "comment on table outbox is '{}; written with the transition.'"


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "alert_action",
        sa.Column(
            "id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Order of actions."
        ),
        sa.Column("alert_id", sa.BigInteger(), nullable=False, comment="Alert that it is about."),
        sa.Column(
            "action",
            sa.Text(),
            nullable=False,
            comment="ack, unack or note (by a person); escalate: the alert has become worse, and is not acknowledged any more.",
        ),
        sa.Column(
            "made_by",
            sa.Text(),
            server_default=sa.text("session_user"),
            nullable=False,
            comment="Database user who wrote it; nobody can give another one.",
        ),
        sa.Column(
            "identity",
            sa.Text(),
            server_default=sa.text("''"),
            nullable=False,
            comment="Person that the web server has authenticated; empty: the database user acted.",
        ),
        sa.Column(
            "made_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When.",
        ),
        sa.Column(
            "reason",
            sa.Text(),
            nullable=False,
            comment="Reason or note that the person gave; for an escalation, what became worse.",
        ),
        sa.Column(
            "severity", sa.Text(), nullable=True, comment="Of ack and escalate: the alert's severity then."
        ),
        sa.Column(
            "level",
            sa.Double(),
            nullable=True,
            comment="Of ack: the alert escalates once the lower end of the 95 % interval of its metric is above this; null: unknown.",
        ),
        sa.CheckConstraint(
            "action in ('ack', 'unack', 'note', 'escalate')", name=op.f("ck_alert_action_action")
        ),
        sa.ForeignKeyConstraint(
            ["alert_id"], ["alert.id"], name=op.f("fk_alert_action_alert_id_alert"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_action")),
        comment="What people did about alerts, and escalations that ended an acknowledgement. An alert is acknowledged if"
        " the newest row that is no note is `ack`.",
    )
    op.create_index("ix_alert_action_alert_id", "alert_action", ["alert_id", "id"])
    op.add_column(
        "outbox",
        sa.Column(
            "escalation_id",
            sa.BigInteger(),
            nullable=True,
            comment="Escalation of an acknowledged alert that it reports; `transition_id` is then the last change before it.",
        ),
    )
    op.create_foreign_key(
        op.f("fk_outbox_escalation_id_alert_action"), "outbox", "alert_action", ["escalation_id"], ["id"]
    )
    op.add_column(
        "outbox",
        sa.Column(
            "webhook_due_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When it is sent to the webhook next; null: it was accepted, or is not for the webhook.",
        ),
    )
    op.add_column(
        "outbox",
        sa.Column(
            "webhook_attempts",
            sa.Integer(),
            server_default=sa.text("0"),
            nullable=False,
            comment="How often sending it to the webhook failed.",
        ),
    )
    op.add_column(
        "outbox",
        sa.Column(
            "webhook_error", sa.Text(), nullable=True, comment="Why the webhook did not accept it last."
        ),
    )
    op.create_index(
        "ix_outbox_webhook",
        "outbox",
        ["webhook_due_at"],
        postgresql_where=sa.text("webhook_due_at is not null"),
    )
    op.execute(_OUTBOX.format("Events to be sent by OTLP and to the webhook at least once"))


def downgrade() -> None:
    """Go one revision back."""
    op.execute(_OUTBOX.format("Events to be exported by OTLP at least once"))
    op.drop_index("ix_outbox_webhook", "outbox")
    for column in ("webhook_error", "webhook_attempts", "webhook_due_at", "escalation_id"):
        op.drop_column("outbox", column)
    op.drop_table("alert_action")
