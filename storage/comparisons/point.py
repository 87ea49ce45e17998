"""SQL that finds comparisons by their keys, whether their day is condensed or not."""


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
