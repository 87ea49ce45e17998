"""What expires in the stream before it is replayed is counted.

Revision ID: 0011
Revises: 0010
"""

from importlib import import_module

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_BEFORE = import_module("quantdrift.migrations.versions.0002_views").COVERAGE_HOUR
_EXPIRED = (
    "Of the published, expired in the stream before they were replayed, in the hour in which that was found: no part of"
    " n_lost. Negative where a worker had them in hand and was done with them later."
)


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "tally",
        sa.Column(
            "streamed_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When the stream took it, by the server's clock; null of an earlier release.",
        ),
    )
    _alter_models(
        "By model, as far as requests tell theirs: taken; of these published, and lost, number by reason; row of the"
        " sidecar's table of counts, and the last number that was given to an exchange of it."
    )
    op.create_table(
        "arrival",
        sa.Column("boot", sa.UUID(), nullable=False, comment="Start of the sidecar, as in tally."),
        sa.Column(
            "counts_row",
            sa.Integer(),
            nullable=False,
            comment="Row of the sidecar's table of counts, as the numbers name it.",
        ),
        sa.Column("source", sa.Text(), nullable=True, comment="Sidecar; null until its tally has come."),
        sa.Column(
            "stratum", sa.Text(), nullable=True, comment="Header stratum; null until its tally has come."
        ),
        sa.Column("model", sa.Text(), nullable=True, comment="Model; null until its tally has come."),
        sa.Column(
            "numbers",
            postgresql.INT8MULTIRANGE(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="Numbers of the exchanges that were compared, set aside or skipped.",
        ),
        sa.Column(
            "closed",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Numbers in there that never came: gaps are closed when they are too many. Negative: exchanges that a"
            " worker of an earlier release was done with.",
        ),
        sa.Column(
            "expired",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Exchanges that expired, as of the tally in checked.",
        ),
        sa.Column(
            "checked",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="Number of the tally that it was held against last.",
        ),
        sa.Column(
            "due",
            sa.Boolean(),
            server_default=sa.text("true"),
            nullable=False,
            comment="Whether there is something new to hold it against.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was first heard of.",
        ),
        sa.PrimaryKeyConstraint("boot", "counts_row", name=op.f("pk_arrival")),
        comment="What the workers are done with, of one header stratum and model of one sidecar: what is missing"
        " here and in the stream has expired.",
    )
    op.create_table(
        "expiry",
        sa.Column("batch_id", sa.BigInteger(), nullable=False, comment="batch it came with, of kind tally."),
        sa.Column("boot", sa.UUID(), nullable=False, comment="Start of the sidecar, as in tally."),
        sa.Column(
            "counts_row", sa.Integer(), nullable=False, comment="Row of the sidecar's table of counts."
        ),
        sa.Column("source", sa.Text(), nullable=False, comment="Sidecar."),
        sa.Column("stratum", sa.Text(), nullable=False, comment="Header stratum."),
        sa.Column("model", sa.Text(), nullable=False, comment="Model."),
        sa.Column(
            "n",
            sa.BigInteger(),
            nullable=False,
            comment="Exchanges that expired; negative where a worker had them in hand and was done with them later.",
        ),
        sa.ForeignKeyConstraint(
            ["batch_id"], ["batch.id"], name=op.f("fk_expiry_batch_id_batch"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("batch_id", "boot", "counts_row", name=op.f("pk_expiry")),
        comment="Exchanges that expired in the stream before they were replayed, each count by what it grew. Kept"
        " as long as its batch.",
    )
    op.execute(
        f"create or replace view coverage_hour ({', '.join(_BEFORE.columns)}, n_expired) as {_query()}"
    )
    op.execute(f"comment on column coverage_hour.n_expired is {_quoted(_EXPIRED)}")


def downgrade() -> None:
    """Go one revision back; what expires in the stream is counted nowhere then."""
    op.execute("drop view coverage_hour")
    op.execute(f"create view coverage_hour ({', '.join(_BEFORE.columns)}) as {_BEFORE.query}")
    for column, comment in _BEFORE.columns.items():
        op.execute(f"comment on column coverage_hour.{column} is {_quoted(comment)}")
    op.execute(f"comment on view coverage_hour is {_quoted(_BEFORE.comment)}")
    op.drop_table("expiry")
    op.drop_table("arrival")
    _alter_models("By model, as far as requests tell theirs: taken, and of these lost, number by reason.")
    op.drop_column("tally", "streamed_at")


def _alter_models(comment: str) -> None:
    op.alter_column("tally", "models", existing_type=postgresql.JSONB(), comment=comment)


def _query() -> str:
    """Return the view's query: an hour in which a sidecar sent no tally any more may have seen samples of it expire."""
    counts = (
        "n_tallies",
        "n_boots",
        "offered",
        "taken",
        "thinned",
        "published",
        "n_lost",
        "blind_connections",
    )
    said = ", ".join(
        "coalesce((array_agg(lost) filter (where n_tallies > 0))[1], '{}')"
        if name == "lost"
        else f"sum({name})::bigint"
        if name in counts
        else name
        for name in _BEFORE.columns
    )
    nothing = ", ".join(
        "'{}'::jsonb" if name == "lost" else "0" if name in counts else f"gone.{name}"
        for name in _BEFORE.columns
    )
    names = ", ".join(_BEFORE.columns)
    return f"""
        with seen ({names}) as ({_BEFORE.query}),
        gone as (
            select date_bin('1 hour', batch.stored_at, '2000-01-01 00:00:00+00') as hour, source, stratum,
                sum(n)::bigint as n_expired
            from expiry join batch on batch.id = expiry.batch_id
            group by 1, 2, 3
        ),
        both_of_them ({names}, n_expired) as (
            select seen.*, 0::bigint from seen
            union all
            select {nothing}, gone.n_expired from gone
        )
        select {said}, sum(n_expired)::bigint
        from both_of_them
        group by hour, source, stratum
    """  # noqa: S608 - constants


def _quoted(words: str) -> str:
    return "'" + words.replace("'", "''").replace(":", "\\:") + "'"
