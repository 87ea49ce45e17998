"""The account of every sample: the view `account`, and which tally is the last one of a start.

A column with a default and a view are added: the release before can use the schema as before.

Revision ID: 0006
Revises: 0005
"""

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "tally",
        sa.Column(
            "final",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="Whether it is the last one of its boot: no process of it is left, and whatever it took is published,"
            " thinned or lost.",
        ),
    )
    op.execute(f"create view account ({', '.join(_COLUMNS)}) as {_QUERY}")
    op.execute(f"comment on view account is {_quoted(_COMMENT)}")
    for column, comment in _COLUMNS.items():
        op.execute(f"comment on column account.{column} is {_quoted(comment)}")


def downgrade() -> None:
    """Go one revision back."""
    op.execute("drop view account")
    op.drop_column("tally", "final")


def _quoted(text: str) -> str:
    # A colon would be read as a bound parameter.
    return "'" + text.replace("'", "''").replace(":", "\\:") + "'"


_COMMENT: Final = (
    "What became of every sampled request: one row for each start of a sidecar, header stratum and model, as of the newest"
    " tally. taken = thinned + lost + expired + finished + in_stream + in_sidecar. If the start has ended, in_sidecar is 0,"
    " or those requests are not accounted for."
)
_COLUMNS: Final = {
    "source": "Sidecar.",
    "boot": "Start of the sidecar.",
    "stratum": "Header stratum.",
    "model": "Model; empty: requests whose model was not known when they were counted.",
    "at": "When the newest counts were read.",
    "final": "Whether these are the last counts of this start.",
    "offered": "Inference requests seen on the wire. Null where a model is given: requests are counted before it is known.",
    "taken": "Of the offered, chosen by the first phase.",
    "thinned": "Of the taken, left out by the second phase on purpose; no loss.",
    "lost": "Of the taken, lost before the stream, for all reasons together.",
    "expired": "Of the taken, published and removed from the stream before they were replayed.",
    "finished": "Of the taken, compared, quarantined, or skipped without a reference.",
    "in_stream": "Of the taken, published and neither finished nor expired: they wait in the stream or in a worker.",
    "in_sidecar": "Of the taken, none of these yet: they were in the memory or the sockets of the sidecar.",
}
# The newest tally of each start and stratum: one step for each along the primary key.
_QUERY: Final = """
    with recursive known as (
        (select t.source, t.boot, t.stratum from tally t order by t.source, t.boot, t.stratum limit 1)
        union all
        select n.source, n.boot, n.stratum from known k cross join lateral (
            select t.source, t.boot, t.stratum from tally t
            where (t.source, t.boot, t.stratum) > (k.source, k.boot, k.stratum)
            order by t.source, t.boot, t.stratum limit 1
        ) n
    ), newest as (
        select newest_of.*,
            (select coalesce(sum(n.value::bigint), 0) from jsonb_each_text(newest_of.lost) n)::bigint as n_lost
        from known k cross join lateral (
            select * from tally t where t.source = k.source and t.boot = k.boot and t.stratum = k.stratum
            order by t.sequence desc limit 1
        ) newest_of
    ), named as (
        select n.source, n.boot, n.stratum, n.at, n.final, m.key as model, (m.value ->> 'taken')::bigint as taken,
            coalesce((m.value ->> 'thinned')::bigint, 0) as thinned,
            coalesce((m.value ->> 'published')::bigint, 0) as published,
            (select coalesce(sum(r.value::bigint), 0) from jsonb_each_text(m.value -> 'lost') r)::bigint as lost,
            coalesce((m.value ->> 'row')::int, -1) as counts_row,
            coalesce((m.value ->> 'numbered')::bigint, 0) as numbered
        from newest n cross join lateral jsonb_each(n.models) m
    ), rest as (
        select n.source, n.boot, n.stratum, n.at, n.final, n.offered, n.taken - coalesce(s.taken, 0) as taken,
            n.thinned - coalesce(s.thinned, 0) as thinned, n.published - coalesce(s.published, 0) as published,
            n.n_lost - coalesce(s.lost, 0) as lost
        from newest n left join (
            select m.source, m.boot, m.stratum, sum(m.taken)::bigint as taken, sum(m.thinned)::bigint as thinned,
                sum(m.published)::bigint as published, sum(m.lost)::bigint as lost
            from named m group by 1, 2, 3
        ) s on s.source = n.source and s.boot = n.boot and s.stratum = n.stratum
    ), done as (
        select m.source, m.boot, m.stratum, m.model, a.expired, coalesce((
            select sum(upper(one) - lower(one))
            from unnest(a.numbers * int8multirange(int8range(1, m.numbered + 1))) one
        ), 0)::bigint - a.closed as finished
        from named m join arrival a on a.boot = m.boot and a.counts_row = m.counts_row
    )
    select r.source, r.boot, r.stratum, '' as model, r.at, r.final, r.offered, r.taken, r.thinned, r.lost, 0::bigint,
        0::bigint, r.published, r.taken - r.thinned - r.lost - r.published
    from rest r
    union all
    select m.source, m.boot, m.stratum, m.model, m.at, m.final, null, m.taken, m.thinned, m.lost,
        coalesce(d.expired, 0), coalesce(d.finished, 0),
        m.published - coalesce(d.finished, 0) - coalesce(d.expired, 0),
        m.taken - m.thinned - m.lost - m.published
    from named m left join done d
        on d.source = m.source and d.boot = m.boot and d.stratum = m.stratum and d.model = m.model
    where m.taken > 0
"""
