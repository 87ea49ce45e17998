"""People whose answers changed: an estimate from the people who were sampled. The report and the page use this one."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_AFFECTED: Final = text("""
    with person as (
        select c.model_version_id, s.slice_id, c.group_key, min(1 / (c.pi1 * c.pi2)) as w_seen,
            min(1 / (c.pi1 * c.pi2)) filter (where c.flip) as w_changed
        from comparison c cross join unnest(c.slice_ids) as s (slice_id)
        where c.captured_at >= :begin and c.captured_at < :end and c.group_key <> ''
            and c.model_version_id = any(cast(:versions as int[])) and s.slice_id = any(cast(:slices as int[]))
        group by 1, 2, 3
    )
    select model_version_id, slice_id, sum(w_seen) as n, coalesce(sum(w_changed), 0) as affected from person group by 1, 2
""")


class People(msgspec.Struct, frozen=True, kw_only=True):
    """People of one slice of one version in a time, estimated.

    Parameters
    ----------
    n
        Who sent a request.
    affected
        Of these, who got at least one answer that had changed.
    """

    n: float
    affected: float


async def people(
    connection: AsyncConnection,
    versions: Sequence[int],
    slices: Sequence[int],
    begin: datetime,
    end: datetime,
) -> dict[tuple[int, int], People]:
    """Return the people of [begin, end) by version and slice; where no request names its person, there is no entry.

    A person is one value of `sampling.sticky_header`, of which the database has a hash; requests without it are not counted.

    Assumption: within one policy, the draws of a person are the same for all of their requests, as those of the sidecars are. A
    person is then seen exactly if their request with the highest probability is, and the least weight 1 / (pi1 * pi2) of the
    requests in question that were seen is the inverse of the probability to see the person.

    Bound: none; it is an estimate without an interval. Under one policy whose second phase keeps everything, its mean is the
    number of people. A person whose requests come under several policies of the time has several chances to be seen, and
    the second phase may add chances: the mean is then above the number of people, never below it.

    References
    ----------
    Horvitz and Thompson (1952), A generalization of sampling without replacement from a finite universe, Journal of the American
    Statistical Association 47.

    Raises
    ------
    RetryError, OperatorError
        As `Database.begin`.
    """
    values = {"begin": begin, "end": end, "versions": list(versions), "slices": list(slices)}
    return {
        (row["model_version_id"], row["slice_id"]): People(n=float(row["n"]), affected=float(row["affected"]))
        for row in (await connection.execute(_AFFECTED, values)).mappings()
    }
