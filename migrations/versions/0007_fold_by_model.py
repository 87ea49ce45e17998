"""The tables `model_fold`, `model_span`, `shard` and `monitor_process`: each model is folded by itself, in shards.

The compatibility rule: it only adds tables and columns. The release before folds by the row of `fold`, and says by `fold_seq` without
`model_seq` that it did.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table(
        "model_fold",
        sa.Column("model", sa.Text(), nullable=False, comment="Model name, as in requests."),
        sa.Column(
            "number",
            sa.Integer(),
            nullable=False,
            comment="From 0, in the order in which models began: a model is in the shard number modulo fold.shards.",
        ),
        sa.Column(
            "fold_seq",
            sa.BigInteger(),
            nullable=False,
            comment="Last batch that was folded or does not concern it.",
        ),
        sa.Column(
            "event_time",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Running maximum of the times of its exchanges and of tallies: its time.",
        ),
        sa.Column(
            "exchange_time",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Running maximum of capture times of its exchanges: the clock of its allowance.",
        ),
        sa.Column(
            "mass",
            sa.Double(),
            nullable=False,
            comment="Lambda: integral of dt / (30 days * models * its live detectors) until exchange_time.",
        ),
        sa.Column(
            "n_detectors",
            sa.Integer(),
            nullable=True,
            comment="Its live detectors; null: they are counted when it is next folded.",
        ),
        sa.Column(
            "folded_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was folded, by the database's clock.",
        ),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_model_fold")),
        sa.UniqueConstraint("number", name=op.f("uq_model_fold_number")),
        comment="How far each model is folded. Who folds it locks its row, so that no two monitors fold it at a time.",
    )
    op.create_table(
        "model_span",
        sa.Column("model", sa.Text(), nullable=False, comment="Model name, as in requests."),
        sa.Column(
            "from_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Latest capture of the batches before its first one: its share begins.",
        ),
        sa.Column(
            "last_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Its latest capture: its share ends 30 days later.",
        ),
        sa.PrimaryKeyConstraint("model", "from_at", name=op.f("pk_model_span")),
        comment="When each model shares the fleet's allowance for false alerts: from its first batch until 30 days after its last.",
    )
    op.create_table(
        "monitor_process",
        sa.Column(
            "name",
            sa.Text(),
            nullable=False,
            comment="Host name, process id and a random number of its start.",
        ),
        sa.Column(
            "pid",
            sa.Integer(),
            nullable=True,
            comment="Server process of its session; null: not known, since a pooler is between.",
        ),
        sa.Column(
            "seen_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it said last that it runs.",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_monitor_process")),
        comment="The monitors that share the shards: each for 20 s after it last said that it runs, and as long as its session lasts.",
    )
    op.create_table(
        "shard",
        sa.Column(
            "number",
            sa.SmallInteger(),
            autoincrement=False,
            nullable=False,
            comment="From 0; a model is in the shard model_fold.number modulo fold.shards.",
        ),
        sa.Column(
            "holder",
            sa.Text(),
            nullable=False,
            comment="name of monitor_process; one that is not there folds it no more.",
        ),
        sa.Column(
            "since",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it took it.",
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_shard")),
        comment="The monitor that folds each shard of the models, where fold.shards is more than one.",
    )
    op.add_column(
        "fold",
        sa.Column(
            "model_seq",
            sa.BigInteger(),
            nullable=True,
            comment="fold_seq as of the last monitor that keeps model_fold; another value: a release before it has folded since.",
        ),
    )
    op.add_column(
        "fold",
        sa.Column(
            "shards",
            sa.SmallInteger(),
            server_default=sa.text("1"),
            nullable=False,
            comment="monitor.shards of the monitor that leads: models are folded in so many shards.",
        ),
    )
    op.add_column(
        "fold",
        sa.Column(
            "newest_capture",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="Latest capture of the batches with a number: where the span of a new model begins.",
        ),
    )
    op.alter_column(
        "fold",
        "fold_seq",
        existing_type=sa.BIGINT(),
        comment="Last batch that has a number; model_fold has how far each model is folded.",
        existing_comment="Last batch folded.",
        existing_nullable=False,
    )
    op.alter_column(
        "fold",
        "mass",
        existing_type=sa.DOUBLE_PRECISION(precision=53),
        comment="Largest mass of model_fold.",
        existing_comment="Lambda: integral of dt / (30 days * live detectors) until exchange_time.",
        existing_nullable=False,
    )
    op.create_table_comment(
        "fold",
        "The monitor's progress over all models: one row.",
        existing_comment="The monitor's progress: one row.",
        schema=None,
    )


def downgrade() -> None:
    """Go one revision back."""
    op.create_table_comment(
        "fold",
        "The monitor's progress: one row.",
        existing_comment="The monitor's progress over all models: one row.",
        schema=None,
    )
    op.alter_column(
        "fold",
        "mass",
        existing_type=sa.DOUBLE_PRECISION(precision=53),
        comment="Lambda: integral of dt / (30 days * live detectors) until exchange_time.",
        existing_comment="Largest mass of model_fold.",
        existing_nullable=False,
    )
    op.alter_column(
        "fold",
        "fold_seq",
        existing_type=sa.BIGINT(),
        comment="Last batch folded.",
        existing_comment="Last batch that has a number; model_fold has how far each model is folded.",
        existing_nullable=False,
    )
    op.drop_column("fold", "newest_capture")
    op.drop_column("fold", "shards")
    op.drop_column("fold", "model_seq")
    op.drop_table("shard")
    op.drop_table("monitor_process")
    op.drop_table("model_span")
    op.drop_table("model_fold")
