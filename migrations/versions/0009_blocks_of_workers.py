"""Workers may store their comparisons as blocks: the column `of_batch`, and functions that find and merge such blocks.

The compatibility rule: it adds a column, indexes and functions; the functions of 0008 return the same rows. The release before folds rows
alone: workers write none of these blocks before `storage.write_blocks` is set, which it does not know.

Revision ID: 0009
Revises: 0008
"""

from importlib import import_module
from typing import Final

import sqlalchemy as sa
from alembic import op

_OF_0008: Final = vars(import_module("quantdrift.migrations.versions.0008_condensed_blocks"))

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_MIXED: Final = {
    "batch_id": "coalesce({}.batch_id, {}.of_batch)",
    "stored_at": "coalesce({}.stored_at, {}.condensed_at)",
}
_BLOCK_VALUES: Final[str] = _OF_0008["_BLOCK_VALUES"].replace("create function", "create or replace function")
_NEW_BLOCK_VALUES: Final = _BLOCK_VALUES.replace(
    "v.batch_id", _MIXED["batch_id"].format("v", "block")
).replace("v.stored_at", _MIXED["stored_at"].format("v", "block"))
_COMPARISONS_OF: Final = """
    create function comparisons_of(batches bigint[]) returns setof comparison
    language sql stable parallel safe as $$
        select * from public.comparison c where c.batch_id = any(batches)
        union all
        select r.* from public.condensed_block b cross join lateral public.block_rows(b) r where b.of_batch = any(batches)
    $$
"""
# Only whole blocks are counted, so that more is read than was asked for, never less.
_NEWEST_FROM: Final = """
    create function newest_from(
        most integer, since timestamptz, before timestamptz, of_version integer default null, folded bigint default null
    ) returns timestamptz
    language sql stable parallel safe as $$
        select greatest(since, coalesce((
            select counted.from_at from (
                select sum(b.n) over newest as n, min(b.captured_from) over newest as from_at
                from public.condensed_block b
                where b.captured_to >= since and b.captured_to < before and (of_version is null or b.model_version_id = of_version)
                    and (folded is null or b.of_batch is null or exists (
                        select from public.batch k where k.id = b.of_batch and k.fold_seq <= folded
                    ))
                window newest as (order by b.captured_to desc rows unbounded preceding)
            ) counted where counted.n >= most limit 1
        ), since))
    $$
"""
_REFUSED: Final = """
    create function block_refused(why text) returns bigint
    language plpgsql stable set search_path = pg_catalog, pg_temp as $body$
    begin
        raise exception 'not as a block: %', why using errcode = 'QD001';
    end $body$
"""
# Erasing and this take turns, so that none of them misses what the other has moved. The row of a batch that is not folded yet is read with
# the batch: such a block stays as it is.
_LOCK: Final = "lock table public.condensed_block in share update exclusive mode;"
_MERGE: Final = """
    create function blocks_merge(before timestamptz, most bigint) returns bigint
    language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $body$
    declare
        of_version integer;
        of_day date;
        n_merged bigint;
    begin
        {lock}
        select b.model_version_id, (b.captured_to at time zone 'UTC')::date into of_version, of_day
        from public.condensed_block b
        where b.n <= 512 and b.captured_to < before and not exists (
            select from public.batch k where k.id = b.of_batch and (k.fold_seq is null or k.stored_at >= before)
        )
        group by 1, 2
        having sum(b.n) >= 1024 or (count(*) > 1 and (max(b.captured_to) at time zone 'UTC')::date < (before at time zone 'UTC')::date)
        order by 2, 1 limit 1;
        if not found then
            return 0;
        end if;
        with chosen as (
            select id from (
                select b.id, sum(b.n) over (order by b.captured_from, b.id) - b.n as n_before
                from public.condensed_block b
                where b.n <= 512 and b.model_version_id = of_version
                    and b.captured_to >= of_day::timestamp at time zone 'UTC'
                    and b.captured_to < least(before, of_day::timestamp at time zone 'UTC' + interval '24 hours')
                    and not exists (
                        select from public.batch k where k.id = b.of_batch and (k.fold_seq is null or k.stored_at >= before)
                    )
            ) small where n_before < most
        ), gone as (
            delete from public.condensed_block b using chosen where b.id = chosen.id returning b.*
        ), placed as materialized (
            select {values}, (row_number() over (order by v.captured_at, v.exchange_id, v.item) - 1) / 1024 as part
            from gone g cross join lateral unnest({given}) as v ({names})
        ), of_slice as (
            select part, member.slice, count(*) filter (where flip)::integer as n_changed,
                max(divergence) filter (where flip) as worst_changed, max(divergence) filter (where flip is not true) as worst_other
            from placed cross join lateral unnest(slice_ids::integer[]) as member (slice) group by 1, 2
        ), of_slices as (
            select part, array_agg(slice order by slice) as slices, array_agg(n_changed order by slice) as changed,
                array_agg(worst_changed order by slice) as worst_changed, array_agg(worst_other order by slice) as worst_other
            from of_slice group by 1
        ), block as (
            select part, min(captured_at) as captured_from, max(captured_at) as captured_to, count(*)::integer as n_rows,
                count(*) filter (where flip)::integer as n_changed, {gathered}
            from (select * from placed order by captured_at, exchange_id, item) sorted group by 1
        ), made as (
            insert into public.condensed_block (
                model_version_id, captured_from, captured_to, n, n_changed, slices, changed, worst_changed, worst_other, {names}
            )
            select of_version, b.captured_from, b.captured_to, b.n_rows, b.n_changed, coalesce(s.slices, '{}'),
                coalesce(s.changed, '{}'), coalesce(s.worst_changed, '{}'), coalesce(s.worst_other, '{}'), {arrays}
            from block b left join of_slices s using (part)
        )
        select count(*) into n_merged from placed;
        return n_merged;
    end $body$
"""
_NAMES: Final = tuple(_OF_0008["_VALUES"])
_MERGE_FILLED: Final = (
    _MERGE.replace("{lock}", _LOCK)
    .replace(
        "{values}",
        ", ".join(f"{_MIXED[n].format('v', 'g')} as {n}" if n in _MIXED else f"v.{n}" for n in _NAMES),
    )
    .replace("{given}", ", ".join(f"g.{name}" for name in _NAMES))
    .replace(
        "{gathered}", ", ".join(f"case when count({n}) > 0 then array_agg({n}) end as a_{n}" for n in _NAMES)
    )
    .replace("{arrays}", ", ".join(f"b.a_{name}" for name in _NAMES))
    .replace("{names}", ", ".join(_NAMES))
)
_CONDENSE: Final[str] = _OF_0008["_CONDENSE_FILLED"].replace("create function", "create or replace function")
_ERASE: Final[str] = _OF_0008["_ERASE"]
_BEGIN: Final = "\n    begin\n"
_MADE: Final = (_NEW_BLOCK_VALUES, _COMPARISONS_OF, _NEWEST_FROM, _REFUSED, _MERGE_FILLED)
_PRIVATE: Final = ("comparisons_of", "newest_from", "block_refused", "blocks_merge")
_COMMENTS: Final = {
    "function block_refused": "Fails: the statement of a worker that calls it is stored as rows in its place.",
    "function comparisons_of": "The rows of comparison that batches have, those in the blocks of workers, too. A block that the monitor has merged since is left out: all of it was folded.",
    "function newest_from": "A time since which blocks have at least so many comparisons, to read the newest ones by; since where they have fewer.",
}
_TABLE: Final = "The divergence of one item: candidate output against reference output. One row per item."
_IN_BLOCKS: Final = f"{_TABLE} Days older than storage.condense_after_days are in condensed_block, with storage.write_blocks the newest, too: comparisons(SINCE, UNTIL) has the rows of both."
_OF_BLOCKS: Final = (
    "Up to 1,024 comparisons of one version that are older than storage.condense_after_days, or that a worker stored as a"
    " block (storage.write_blocks), with an array of values for each column of comparison. Read it through comparisons(SINCE, UNTIL)"
    " or the views."
)
_VALUE_COMMENTS: Final = {
    "batch_id": "As in comparison; null where all are of of_batch.",
    "stored_at": "As in comparison; null where it is condensed_at.",
}


