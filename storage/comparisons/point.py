"""SQL that finds comparisons by their keys, whether they are rows or in blocks."""


def at_key(keys: str) -> str:
    """Return a join with the comparison of each key; its alias is `c`, and a key without one is left out.

    Parameters
    ----------
    keys
        Alias of what has `captured_at`, `exchange_id` and `item`. Of a condensed day each key costs some two milliseconds.
    """
    return f"""cross join lateral (
            select * from comparisons({keys}.captured_at, {keys}.captured_at + interval '1 microsecond') found
            where found.exchange_id = {keys}.exchange_id and found.item = {keys}.item
            limit 1
        ) c"""  # noqa: S608 - a name


def of_labels(begin: str, end: str) -> str:
    """Return a join of `label l` with the comparison of each label; its alias is `c`, and a label without one is left out.

    Parameters
    ----------
    begin, end
        The time of the labels, as expressions. Of condensed days each block that has a label is read once.
    """
    return f"""left join comparison new on new.captured_at = l.captured_at and new.exchange_id = l.exchange_id and new.item = l.item
        left join (
            select r as row, r.captured_at, r.exchange_id, r.item
            from condensed_block b cross join lateral block_rows(b) r
            where b.captured_to >= {begin} and b.captured_from < {end} and exists (
                select from label k where k.captured_at between b.captured_from and b.captured_to
            )
        ) old on old.captured_at = l.captured_at and old.exchange_id = l.exchange_id and old.item = l.item
        join lateral (select (coalesce(new, old.row)).*) c on c.exchange_id is not null"""  # noqa: S608 - expressions
