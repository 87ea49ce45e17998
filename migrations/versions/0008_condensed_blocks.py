"""Old comparisons, up to 1,024 in a row: the table `condensed_block`, what makes its rows, and what reads them.

The compatibility rule: it adds a table and functions, and the views have the same columns and rows. The release before reads old
comparisons from `comparison` alone: nothing is condensed before `storage.condense_after_days` is set, which it does not know.

Revision ID: 0008
Revises: 0007
"""

import re
from typing import Any, Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from quantdrift.migrations.initial.functions import FUNCTIONS
from quantdrift.migrations.initial.views import VIEWS

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_AS: Final = "As in comparison."
_AS_TEXT: Final = "As in comparison, as text."
_UUID: Final = postgresql.UUID(as_uuid=False)
# A column with a value of each comparison: type, comment, and the value as an expression of a row of comparison.
_VALUES: Final[dict[str, tuple[sa.types.TypeEngine[Any], str, str]]] = {
    "captured_at": (_TIME, "Values of comparison.captured_at, in this order.", "captured_at"),
    "exchange_id": (_UUID, _AS, "exchange_id"),
    "item": (sa.SmallInteger(), _AS, "item"),
    "batch_id": (sa.BigInteger(), _AS, "batch_id"),
    "policy_id": (sa.Integer(), _AS, "policy_id"),
    "slice_ids": (sa.Text(), _AS_TEXT, "slice_ids::text"),
    "n_items": (sa.SmallInteger(), _AS, "n_items"),
    "in_slices": (
        sa.Text(),
        "Of an item whose exchange has several, how many of these are in each of its slices, as text; else null.",
        "in_slices::text",
    ),
    "source": (sa.Text(), _AS, "source"),
    "header_stratum": (sa.Text(), _AS, "header_stratum"),
    "body_stratum": (sa.Text(), _AS, "body_stratum"),
    "pi1": (sa.Double(), _AS, "pi1"),
    "pi2": (sa.Double(), _AS, "pi2"),
    "u1": (sa.Double(), _AS, "u1"),
    "u2": (sa.Double(), _AS, "u2"),
    "group_id": (
        _UUID,
        "group_key of comparison where it has 32 hexadecimal digits, else null.",
        "case when group_key ~ '^[0-9a-f]{32}$' then group_key::uuid end",
    ),
    "group_text": (
        sa.Text(),
        "group_key of comparison where group_id is null.",
        "case when group_key !~ '^[0-9a-f]{32}$' then nullif(group_key, '') end",
    ),
    "flip": (sa.Boolean(), _AS, "flip"),
    "topk": (sa.Boolean(), _AS, "topk"),
    "js": (sa.Double(), _AS, "js"),
    "divergence": (sa.Double(), _AS, "divergence"),
    "margin": (sa.Double(), _AS, "margin"),
    "candidate_margin": (sa.Double(), _AS, "candidate_margin"),
    "reference_margin": (sa.Double(), _AS, "reference_margin"),
    "detail": (sa.Text(), _AS_TEXT, "detail::text"),
    "request_id": (
        _UUID,
        "header.x-request-id of comparison.attributes where it is a UUID, else null.",
        "case when has_uuid then (attributes ->> 'header.x-request-id')::uuid end",
    ),
    "attributes": (
        sa.Text(),
        "The other attributes of comparison, as text.",
        "case when has_uuid then attributes - 'header.x-request-id' else attributes end::text",
    ),
    "features": (sa.Text(), _AS_TEXT, "features::text"),
    "trace_id": (
        _UUID,
        "Trace of comparison where it is a sampled traceparent of version 00, else null.",
        "case when has_trace then substr(trace, 4, 32)::uuid end",
    ),
    "span_id": (
        sa.BigInteger(),
        "Span of that traceparent.",
        "case when has_trace then ('x' || substr(trace, 37, 16))::bit(64)::bigint end",
    ),
    "trace_text": (
        sa.Text(),
        "trace of comparison where trace_id is null.",
        "case when not has_trace then nullif(trace, '') end",
    ),
    "stored_at": (_TIME, _AS, "stored_at"),
    "tie": (sa.Boolean(), _AS, "tie"),
    "origin": (sa.Text(), _AS, "origin"),
    "latency_s": (sa.Double(), _AS, "latency_s"),
    "first_token_s": (sa.Double(), _AS, "first_token_s"),
    "per_token_s": (sa.Double(), _AS, "per_token_s"),
}
_KINDS: Final = {
    "model_version_id": "integer",
    "slice_ids": "integer[]",
    "group_key": "text",
    "detail": "jsonb",
    "attributes": "jsonb",
    "features": "jsonb",
    "trace": "text",
}
_REBUILT: Final = {
    "model_version_id": "block.model_version_id",
    "slice_ids": "v.slice_ids::integer[]",
    "group_key": "coalesce(replace(v.group_id::text, '-', ''), v.group_text, '')",
    "detail": "v.detail::jsonb",
    "attributes": "case when v.request_id is null then v.attributes::jsonb"
    " else v.attributes::jsonb || jsonb_build_object('header.x-request-id', v.request_id) end",
    "features": "v.features::jsonb",
    "trace": "case when v.trace_id is null then coalesce(v.trace_text, '')"
    " else '00-' || replace(v.trace_id::text, '-', '') || '-' || lpad(to_hex(v.span_id), 16, '0') || '-01' end",
}
# The columns of comparison, in their order.
_COLUMNS: Final = (
    *(
        "captured_at",
        "exchange_id",
        "item",
        "batch_id",
        "model_version_id",
        "policy_id",
        "slice_ids",
        "n_items",
        "source",
    ),
    *(
        "header_stratum",
        "body_stratum",
        "pi1",
        "pi2",
        "u1",
        "u2",
        "group_key",
        "flip",
        "topk",
        "js",
        "divergence",
        "margin",
    ),
    *(
        "candidate_margin",
        "reference_margin",
        "detail",
        "attributes",
        "features",
        "trace",
        "stored_at",
        "tie",
        "origin",
    ),
    *("latency_s", "first_token_s", "per_token_s"),
)


