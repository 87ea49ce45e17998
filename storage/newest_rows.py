"""SQL that finds the newest comparisons, whether they are rows or in blocks, without reading all of a time."""


def newest(
    columns: str,
    *,
    since: str,
    before: str,
    most: str,
    version: str = "null::integer",
    folded: str = "null::bigint",
    more: str = "",
) -> str:
    """Return a query of the newest comparisons of a time, at most so many; the alias of `comparison` is `c`.

    The rows are read along the primary key, and of the blocks the newest that have so many together.

    Parameters
    ----------
    columns
        What it returns, with `captured_at`, `exchange_id` and `item` among it.
    since, before, most
        Expressions: the time, of which the first belongs to it and the second does not, and the number.
    version, folded
        Expressions: only of this version, and only of batches that are folded with this one or an earlier one; null: of all.
    more
        Joins and conditions of `c`, which must be those that `version` and `folded` say.
    """
    order = "c.captured_at desc, c.exchange_id desc, c.item desc"
    within = f"c.captured_at >= {since} and c.captured_at < {before}"
    return f"""(
        select * from (
            select {columns} from comparison c {more or "where true"} and {within} order by {order} limit {most}
        ) as of_rows
        union all
        select * from (
            select {columns}
            from (select newest_from({most}, {since}, {before}, {version}, {folded}) as at offset 0) edge
            join condensed_block k on k.captured_to >= edge.at and k.captured_from < {before}
            cross join lateral block_rows(k) c {more or "where true"} and {within} and c.captured_at >= edge.at
            order by {order} limit {most}
        ) as of_blocks
        order by captured_at desc, exchange_id desc, item desc limit {most}
    )"""  # noqa: S608 - expressions
