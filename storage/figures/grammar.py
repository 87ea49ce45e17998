"""The tokens that a grammar left no choice of, in a slice's newest answers."""

from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_MOST: Final = 5_000  # answers that are read
_COUNTED: Final = text(
    """
    select count(*) as answers, count(forced) as known, coalesce(sum(forced), 0) as forced,
        coalesce(sum(scored) filter (where forced is not null), 0) as scored
    from (
        select cast(detail ->> 'n_forced' as int) as forced, cast(detail ->> 'n_scored' as int) as scored
        from comparisons(:begin, :end, array[cast(:slice as integer)])
        where model_version_id = :version and slice_ids @> array[cast(:slice as integer)] and detail ->> 'grammar' = 'true'
        order by captured_at desc limit :most
    ) newest
"""
)


class GrammarTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Answers under a grammar.

    Parameters
    ----------
    answers, known
        How many there are, and of how many the record shows where the grammar left no choice.
    forced, scored
        Of those: tokens without a choice, which are left out of divergence and first choices, and all that were scored.
    """

    answers: int
    known: int
    forced: int
    scored: int


async def grammar_tokens(
    connection: AsyncConnection, version_id: int, slice_id: int, begin: datetime, end: datetime
) -> GrammarTokens | None:
    """Return what is known of the newest 5,000 answers of a period that were made under a grammar; None: there are none."""
    found = await connection.execute(
        _COUNTED, {"version": version_id, "slice": slice_id, "begin": begin, "end": end, "most": _MOST}
    )
    row = found.one()
    counted = GrammarTokens(
        answers=int(row.answers), known=int(row.known), forced=int(row.forced), scored=int(row.scored)
    )
    return counted if counted.answers else None
