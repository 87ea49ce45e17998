"""Estimates with intervals from frames of compared items: the numbers that `quantdrift compare` gives of the same rows."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quantdrift.facts.arrays import Codes, Sample, cluster_sums, shared_sums
from quantdrift.facts.estimate import ClusterSums, Estimate, compared, holm, ratio
from quantdrift.frames.weights import floats

FrameT = TypeVar("FrameT")
_EXCHANGE, _FLIP = "exchange_id", "flip"
_Names = str | Sequence[str]


def estimate(
    frame: FrameT,
    *,
    value: str = "flip",
    by: _Names = (),
    clusters: str = "group_key",
    weight: str = "weight",
    cap: float = 1.0,
) -> FrameT:
    """Return the mean of a column in the traffic with its 95 % interval, for each group of rows.

    The interval counts people as they come back: rows with the same cluster are correlated (`quantdrift.facts.estimate.ratio` says
    which assumptions and which bound it has). Of the rows of `Tables.items` the figures equal those of `quantdrift compare`.

    Parameters
    ----------
    frame
        A pandas or Polars frame, or an Arrow table; the result is of the same kind.
    value
        A column of numbers or truth values of at least 0. Rows without a value are left out, with their weight.
    by
        Columns whose values make the groups, such as `["candidate_version", "slice"]`; none: all rows are one group. Versions and
        slices are different things: a mean over several of them is seldom what is asked for.
    clusters
        The column that names the person or the exchange. A row without a name is a cluster of its own, with the other rows of its
        `exchange_id` where the frame has that column.
    weight
        The column that says how many items of the traffic a row stands for.
    cap
        The largest possible value. Larger ones count as this much: take the model's `budget.cap` for the divergence.

    Returns
    -------
    The columns of `by`, `n` rows, `n_clusters`, `mean`, `low` and `high`, ordered by the columns of `by`.

    Raises
    ------
    ValueError
        A column is missing, or a weight or a value is negative.
    """
    names = _listed(by)
    items = _Items(frame, [*names], value=value, clusters=clusters, weight=weight, cap=cap)
    rows = []
    for group, mask in items.groups():
        sample = items.sample(mask)
        rows.append({**group, **_row(sample, ratio(cluster_sums(sample), cap))})
    return cast("FrameT", items.made(rows, names, ("n", "n_clusters", "mean", "low", "high")))


def difference(
    frame: FrameT,
    column: str,
    old: Any,
    new: Any,
    *,
    value: str = "flip",
    by: _Names = (),
    clusters: str = "group_key",
    weight: str = "weight",
    cap: float = 1.0,
) -> FrameT:
    """Return the mean where `column` is `new` minus the mean where it is `old`, with its 95 % interval, for each group of rows.

    A person who is on both sides makes the two means correlated, and counts so. A column `flip` is used, too, where there is one: it
    says how alike the large values of a person are. Parameters and errors are those of `estimate`.

    Parameters
    ----------
    column, old, new
        Such as `"candidate_version", "int8-1", "int8-2"`, or `"slice", "all", "customer=elm"`.

    Returns
    -------
    The columns of `by`, `n_old`, `n_new`, `n_shared` clusters on both sides, the means `old` and `new`, `difference`, `low` and
    `high`, its p-value `p`, and `p_adjusted`, which allows for the number of groups (`quantdrift.facts.estimate.holm`): who names the
    groups where it is at most .05 names any that does not differ with a probability of at most 5 %. Groups that lack a side are left
    out.
    """
    names = _listed(by)
    items = _Items(frame, [*names, column], value=value, clusters=clusters, weight=weight, cap=cap)
    of_side = items.places(column, (old, new))
    rows = []
    for group, mask in items.groups(names):
        sides = [items.sample(mask & side) for side in of_side]
        sums = [cluster_sums(side) for side in sides]
        means = [ratio(side_sums, cap) for side_sums in sums]
        contrast = compared(
            sums[0],
            sums[1],
            shared_sums(sides[0], sides[1]),
            cap,
            flips=items.flips(mask, of_side),
        )
        if means[0] is None or means[1] is None or contrast is None:
            continue
        rows.append(
            {
                **group,
                "n_old": len(sides[0].value),
                "n_new": len(sides[1].value),
                "n_shared": len(np.intersect1d(sides[0].cluster, sides[1].cluster)),
                "old": means[0].mean,
                "new": means[1].mean,
                "difference": contrast.mean,
                "low": contrast.low,
                "high": contrast.high,
                "p": contrast.p,
            }
        )
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_adjusted"] = p
    columns = (
        *("n_old", "n_new", "n_shared", "old", "new"),
        *("difference", "low", "high", "p", "p_adjusted"),
    )
    return cast("FrameT", items.made(rows, names, columns))


def _row(sample: Sample, found: Estimate | None) -> dict[str, Any]:
    return {
        "n": len(sample.value),
        "n_clusters": len(np.unique(sample.cluster)),
        "mean": found.mean if found else None,
        "low": found.low if found else None,
        "high": found.high if found else None,
    }


def _listed(by: _Names) -> list[str]:
    return [by] if isinstance(by, str) else list(by)


class _Items:
    """The columns of a frame that an estimate needs, as arrays."""

    def __init__(
        self, frame: Any, by: list[str], *, value: str, clusters: str, weight: str, cap: float
    ) -> None:
        self._like = frame
        has = list(frame.column_names if isinstance(frame, pa.Table) else frame.columns)
        if missing := [name for name in (*by, value, clusters, weight) if name not in has]:
            raise ValueError(f"the frame has no column `{missing[0]}`: it has {', '.join(map(str, has))}")
        self._by = {name: _encoded(frame[name]) for name in by}
        values, weights = floats(frame[value]), floats(frame[weight])
        if np.isnan(weights).any() or (weights < 0).any():
            raise ValueError(f"`{weight}` is missing or negative in a row")
        if (values < 0).any():
            raise ValueError(f"`{value}` is negative in a row: an estimate is of values from 0 to `cap`")
        exchange = _codes(frame[_EXCHANGE]) if _EXCHANGE in has else np.arange(len(values))
        named = _codes(frame[clusters], missing=-1)
        self._known = ~np.isnan(values) & (weights > 0)
        self._flips = floats(frame[_FLIP]) if _FLIP in has else None
        self._all = Sample(
            value=np.minimum(values, cap),
            weight=weights,
            # Behind the named clusters, each exchange without a name is one.
            cluster=np.where(named < 0, exchange + named.max(initial=0) + 1, named),
            exchange=exchange,
        )

    def groups(self, names: Sequence[str] | None = None) -> list[tuple[dict[str, Any], Any]]:
        """Return the groups by some of the columns, in order, each with the places of its rows."""
        names = list(self._by) if names is None else names
        if not names:
            return [({}, np.ones(len(self._all.value), dtype=np.bool_))]
        codes = np.stack([self._by[name][0] for name in names])
        groups = [
            (
                {name: self._by[name][1][code] for name, code in zip(names, group, strict=True)},
                (codes == group[:, np.newaxis]).all(axis=0),
            )
            for group in np.unique(codes, axis=1).T
        ]
        return sorted(groups, key=lambda group: [(value is None, value) for value in group[0].values()])

    def places(self, name: str, wanted: Sequence[Any]) -> list[Any]:
        """Return where a column has each of some values."""
        codes, values = self._by[name]
        for value in wanted:
            if value not in values:
                raise ValueError(f"no row has `{value}` in `{name}`: it has {', '.join(map(str, values))}")
        return [codes == values.index(value) for value in wanted]

    def sample(self, place: Any) -> Sample:
        """Return the rows at some places that have a value."""
        return Sample(*(column[place & self._known] for column in self._all))

    def flips(self, place: Any, sides: Sequence[Any]) -> tuple[ClusterSums, ClusterSums] | None:
        """Return the sums of the changed answers at some places of both sides; None where the frame does not have them."""
        if self._flips is None:
            return None
        whole = self._all._replace(value=self._flips)
        counted = ~np.isnan(self._flips) & (whole.weight > 0) & place
        old, new = (cluster_sums(Sample(*(column[counted & side] for column in whole))) for side in sides)
        return old, new

    def made(self, rows: list[dict[str, Any]], by: list[str], names: Sequence[str]) -> Any:
        """Return rows as a frame of the kind that was given."""
        columns = {name: [row[name] for row in rows] for name in (*by, *names)}
        if isinstance(self._like, pa.Table):
            return pa.table(columns)
        return type(self._like)(columns)


def _encoded(column: Any) -> tuple[Codes, list[Any]]:
    """Return the number of each row's value, and the values."""
    encoded = _arrow(column).dictionary_encode(null_encoding="encode")
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    return _whole(encoded.indices), encoded.dictionary.to_pylist()


def _codes(column: Any, *, missing: int | None = None) -> Codes:
    """Return the number of each row's value; `missing` where it is NULL or an empty text."""
    codes, values = _encoded(column)
    if missing is None:
        return codes
    nothing = [number for number, value in enumerate(values) if value is None or value == ""]
    return np.where(np.isin(codes, nothing), missing, codes)


def _whole(indices: Any) -> Codes:
    return cast("Codes", np.asarray(indices.to_numpy(zero_copy_only=False), dtype=np.int64))


def _arrow(column: Any) -> Any:
    """Return a column of any frame as an Arrow array that can be encoded: ids of 16 bytes and numbers can, nested ones cannot."""
    if hasattr(column, "to_arrow"):
        column = column.to_arrow()
    elif not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.array(column, from_pandas=True)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # of no chunk
        column = pa.array([], column.type)
    return pc.cast(column, column.type.value_type) if pa.types.is_dictionary(column.type) else column