_DIALECT: Final = postgresql.dialect()  # type: ignore[no-untyped-call]


def _kind(name: str) -> str:
    """Return the type of a column of comparison."""
    return _KINDS.get(name) or str(_VALUES[name][0].compile(dialect=_DIALECT))


# The second function only has the rows of the table: the view `item` needs one thing more.
_BLOCK_VALUES: Final = (
    """
    create function block_values(block condensed_block) returns table ({kinds}, in_slices integer[])
    language sql stable parallel safe rows 1024 as $$
        select {rebuilt}, v.in_slices::integer[] from unnest({given}) as v ({names})
    $$
    """.replace("{rebuilt}", ", ".join(_REBUILT.get(name, f"v.{name}") for name in _COLUMNS))
    .replace("{given}", ", ".join(f"block.{name}" for name in _VALUES))
    .replace("{names}", ", ".join(_VALUES))
    .replace("{kinds}", ", ".join(f"{name} {_kind(name)}" for name in _COLUMNS))
)
_BLOCK_ROWS: Final = """
    create function block_rows(block condensed_block) returns setof comparison
    language sql stable parallel safe rows 1024 as $$ select {columns} from public.block_values(block) $$
""".replace("{columns}", ", ".join(_COLUMNS))
_COMPARISONS: Final = """
    create function comparisons(
        since timestamptz, until timestamptz, of_slices integer[] default null, only_changed boolean default false
    ) returns setof comparison
    language sql stable parallel safe as $$
        select * from public.comparison c where c.captured_at >= since and c.captured_at < until
        union all
        select r.* from public.condensed_block b cross join lateral public.block_rows(b) r
        where b.captured_to >= since and b.captured_from < until and (of_slices is null or b.slices && of_slices)
            and (not only_changed or b.n_changed > 0) and r.captured_at >= since and r.captured_at < until
    $$
"""
# What waits for the fold stays. One statement sees one state of the database: no reader finds a row twice, or not at all.
_CONDENSE: Final = """
    create function comparison_condense(day date, since timestamptz, most integer) returns table (n bigint, last_at timestamptz)
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        midnight timestamptz := day::timestamp at time zone 'UTC';
        begin_at timestamptz := greatest(since, midnight);
        end_at timestamptz := midnight + interval '24 hours';
    begin
        return query
        with chosen as materialized (  -- of the last exchange all items
            select c.captured_at, c.exchange_id
            from public.comparison c join public.batch b on b.id = c.batch_id and b.fold_seq is not null
            where c.captured_at >= begin_at and c.captured_at < end_at
            order by c.captured_at, c.exchange_id, c.item limit most
        ), gone as (
            delete from public.comparison c using (select distinct * from chosen) k
            where c.captured_at >= begin_at and c.captured_at < end_at
                and c.captured_at = k.captured_at and c.exchange_id = k.exchange_id
            returning c.*
        ), of_exchange as (
            select captured_at, exchange_id, member.slice, count(*) as n_items
            from gone cross join lateral unnest(slice_ids) as member (slice) where gone.n_items > 1 group by 1, 2, 3
        ), counted as (
            select g.captured_at, g.exchange_id, g.item, array_agg(e.n_items order by member.place) as in_slices
            from gone g cross join lateral unnest(g.slice_ids) with ordinality as member (slice, place)
            join of_exchange e using (captured_at, exchange_id, slice)
            where g.n_items > 1 group by 1, 2, 3
        ), placed as materialized (
            select g.*, counted.in_slices,
                (row_number() over (partition by g.model_version_id order by g.captured_at, g.exchange_id, g.item) - 1) / 1024 as part,
                coalesce(g.attributes ->> 'header.x-request-id' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$', false) as has_uuid,
                g.trace ~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-01$' as has_trace
            from gone g left join counted using (captured_at, exchange_id, item)
        ), of_slice as (
            select model_version_id, part, member.slice, count(*) filter (where flip)::integer as n_changed,
                max(divergence) filter (where flip) as worst_changed, max(divergence) filter (where flip is not true) as worst_other
            from placed cross join lateral unnest(slice_ids) as member (slice) group by 1, 2, 3
        ), of_slices as (
            select model_version_id, part, array_agg(slice order by slice) as slices, array_agg(n_changed order by slice) as changed,
                array_agg(worst_changed order by slice) as worst_changed, array_agg(worst_other order by slice) as worst_other
            from of_slice group by 1, 2
        ), block as (
            select model_version_id, part, min(captured_at) as captured_from, max(captured_at) as captured_to, count(*)::integer as n_rows,
                count(*) filter (where flip)::integer as n_changed, {gathered}
            from (select * from placed order by model_version_id, captured_at, exchange_id, item) sorted group by 1, 2
        ), made as (
            insert into public.condensed_block (
                model_version_id, captured_from, captured_to, n, n_changed, slices, changed, worst_changed, worst_other, {names}
            )
            select b.model_version_id, b.captured_from, b.captured_to, b.n_rows, b.n_changed, coalesce(s.slices, '{}'),
                coalesce(s.changed, '{}'), coalesce(s.worst_changed, '{}'), coalesce(s.worst_other, '{}'), {arrays}
            from block b left join of_slices s using (model_version_id, part)
        )
        select count(*), max(g.captured_at) from gone g;
    end $body$
"""
_CONDENSE_FILLED: Final = (
    _CONDENSE.replace(
        "{gathered}",
        ", ".join(
            f"case when count({value}) > 0 then array_agg({value}) end as a_{name}"
            for name, (_, _, value) in _VALUES.items()
        ),
    )
    .replace("{names}", ", ".join(_VALUES))
    .replace("{arrays}", ", ".join(f"b.a_{name}" for name in _VALUES))
)
_BLOCKS_DROP: Final = """
    create function blocks_drop(before timestamptz, most bigint) returns setof bigint
    language sql volatile security definer set search_path = pg_catalog, pg_temp as $body$
        delete from public.condensed_block where id in (
            select id from public.condensed_block where captured_to < before limit most
        ) returning id
    $body$
"""
# A transaction that began before its rows were moved, and has read nothing of it yet, would find it empty: an hour is longer than any
# of ours lasts. One that has read it, such as a dump, is waited for.
_PARTITION_EMPTY: Final = """
    create function partition_empty(day date) returns boolean
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        name text := 'comparison_' || to_char(day, 'YYYYMMDD');
        midnight timestamptz := day::timestamp at time zone 'UTC';
        has_rows boolean;
    begin
        if pg_relation_size(format('public.%I', name)) = 0 or not exists (
            select from public.condensed_block
            where captured_to >= midnight and captured_to < midnight + interval '24 hours'
            having max(condensed_at) < now() - interval '1 hour'
        ) then
            return false;
        end if;
        execute format('select exists (select from public.%I)', name) into has_rows;
        if has_rows then
            return false;
        end if;
        execute format('lock table public.%I in access exclusive mode', name);
        execute format('select exists (select from public.%I)', name) into has_rows;
        if not has_rows then
            execute format('truncate public.%I', name);
        end if;
        return not has_rows;
    end $body$
"""
# What is left of a block goes back into comparison, and is condensed again on the next day.
_ERASE: Final = """
    create or replace function comparison_erase(times timestamptz[], ids uuid[]) returns void
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        block public.condensed_block;
    begin
        delete from public.comparison where (captured_at, exchange_id) in (select * from unnest(times, ids));
        for block in
            delete from public.condensed_block b
            where exists (
                select from unnest(times, ids) as erased (at, id)
                where erased.at between b.captured_from and b.captured_to and erased.id = any(b.exchange_id)
            )
            returning b.*
        loop
            insert into public.comparison ({columns}) select {columns} from public.block_rows(block) r
            where (r.captured_at, r.exchange_id) not in (select * from unnest(times, ids));
        end loop;
    end $body$
""".replace("{columns}", ", ".join(_COLUMNS))
_ITEM_ROWS: Final = """
    select {hot}, member.slice_id, case when c.n_items = 1 then 1 else (
            select count(*) from public.comparison other
            where other.captured_at = c.captured_at and other.exchange_id = c.exchange_id
                and member.slice_id = any(other.slice_ids)
        ) end as n_in_slice
    from public.comparison c cross join lateral unnest(c.slice_ids) as member (slice_id) {hot_times}
    union all
    select {cold}, member.slice_id, coalesce(member.n, 1)
    from public.condensed_block b cross join lateral public.block_values(b) r
    cross join lateral unnest(r.slice_ids, r.in_slices) as member (slice_id, n) {cold_times}
""".replace("{hot}", ", ".join(f"c.{name}" for name in _COLUMNS)).replace(
    "{cold}", ", ".join(f"r.{name}" for name in _COLUMNS)
)
_HOT_TIMES: Final = "where c.captured_at >= since and c.captured_at < until"
_COLD_TIMES: Final = """
    where b.captured_to >= since and b.captured_from < until and (of_slices is null or b.slices && of_slices)
        and (not only_changed or b.n_changed > 0) and r.captured_at >= since and r.captured_at < until
"""
_OF_ROWS: Final = {view.name: view for view in VIEWS if view.name in {"item", "slice_item"}}
_FROM_TABLE: Final = """from comparison c
                cross join lateral unnest(c.slice_ids) as member (slice_id)"""
