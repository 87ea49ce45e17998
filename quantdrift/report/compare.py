"""The comparison of two candidate versions of a model, slice by slice: read, computed, and put in order, worst first."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import inf
from typing import Final

from quantdrift.core.config.schema import Config
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import Metric
from quantdrift.core.slices import EVERYTHING
from quantdrift.facts.estimate import Change, Estimate, change_of, correlation, difference, ratio
from quantdrift.report.figures import ComparedSlice, ComparedVersion, SideFigures, VersionComparison
from quantdrift.report.finding import bins_by_key, by_key, task_of
from quantdrift.report.period import ceiling
from quantdrift.storage.estimates import MOST_ROWS, Side, SliceClusters, cluster_sums, pair_sums
from quantdrift.storage.report.facts import Grain, SliceName, Version, VersionSpan, Window
from quantdrift.storage.report.reading import Reader

DAYS: Final = 7
"""Of each version, this many of its newest days are compared."""
_NAMED: Final = 12  # versions that an error names


async def compare(
    reader: Reader,
    config: Config,
    *,
    old: str,
    new: str,
    model: str = "",
    days: int = DAYS,
    end: datetime | None = None,
) -> VersionComparison:
    """Compare two versions that are named as requests name them.

    Parameters
    ----------
    reader
        Reads in one snapshot.
    model
        Their model; empty: the only model that has both.
    days
        Of each version its newest days are compared.
    end
        Nothing captured from this time on is compared; None: no limit.

    Raises
    ------
    OperatorError
        The model or a version is not known, or nothing of it was compared; the message names the known ones.
    """
    if old == new:
        raise OperatorError(f"--from and --to are both `{old}`: give two versions")
    versions = await reader.versions()
    pair = find(versions, old=old, new=new, model=model)
    spans = await reader.versions_read.spans([version.id for version in pair], timedelta(days=days), end)
    for version in pair:
        if version.id not in spans:
            raise OperatorError(
                f"nothing of {version.model} {version.candidate_version} is compared yet:"
                " see `quantdrift status`, or `quantdrift report` for the versions that have comparisons"
            )
    return await compare_pair(reader, config, pair[0], pair[1], spans=spans, end=end)


def find(versions: Sequence[Version], *, old: str, new: str, model: str = "") -> tuple[Version, Version]:
    """Return the two versions by name: of each the newest one with a reference.

    Raises
    ------
    OperatorError
        The model or a version is not known; the message names the known ones.
    """
    models = sorted({version.model for version in versions})
    if model and model not in models:
        raise OperatorError(f"no version of a model `{model}` is known: {nearest(model, models)}")
    newest: dict[tuple[str, str], Version] = {}
    for version in sorted(versions, key=lambda version: (bool(version.reference_digest), version.id)):
        newest[version.model, version.candidate_version] = version
    wanted = [model] if model else models
    for option, name in (("--from", old), ("--to", new)):
        if not any((one, name) in newest for one in wanted):
            known = sorted((key for key in newest if key[0] in wanted), key=lambda key: -newest[key].id)
            listed = ", ".join(" ".join(key) if len(wanted) > 1 else key[1] for key in known[:_NAMED])
            more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
            of = f" of {wanted[0]}" if len(wanted) == 1 else ""
            raise OperatorError(
                f"{option}: no version `{name}`{of} is known. Known versions, newest first: {listed or 'none'}{more}"
            )
    both = [one for one in wanted if (one, old) in newest and (one, new) in newest]
    if not both:
        raise OperatorError(
            f"no model has both versions, `{old}` and `{new}`: give two versions of one model"
        )
    if len(both) > 1:
        raise OperatorError(f"several models have both versions: give --model, one of {', '.join(both)}")
    return newest[both[0], old], newest[both[0], new]


async def compare_pair(
    reader: Reader,
    config: Config,
    old: Version,
    new: Version,
    *,
    spans: Mapping[int, VersionSpan],
    end: datetime | None = None,
) -> VersionComparison:
    """Compare two versions of one model over the windows in `spans`, as far as they lie before `end`."""
    names = {name.id: name for name in await reader.slices(old.model)}
    cap = config.budget(old.model).cap
    windows = [await _window(reader, spans[version.id], end) for version in (old, new)]
    if all(window.grain is Grain.ITEM for window in windows):
        pair = await pair_sums(
            reader.connection, _side(old, windows[0], cap), _side(new, windows[1], cap), slice_ids=list(names)
        )
        of_old, of_new = (
            {one.slice_id: one for one in pair if one.version_id == id_} for id_ in (old.id, new.id)
        )
        correlations = {key: _correlations(of_old[key], of_new[key]) for key in of_old if key in of_new}
        old_side, new_side = (
            {key: _figures(one, cap) for key, one in side.items()} for side in (of_old, of_new)
        )
    else:
        correlations = {}
        old_side, new_side = [
            await _apart(reader, version, window, cap, list(names))
            for version, window in zip((old, new), windows, strict=True)
        ]
    entries = [
        _compared(names[key], old_side[key], new_side[key], correlations.get(key, {}))
        for key in old_side
        if key in new_side
    ]
    different = bool(old.reference_digest and new.reference_digest) and (
        old.reference_digest != new.reference_digest
    )
    return VersionComparison(
        model=old.model,
        task=task_of(config, old.model),
        old=_version(old, windows[0]),
        new=_version(new, windows[1]),
        aggregate=next((entry for entry in entries if entry.predicate == EVERYTHING), None),
        slices=tuple(sorted((entry for entry in entries if entry.predicate != EVERYTHING), key=_order)),
        only_old=_names(names, old_side, new_side),
        only_new=_names(names, new_side, old_side),
        warning=(
            "the two versions were compared with different references: the difference may be one of the references"
            if different
            else ""
        ),
    )


async def _window(reader: Reader, span: VersionSpan, end: datetime | None) -> Window:
    until = span.last if end is None else min(span.last, end)
    window = Window(begin=span.first, end=until, grain=Grain.ITEM)
    n, first, last = await reader.versions_read.extent(window, span.version_id, MOST_ROWS + 1)
    if first is not None and last is not None and n <= MOST_ROWS:
        # From the first to the last one, and not to the end of an hour that has only begun.
        return Window(begin=first, end=last + timedelta(microseconds=1), grain=Grain.ITEM)
    return Window(begin=span.first, end=ceiling(until, timedelta(hours=1)), grain=Grain.HOUR)


def _side(version: Version, window: Window, cap: float) -> Side:
    return Side(version_id=version.id, begin=window.begin, end=window.end, cap=cap)


async def _apart(
    reader: Reader, version: Version, window: Window, cap: float, slice_ids: Sequence[int]
) -> dict[int, SideFigures]:
    """Return each slice of a version that has data in the window, of versions that are not read in one pass.

    Roll-ups know no person. There a session counts as one unit in each hour, with the variance that values which are all
    alike would have.
    """
    if window.grain is Grain.ITEM:
        found = await cluster_sums(reader.connection, [_side(version, window, cap)], slice_ids=slice_ids)
        return {one.slice_id: _figures(one, cap) for one in found}
    caps = {version.id: cap}
    totals = by_key(await reader.divergence.sums(window, window.end - window.begin, caps, slice_ids))
    bins = bins_by_key(await reader.divergence.bins(window, caps, slice_ids))
    return {
        key[1]: SideFigures(
            n_exchanges=sums.n_groups,
            n_clusters=None,
            flip=sums.estimate(Metric.FLIP, cap),
            divergence=sums.estimate(Metric.DIVERGENCE, cap, bins.get(key, ())),
        )
        for key, sums in totals.items()
    }


def _figures(clusters: SliceClusters, cap: float) -> SideFigures:
    return SideFigures(
        n_exchanges=clusters.n_exchanges,
        n_clusters=clusters.n_clusters,
        flip=ratio(clusters.of[Metric.FLIP]),
        divergence=ratio(clusters.of[Metric.DIVERGENCE], cap),
    )


def _correlations(old: SliceClusters, new: SliceClusters) -> dict[str, float]:
    """Return the correlation of the two means by measure: of people whom both versions have answered."""
    return {name: correlation(old.of[name], new.of[name], sums) for name, sums in new.shared.items()}


def _compared(
    name: SliceName, old: SideFigures, new: SideFigures, correlations: Mapping[str, float]
) -> ComparedSlice:
    flip = difference(old.flip, new.flip, correlations.get(Metric.FLIP, 0.0))
    divergence = difference(old.divergence, new.divergence, correlations.get(Metric.DIVERGENCE, 0.0))
    changes = {change_of(flip), change_of(divergence)}
    return ComparedSlice(
        slice_id=name.id,
        name=name.name,
        predicate=name.predicate,
        change=next(
            (change for change in (Change.WORSE, Change.BETTER) if change in changes), Change.UNCLEAR
        ),
        old=old,
        new=new,
        flip=flip,
        divergence=divergence,
    )


def _order(entry: ComparedSlice) -> tuple[int, float, float, str]:
    """Return the key that sorts slices worst first: what is shown, then the lower ends of flips and of divergence."""

    def low(estimate: Estimate | None) -> float:
        return inf if estimate is None or estimate.low is None else -estimate.low

    return list(Change).index(entry.change), low(entry.flip), low(entry.divergence), entry.name


def _names(
    names: Mapping[int, SliceName], side: Mapping[int, SideFigures], other: Mapping[int, SideFigures]
) -> tuple[str, ...]:
    return tuple(sorted(names[key].name for key in side if key not in other))


def _version(version: Version, window: Window) -> ComparedVersion:
    return ComparedVersion(
        version_id=version.id,
        version=version.candidate_version,
        reference_digest=version.reference_digest,
        first_seen_at=version.first_seen_at,
        begin=window.begin,
        end=window.end,
        source=window.grain,
    )
