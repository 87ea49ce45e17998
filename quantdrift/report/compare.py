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
from quantdrift.report.difference import Change, change_of, clustered_mean, clustered_share, difference
from quantdrift.report.figures import ComparedSlice, ComparedVersion, SideFigures, VersionComparison
from quantdrift.report.finding import Measured, bins_by_key, by_key, task_of
from quantdrift.report.interval import Estimate, mean_of_bins, share
from quantdrift.report.period import MOST_ITEMS, ceiling
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
    sides, windows = [], []
    for version in (old, new):
        window = await _window(reader, spans[version.id], end)
        windows.append(window)
        sides.append(await _side(reader, window, version.id, cap, list(names)))
    old_side, new_side = sides
    entries = [_compared(names[key], old_side[key], new_side[key]) for key in old_side if key in new_side]
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
    n = await reader.versions_read.count(window, span.version_id, MOST_ITEMS + 1)
    if 0 < n <= MOST_ITEMS:
        return window
    return Window(begin=span.first, end=ceiling(until, timedelta(hours=1)), grain=Grain.HOUR)


async def _side(
    reader: Reader, window: Window, version: int, cap: float, slice_ids: Sequence[int]
) -> dict[int, SideFigures]:
    """Return each slice of a version that has data in the window.

    Roll-ups hold no squares of totals over sessions. There a session counts as one unit in each hour, with the variance
    that values which are all alike would have.
    """
    if window.grain is Grain.ITEM:
        return {
            entry.slice_id: SideFigures(
                n_exchanges=entry.n_exchanges,
                n_clusters=entry.n_clusters,
                flip=clustered_share(entry.flip),
                divergence=clustered_mean(entry.divergence, cap),
            )
            for entry in await reader.versions_read.clusters(window, version, cap, slice_ids)
        }
    caps = {version: cap}
    totals = by_key(await reader.divergence.sums(window, window.end - window.begin, caps, slice_ids))
    bins = bins_by_key(await reader.divergence.bins(window, caps, slice_ids))
    found = {}
    for key, sums in totals.items():
        one = Measured(sums=sums, bins=bins.get(key, ()))
        n = sums.n_effective_of(Metric.DIVERGENCE)
        found[key[1]] = SideFigures(
            n_exchanges=sums.n_groups,
            n_clusters=None,
            flip=share(sums.mean(Metric.FLIP), sums.n_effective_of(Metric.FLIP)),
            divergence=mean_of_bins(sums.mean(Metric.DIVERGENCE), one.bins, n, cap),
        )
    return found


def _compared(name: SliceName, old: SideFigures, new: SideFigures) -> ComparedSlice:
    flip, divergence = difference(old.flip, new.flip), difference(old.divergence, new.divergence)
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