_COUNT: Final = re.compile(r"case when c\.n_items = 1 then 1 else \(.*?\) end", re.DOTALL)


def _item(*, hot_times: str = "", cold_times: str = "") -> str:
    """Return the query of the view `item` over the rows of `comparison` and those of blocks."""
    rows = _ITEM_ROWS.replace("{hot_times}", hot_times).replace("{cold_times}", cold_times)
    query = _COUNT.sub("c.n_in_slice", _OF_ROWS["item"].query, count=1)
    return (
        query.replace(_FROM_TABLE, "from ({rows}) c")
        .replace("member.slice_id", "c.slice_id")
        .replace("join model_version", "join public.model_version")
        .replace("join slice", "join public.slice")
        .replace("{rows}", rows)
    )


_QUERIES: Final = {
    "item": _item(),
    "slice_item": _OF_ROWS["slice_item"].query.replace(
        "from comparison c",
        "from (select c.* from comparison c union all select r.* from condensed_block b cross join lateral block_rows(b) r) c",
    ),
}
_ITEMS: Final = f"""
    create function items(
        since timestamptz, until timestamptz, of_slices integer[] default null, only_changed boolean default false
    ) returns setof item
    language sql stable parallel safe as $$ {_item(hot_times=_HOT_TIMES, cold_times=_COLD_TIMES)} $$
"""
_MADE: Final = (_BLOCK_VALUES, _BLOCK_ROWS, _COMPARISONS, _CONDENSE_FILLED, _BLOCKS_DROP, _PARTITION_EMPTY)
_PRIVATE: Final = ("comparison_condense", "blocks_drop", "partition_empty", "comparisons", "items")
_COMMENTS: Final = {
    "function block_values": "The comparisons of a row of condensed_block, and of each how many items of its exchange are in each of its slices.",
    "function block_rows": "The comparisons of a row of condensed_block.",
    "function comparisons": "The rows of comparison from one time until before another, those that are condensed, too. With slices, or only changed decisions, blocks without one are not read: say the condition as well.",
    "function items": "The rows of the view item from one time until before another. Of condensed days it reads what is asked for, where the view reads all: with slices, or only changed decisions, blocks without one are not read; say the condition as well.",
    "column coverage_hour.n_tallies": "Tallies that are kept: a sidecar sends one every few seconds, of which one stays every three minutes.",
}


