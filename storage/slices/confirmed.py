"""The recent data of confirmed discovered slices: sums over their traffic, their alerts, their evidence."""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from quantdrift.core.records import Metric
from quantdrift.core.signals import signal_of

_SUMMED: Final = ("weight", "weight_sq", "flip", "flip_weight", "divergence", "divergence_weight")
_SUMS: Final = text(f"""
    with inside as (
        select d.id as discovery_id, d.model, r.model_version_id,
            {", ".join(f"sum(r.{name}) as {name}" for name in _SUMMED)}
        from discovery d join rollup_hour r on r.slice_id = d.slice_id
        where d.status = 'confirmed' and r.hour >= :since group by 1, 2, 3
    ), everything as (
        select s.model, r.model_version_id, {", ".join(f"sum(r.{name}) as all_{name}" for name in _SUMMED)}
        from slice s join rollup_hour r on r.slice_id = s.id
        where s.predicate = 'true' and s.model in (select model from inside) and r.hour >= :since group by 1, 2
    )
    select * from inside join everything using (model, model_version_id) order by discovery_id, model_version_id
""")  # noqa: S608 - constants
_ALERTED: Final = text("""
    select distinct d.id from discovery d join alert a on a.slice_id = d.slice_id
    where d.status = 'confirmed' and (a.resolved_at is null or a.resolved_at >= :since)
""")
# While a slice alerts, the evidence of its verdict is that of the alarm; else it is the current evidence.
_EVIDENCE: Final = text("""
    select d.id, max(v.evidence / v.threshold) as ratio from discovery d join verdict v on v.slice_id = d.slice_id
    where d.status = 'confirmed' and v.threshold > 0 and v.last_at >= :since group by 1
""")


class ConfirmedSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over exchanges; names as in `rollup_hour`, the divergence capped."""

    weight: float = 0.0
    weight_sq: float = 0.0
    flip: float = 0.0
    flip_weight: float = 0.0
    divergence: float = 0.0
    divergence_weight: float = 0.0

    @classmethod
    def together(cls, parts: "Iterable[ConfirmedSums]") -> "ConfirmedSums":
        """Return the sums over several versions."""
        all_parts = list(parts)
        return cls(**{name: sum(getattr(part, name) for part in all_parts) for name in _SUMMED})

    def of(self, metric: Metric) -> float:
        """Return the weighted sum of flips or of the divergence."""
        return float(getattr(self, signal_of(metric).column))

    def weight_of(self, metric: Metric) -> float:
        """Return the weight of the items with that metric."""
        return float(getattr(self, f"{signal_of(metric).column}_weight"))


class VersionSums(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of one candidate version, inside a slice and in total."""

    inside: ConfirmedSums
    everything: ConfirmedSums


class SlicePeriod(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a slice in a period.

    Parameters
    ----------
    versions
        One for each candidate version that was compared in it.
    alerted
        Whether an alert of it was open at any time, or is.
    evidence_ratio
        Largest current evidence of any version, divided by its paging threshold.
    """

    versions: tuple[VersionSums, ...]
    alerted: bool = False
    evidence_ratio: float = 0.0


async def watched_slices(connection: AsyncConnection, since: datetime) -> dict[int, SlicePeriod]:
    """Return the data of the confirmed slices since then, by the id of the discovery."""
    period = {"since": since}
    versions: dict[int, list[VersionSums]] = {}
    for row in (await connection.execute(_SUMS, period)).mappings():
        sums = VersionSums(inside=_sums(row), everything=_sums(row, "all_"))
        versions.setdefault(row["discovery_id"], []).append(sums)
    alerted = set((await connection.scalars(_ALERTED, period)).all())
    ratios = {row.id: row.ratio for row in await connection.execute(_EVIDENCE, period)}
    return {
        slice_id: SlicePeriod(
            versions=tuple(versions.get(slice_id, ())),
            alerted=slice_id in alerted,
            evidence_ratio=ratios.get(slice_id, 0.0),
        )
        for slice_id in versions.keys() | alerted | ratios.keys()
    }


def _sums(row: RowMapping, prefix: str = "") -> ConfirmedSums:
    return ConfirmedSums(**{name: float(row[f"{prefix}{name}"]) for name in _SUMMED})