def _locked(function: str) -> str:
    """Return a function that takes the lock first."""
    assert function.count(_BEGIN) == 1
    return function.replace(_BEGIN, f"{_BEGIN}        {_LOCK}\n")


def upgrade() -> None:
    """Go one revision forward."""
    op.add_column(
        "condensed_block",
        sa.Column(
            "of_batch",
            sa.BigInteger(),
            nullable=True,
            comment="batch whose worker stored the block; null: the monitor made it.",
        ),
    )
    op.create_index(
        "ix_condensed_block_of_batch",
        "condensed_block",
        ["of_batch"],
        postgresql_where=sa.text("of_batch is not null"),
    )
    op.create_index(
        "ix_condensed_block_small", "condensed_block", ["captured_to"], postgresql_where=sa.text("n <= 512")
    )
    op.create_table_comment("comparison", _IN_BLOCKS)
    op.create_table_comment("condensed_block", _OF_BLOCKS)
    # Not `op.execute`, which would read a colon as the beginning of a parameter.
    execute = op.get_bind().exec_driver_sql
    for name, comment in _VALUE_COMMENTS.items():
        execute(f"comment on column condensed_block.{name} is '{comment}'")
    for statement in (*_MADE, _locked(_CONDENSE), _locked(_ERASE)):
        execute(statement)
    for name in _PRIVATE:
        execute(f"revoke all on function {name} from public")
    for subject, comment in _COMMENTS.items():
        execute(f"comment on {subject} is '{comment}'")


def downgrade() -> None:
    """Go one revision back: what workers stored as blocks becomes rows, which the release before folds."""
    execute = op.get_bind().exec_driver_sql
    execute(
        "insert into comparison select r.* from condensed_block b cross join lateral block_rows(b) r where b.of_batch is not null"
    )
    execute("delete from condensed_block where of_batch is not null")
    for statement in (_BLOCK_VALUES, _CONDENSE, _ERASE):
        execute(statement)
    for name in _PRIVATE:
        execute(f"drop function {name}")
    for name in _VALUE_COMMENTS:
        execute(f"comment on column condensed_block.{name} is 'As in comparison.'")
    op.drop_index("ix_condensed_block_small", "condensed_block")
    op.drop_index("ix_condensed_block_of_batch", "condensed_block")
    op.drop_column("condensed_block", "of_batch")
    op.create_table_comment(
        "comparison",
        f"{_TABLE} Days older than storage.condense_after_days are in condensed_block: comparisons(SINCE, UNTIL) has the rows of both.",
    )
    op.create_table_comment(
        "condensed_block",
        "Up to 1,024 comparisons of one version that are older than storage.condense_after_days, with an array of values for each"
        " column of comparison. Read it through comparisons(SINCE, UNTIL) or the views.",
    )
