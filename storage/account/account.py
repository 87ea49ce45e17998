"""The account of every sample: what became of the sampled requests of each model, and how many nothing says of."""

from datetime import timedelta
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

SILENT: Final = timedelta(minutes=5)
"""A start of a sidecar that sent no counts for so long has ended; what it had then is not accounted for."""

_ACCOUNT: Final = text("""
    select model, stratum, sum(taken)::bigint as taken, sum(thinned)::bigint as thinned, sum(lost)::bigint as lost,
        sum(expired)::bigint as expired, sum(finished)::bigint as finished, sum(in_stream)::bigint as in_stream,
        coalesce(sum(in_sidecar) filter (where not final and at > now() - cast(:silent as interval)), 0)::bigint
            as in_sidecar,
        coalesce(sum(in_sidecar) filter (where final or at <= now() - cast(:silent as interval)), 0)::bigint
            as unaccounted
    from account group by model, stratum order by model, stratum
""")


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the sampled requests of a model, in total.

    `taken = thinned + lost + expired + finished + in_stream + in_sidecar + unaccounted`, as of the newest tallies.

    Parameters
    ----------
    taken
        Chosen by the first phase.
    thinned, lost
        Left out by the second phase; lost before the stream.
    expired, finished, in_stream
        Of the published: removed from the stream unread; compared, quarantined or skipped; neither.
    in_sidecar
        In the memory or the sockets of a running sidecar.
    unaccounted
        The same of a sidecar that has ended without its last counts; negative: counted twice.
    """

    taken: int = 0
    thinned: int = 0
    lost: int = 0
    expired: int = 0
    finished: int = 0
    in_stream: int = 0
    in_sidecar: int = 0
    unaccounted: int = 0

    def __add__(self, other: "Account") -> "Account":
        """Return the sum of every figure."""
        names = self.__struct_fields__
        return Account(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def missing(self, n_waiting: int | None) -> int:
        """Return how many requests nothing says of.

        Exact once the newest tally is newer than the last traffic. Before that it is up to one tally interval's traffic
        too small, and may be negative.

        Parameters
        ----------
        n_waiting
            Exchanges of the model in the stream, as NATS says; None: NATS does not answer.
        """
        return self.unaccounted + (0 if n_waiting is None else self.in_stream - n_waiting)


async def accounts(connection: AsyncConnection) -> dict[str, dict[str, Account]]:
    """Return the accounts by model and header stratum; the empty model is for requests whose model was not known.

    Raises
    ------
    RetryError
        Postgres is not available.
    """
    by_model: dict[str, dict[str, Account]] = {}
    for row in (await connection.execute(_ACCOUNT, {"silent": SILENT})).mappings():
        figures = {name: row[name] for name in Account.__struct_fields__}
        by_model.setdefault(row["model"], {})[row["stratum"]] = Account(**figures)
    return by_model
