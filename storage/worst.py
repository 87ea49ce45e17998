"""The keys of the worst items of a slice, found in a bounded time: one statement for the live page and for frames.

The index on the divergence finds the worst items of all traffic. The first `DEEP` of these are read: any slice that is as bad as
the traffic, or worse, has its worst items among them, and then they are exactly the slice's. A slice with fewer there is read by
the index on the slices instead: it is rare, or sound.

A condensed block knows how bad its worst item of each slice is: the worst `n` items are in the `n` blocks whose worst item is the worst.
"""

from typing import Final

DEEP: Final = 20_000
"""Items of all traffic that are read at most, in the order of their divergence: some 0.1 s."""
_WITHIN: Final = "c.captured_at >= {begin} and c.captured_at < {end} and c.model_version_id = any({versions})"
_KEY: Final = "c.captured_at, c.exchange_id, c.item, c.flip, c.divergence"
_ORDER: Final = "c.divergence desc nulls last, c.captured_at"
# `offset 0` separates the order from the search: else Postgres would search by the order, and read all traffic.
_WORST: Final = f"""
    changed as materialized (
        select {_KEY} from comparison c
        where {{by_flip}} and c.flip and {_WITHIN} and c.slice_ids && {{slices}}
        order by {_ORDER} limit {{n}}
    ), near as materialized (
        select {_KEY} from (
            select {_KEY}, c.slice_ids from comparison c where {_WITHIN} order by {_ORDER} limit {{deep}}
        ) c
        where (select count(*) from changed) < {{n}} and c.slice_ids && {{slices}} and not ({{by_flip}} and c.flip is true)
        order by {_ORDER} limit {{n}}
    ), far as materialized (
        select {_KEY} from (
            select {_KEY} from comparison c
            where (select count(*) from changed) + (select count(*) from near) < {{n}} and {_WITHIN}
                and c.slice_ids && {{slices}} and not ({{by_flip}} and c.flip is true)
            offset 0
        ) c
        order by {_ORDER} limit {{n}}
    ), block as (
        select b.id, b.captured_from >= {{begin}} and b.captured_to < {{end}} as is_inside, of.n_changed, of.worst_changed, of.worst_other
        from condensed_block b cross join lateral (
            select sum(b.changed[at.place]) as n_changed, max(b.worst_changed[at.place]) as worst_changed,
                max(b.worst_other[at.place]) as worst_other
            from (select array_position(b.slices, wanted) as place from unnest({{slices}}) as wanted) at
        ) of
        where b.captured_to >= {{begin}} and b.captured_from < {{end}} and b.model_version_id = any({{versions}})
            and b.slices && {{slices}}
    ), picked as (
        (
            select id from block where is_inside and {{by_flip}} and n_changed > 0
            order by worst_changed desc nulls last fetch first ({{n}}) rows with ties
        )
        union (
            select id from block where is_inside and {{by_flip}}
            order by worst_other desc nulls last fetch first ({{n}}) rows with ties
        )
        union (
            select id from block where is_inside and not {{by_flip}}
            order by greatest(worst_changed, worst_other) desc nulls last fetch first ({{n}}) rows with ties
        )
        union (select id from block where not is_inside)
    ), old as materialized (
        select {_KEY} from condensed_block b cross join lateral block_rows(b) c
        where b.id in (select id from picked) and {_WITHIN} and c.slice_ids && {{slices}}
        order by {{by_flip}} and c.flip is true desc, {_ORDER} limit {{n}}
    ), worst as materialized (
        select * from changed
        union all select * from near where (select count(*) from changed) + (select count(*) from near) >= {{n}}
        union all select * from far
        union all select * from old
    )
"""  # noqa: S608 - constants


def worst_keys(
    *, slices: str, versions: str, begin: str, end: str, n: str, changed_first: bool, deep: int = DEEP
) -> str:
    """Return common table expressions, of which `worst` has the keys of at least the `n` worst items, if there are so many.

    Parameters
    ----------
    slices, versions
        Expressions of type integer[]: items of any of these slices, and of any of these versions.
    begin, end, n
        Expressions of the times, and of the number of items.
    changed_first
        Whether items whose answer changed come before all others.
    deep
        As `DEEP`.
    """
    by_flip = "true" if changed_first else "false"
    return _WORST.format(
        slices=slices, versions=versions, begin=begin, end=end, n=n, by_flip=by_flip, deep=int(deep)
    )