_TABLE: Final = "The divergence of one item: candidate output against reference output. One row per item."


def upgrade() -> None:
    """Go one revision forward."""
    op.create_table_comment(
        "comparison",
        f"{_TABLE} Days older than storage.condense_after_days are in condensed_block: comparisons(SINCE, UNTIL) has the rows of both.",
    )
    op.create_table(
        "condensed_block",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False, comment="Surrogate key."),
        sa.Column(
            "model_version_id",
            sa.Integer(),
            nullable=False,
            comment="model_version that all of them belong to.",
        ),
        sa.Column("captured_from", _TIME, nullable=False, comment="Earliest capture time in it."),
        sa.Column(
            "captured_to", _TIME, nullable=False, comment="Latest capture time in it, on the same UTC day."
        ),
        sa.Column("n", sa.Integer(), nullable=False, comment="Comparisons in it."),
        sa.Column("n_changed", sa.Integer(), nullable=False, comment="Those whose decision differs."),
        sa.Column(
            "slices",
            postgresql.ARRAY(sa.Integer()),
            nullable=False,
            comment="Every slice that one of them belongs to.",
        ),
        sa.Column(
            "changed",
            postgresql.ARRAY(sa.Integer()),
            nullable=False,
            comment="Of each of these slices, how many decisions differ.",
        ),
        sa.Column(
            "worst_changed",
            postgresql.ARRAY(sa.Double()),
            nullable=False,
            comment="Of each of these slices, the largest divergence where the decision differs, or null.",
        ),
        sa.Column(
            "worst_other",
            postgresql.ARRAY(sa.Double()),
            nullable=False,
            comment="Of each of these slices, the largest divergence of the others, or null.",
        ),
        sa.Column(
            "condensed_at",
            _TIME,
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the block was made.",
        ),
        *(
            sa.Column(name, postgresql.ARRAY(kind), nullable=True, comment=comment)
            for name, (kind, comment, _) in _VALUES.items()
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_condensed_block")),
        comment="Up to 1,024 comparisons of one version that are older than storage.condense_after_days, with an array of values for each"
        " column of comparison. Read it through comparisons(SINCE, UNTIL) or the views.",
    )
    op.create_index("ix_condensed_block_captured_to", "condensed_block", ["captured_to"])
    op.create_index(
        "ix_condensed_block_model_version_id_captured_to",
        "condensed_block",
        ["model_version_id", "captured_to"],
    )
    # Not `op.execute`, which would read a colon as the beginning of a parameter.
    execute = op.get_bind().exec_driver_sql
    for statement in _MADE:
        execute(statement)
    for view in _OF_ROWS.values():
        execute(f"create or replace view {view.name} ({', '.join(view.columns)}) as {_QUERIES[view.name]}")
    execute(_ITEMS)
    execute(_ERASE)
    for name in _PRIVATE:
        execute(f"revoke all on function {name} from public")
    for subject, comment in _COMMENTS.items():
        execute(f"comment on {subject} is '{comment}'")


def downgrade() -> None:
    """Go one revision back: what is condensed becomes rows again."""
    execute = op.get_bind().exec_driver_sql
    execute("insert into comparison select r.* from condensed_block b cross join lateral block_rows(b) r")
    execute(FUNCTIONS["comparison_erase"].replace("create function", "create or replace function"))
    for view in _OF_ROWS.values():
        execute(f"create or replace view {view.name} ({', '.join(view.columns)}) as {view.query}")
    said = next(view for view in VIEWS if view.name == "coverage_hour").columns["n_tallies"]
    execute(f"comment on column coverage_hour.n_tallies is '{said}'")
    for name in (*_PRIVATE, "block_rows", "block_values"):
        execute(f"drop function {name}")
    op.drop_table("condensed_block")
    op.create_table_comment("comparison", _TABLE)
