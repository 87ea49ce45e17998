"""The comparison of two versions, periods or models, slice by slice: read, computed, and put in order, worst first."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from typing import Final, NamedTuple

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import moment
from quantdrift.core.records import Metric
from quantdrift.core.signals import WATCHED, signal_of
from quantdrift.core.slices import EVERYTHING
from quantdrift.facts import figures
from quantdrift.facts.cost import cost_figure
from quantdrift.facts.estimate import (
    Change,
    Difference,
    Estimate,
    adjusted,
    change_of,
    compared,
    difference_with_p,
)
from quantdrift.facts.figures import Counted, Figure, FigureName, Scope, Subject
from quantdrift.report.figures import ComparedSlice, ComparedVersion, Gap, SideFigures, VersionComparison
from quantdrift.report.finding import by_key, task_of
from quantdrift.report.period import ceiling, floor
from quantdrift.storage.cost import mean_worth, prices_of
from quantdrift.storage.figures.divergence import Divergence
from quantdrift.storage.figures.estimates import (
    MOST_ROWS,
    SliceClusters,
    SummedVersion,
    Sums,
    cluster_sums,
    pair_sums,
    sums_of_clusters,
)
from quantdrift.storage.figures.periods import Grain, SumWindow, VersionSpan
from quantdrift.storage.figures.spans import VersionReader
from quantdrift.storage.slices.verdicts import SliceName, slice_names
from quantdrift.storage.snapshot import Connection
from quantdrift.storage.versions import Version, candidate_versions, measure_of_text

DAYS: Final = 7
"""Of each version, this many of its newest days are compared."""
Span = tuple[datetime, datetime]
_NAMED: Final = 12  # versions that an error names


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """What two sides are compared over.

    Parameters
    ----------
    begin, end
        Only what was captured in [begin, end); None: no limit.
    not_in
        Times that are left out on both sides, such as a holiday.
    """

    begin: datetime | None = None
    end: datetime | None = None
    not_in: tuple[Span, ...] = ()


EVERYWHERE: Final = Sides()


async def compare(
    connection: Connection,
    config: Config,
    *,
    old: str,
    new: str,
    model: str = "",
    days: int = DAYS,
    within: Sides = EVERYWHERE,
    most: int = MOST_ROWS,
) -> VersionComparison:
    """Compare two versions that are named as requests name them.

    Parameters
    ----------
    connection
        Reads in one snapshot.
    model
        Their model; empty: the only model that has both.
    days
        Of each version its newest days are compared.
    within
        The limits of both.
    most
        Of a side with more comparisons the roll-ups are read, which know no person.

    Raises
    ------
    OperatorError
        The model or a version is not known, or nothing of it was compared; the message names the known ones.
    """
    if old == new:
        raise OperatorError(f"--from and --to are both `{old}`: give two versions, or two periods")
    versions = await candidate_versions(connection)
    pair = find(versions, old=old, new=new, model=model)
    spans = await VersionReader(connection).spans(
        [version.id for version in pair], timedelta(days=days), within.end
    )
    for version in pair:
        _require(version, version.id in spans)
    return await compare_pair(connection, config, pair[0], pair[1], spans=spans, within=within, most=most)


async def compare_periods(
    connection: Connection,
    config: Config,
    *,
    old: Span,
    new: Span,
    model: str = "",
    version: str = "",
    not_in: tuple[Span, ...] = (),
) -> VersionComparison:
    """Compare two periods of one version.

    Parameters
    ----------
    model, version
        Empty: the only model, and its newest version with a comparison in both periods.

    Raises
    ------
    OperatorError
        The model or the version is not known, the periods overlap, or nothing was compared in one.
    """
    if old[0] < new[1] and new[0] < old[1]:
        raise OperatorError("the two periods overlap: an answer would be on both sides")
    for wanted in await _candidates(connection, model, version):
        sides = [
            await _side(connection, wanted, cut(span, not_in), label=_label(span)) for span in (old, new)
        ]
        if all(side.n for side in sides):
            return await _compare_sides(connection, config, sides[0], sides[1], not_in)
    raise OperatorError(
        f"no version of {model or 'the model'} has comparisons in both periods: compare two versions with --from OLD --to NEW"
    )


async def compare_models(
    connection: Connection,
    config: Config,
    *,
    old: tuple[str, str],
    new: tuple[str, str],
    days: int = DAYS,
    within: Sides = EVERYWHERE,
) -> VersionComparison:
    """Compare two models over the same hours, by the predicates of their slices.

    Parameters
    ----------
    old, new
        Model and version; an empty version is the newest one with a comparison.
    days
        The newest days that both have.

    Raises
    ------
    OperatorError
        A model or version is not known, or they have no time in common.
    """
    pair = []
    for model, name in (old, new):
        candidates = await _candidates(connection, model, name)
        spans = await VersionReader(connection).spans(
            [version.id for version in candidates], timedelta(days=366), within.end
        )
        version = next((version for version in candidates if version.id in spans), candidates[0])
        _require(version, version.id in spans)
        pair.append((version, spans[version.id]))
    begin = max([span.first for _, span in pair] + ([within.begin] if within.begin else []))
    end = min([span.last for _, span in pair] + ([within.end] if within.end else []))
    if within.begin is None:
        begin = max(begin, end - timedelta(days=days))
    if begin >= end:
        raise OperatorError(
            f"{old[0]} and {new[0]} were not compared in the same hours: give --from and --to of a time in which both served"
        )
    parts = cut((begin, end), within.not_in)
    sides = [
        await _side(connection, version, parts, label=f"{version.model} {version.candidate_version}")
        for version, _ in pair
    ]
    return await _compare_sides(connection, config, sides[0], sides[1], within.not_in)


def cut(span: Span, not_in: Sequence[Span]) -> tuple[Span, ...]:
    """Return what is left of a time without some others, in order."""
    parts = [span]
    for begin, end in not_in:
        parts = [
            part
            for first, last in parts
            for part in ((first, min(last, begin)), (max(first, end), last))
            if part[0] < part[1]
        ]
    return tuple(parts)


def _label(span: Span) -> str:
    return f"{moment(span[0])} to {moment(span[1])}"


def _require(version: Version, is_compared: bool) -> None:  # noqa: FBT001 - a condition
    if not is_compared:
        raise OperatorError(
            f"nothing of {version.model} {version.candidate_version} is compared yet:"
            " see `quantdrift status`, or `quantdrift report` for the versions that have comparisons"
        )


async def _candidates(connection: Connection, model: str, version: str) -> list[Version]:
    """Return the versions of a model, the newest first; of one name, where one is asked for."""
    versions = await candidate_versions(connection)
    models = sorted({candidate.model for candidate in versions})
    if model not in models and (model or len(models) != 1):
        raise OperatorError(
            f"no version of a model `{model}` is known: {nearest(model, models)}"
            if model
            else f"several models are known: give --model, one of {', '.join(models)}"
        )
    wanted = [
        candidate
        for candidate in versions
        if model in {"", candidate.model} and version in {"", candidate.candidate_version}
    ]
    if not wanted:
        names = list(
            dict.fromkeys(
                candidate.candidate_version for candidate in versions if model in {"", candidate.model}
            )
        )
        raise OperatorError(f"no version `{version}` is known: {nearest(version, names)}")
    return sorted(
        wanted, key=lambda candidate: (bool(candidate.reference_digest), candidate.id), reverse=True
    )


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
        if not any((model_name, name) in newest for model_name in wanted):
            known_versions = sorted(
                (key for key in newest if key[0] in wanted), key=lambda key: -newest[key].id
            )
            listed = ", ".join(
                " ".join(key) if len(wanted) > 1 else key[1] for key in known_versions[:_NAMED]
            )
            more = f" and {len(known_versions) - _NAMED} more" if len(known_versions) > _NAMED else ""
            of = f" of {wanted[0]}" if len(wanted) == 1 else ""
            raise OperatorError(
                f"{option}: no version `{name}`{of} is known. Known versions, newest first: {listed or 'none'}{more}"
            )
    both = [
        model_name for model_name in wanted if (model_name, old) in newest and (model_name, new) in newest
    ]
    if not both:
        raise OperatorError(
            f"no model has both versions, `{old}` and `{new}`: give two versions of one model"
        )
    if len(both) > 1:
        raise OperatorError(f"several models have both versions: give --model, one of {', '.join(both)}")
    return newest[both[0], old], newest[both[0], new]


async def compare_pair(
    connection: Connection,
    config: Config,
    old: Version,
    new: Version,
    *,
    spans: Mapping[int, VersionSpan],
    within: Sides = EVERYWHERE,
    most: int = MOST_ROWS,
) -> VersionComparison:
    """Compare two versions of one model over the windows in `spans`, as far as they lie within the limits."""
    sides = []
    for version in (old, new):
        span = spans[version.id]
        begin = span.first if within.begin is None else max(span.first, within.begin)
        end = span.last if within.end is None else min(span.last, within.end)
        parts = cut((begin, end), within.not_in)
        sides.append(await _side(connection, version, parts, label=version.candidate_version, most=most))
    return await _compare_sides(connection, config, sides[0], sides[1], within.not_in)


class _Chosen(NamedTuple):
    """One side of a comparison: a version, the times of it, and how many comparisons they hold, counted as far as they may be read."""

    version: Version
    parts: tuple[Span, ...]
    window: SumWindow
    n: int
    label: str


async def _side(
    connection: Connection, version: Version, parts: tuple[Span, ...], *, label: str, most: int = MOST_ROWS
) -> _Chosen:
    """Return a side, with its window from the first comparison to the last one where they are few enough to be read."""
    n, ends = 0, list[datetime]()
    for begin, end in parts:
        window = SumWindow(begin=begin, end=end, grain=Grain.ITEM)
        more, first, last = await VersionReader(connection).extent(window, version.id, most + 1)
        n += more
        ends += [at for at in (first, last) if at is not None]
    if not parts:
        at = datetime.now(UTC)
        return _Chosen(version, parts, SumWindow(begin=at, end=at, grain=Grain.ITEM), 0, label)
    # Without a comparison there may still be roll-ups: comparisons are deleted first.
    if 0 < n <= most:
        # From the first to the last one, and not to the end of an hour that has only begun.
        window = SumWindow(begin=min(ends), end=max(ends) + timedelta(microseconds=1), grain=Grain.ITEM)
        return _Chosen(version, parts, window, n, label)
    hour = timedelta(hours=1)
    hours = tuple((floor(begin, hour), ceiling(end, hour)) for begin, end in parts)
    return _Chosen(version, hours, SumWindow(begin=hours[0][0], end=hours[-1][1], grain=Grain.HOUR), n, label)


async def _compare_sides(
    connection: Connection, config: Config, old: _Chosen, new: _Chosen, not_in: Sequence[Span]
) -> VersionComparison:
    names = {
        model: list(await slice_names(connection, model)) for model in {old.version.model, new.version.model}
    }
    of_old, of_new = await _read_sides(connection, config, old, new, names)
    for side, slices in ((old, of_old), (new, of_new)):
        if not slices:
            version = side.version
            raise OperatorError(
                f"nothing of {version.model} {version.candidate_version} was compared in the time that is asked about ({side.label})"
            )
    by_predicate = {name.predicate: name for name in [*names[old.version.model], *names[new.version.model]]}
    cap = max(config.budget(side.version.model).cap for side in (old, new))
    has_same_unit = task_of(config, old.version.model) is task_of(config, new.version.model)
    entries = _entries(by_predicate, of_old, of_new, cap, has_same_unit=has_same_unit)
    aggregate = next((entry for entry in entries if entry.predicate == EVERYTHING), None)
    comparison = VersionComparison(
        model=old.version.model,
        task=task_of(config, new.version.model),
        old=_version(old, aggregate.old if aggregate else None),
        new=_version(new, aggregate.new if aggregate else None),
        aggregate=aggregate,
        slices=tuple(sorted((entry for entry in entries if entry.predicate != EVERYTHING), key=_order)),
        only_old=_names(by_predicate, of_old, of_new),
        only_new=_names(by_predicate, of_new, of_old),
        warning=_warning(old.version, new.version),
        not_in=tuple(Gap(begin=begin, end=end) for begin, end in not_in),
    )
    return msgspec.structs.replace(
        comparison,
        model="" if old.version.model != new.version.model else old.version.model,
        cost=await _cost(connection, config, new, aggregate),
        divergence_is=await _divergence_of(connection, config, old, new),
    )


async def _divergence_of(connection: Connection, config: Config, old: _Chosen, new: _Chosen) -> str:
    """Return the name of the divergence of generated text that both sides have; two names where they differ, empty for other tasks."""
    names = []
    for side in (old, new):
        measure = config.measure(side.version.model)
        if not measure.measured_by_divergence:
            return ""
        of_side = await measure_of_text(connection, side.version.id, measure, side.window.end)
        names.append(of_side.name)
    return names[0] if names[0] == names[1] else f"divergence per token ({names[0]} and {names[1]})"


def _warning(old: Version, new: Version) -> str:
    if old.model != new.model:
        return ""
    different = bool(old.reference_digest and new.reference_digest) and (
        old.reference_digest != new.reference_digest
    )
    return (
        "the two versions were compared with different references: the difference may be one of the references"
        if different
        else ""
    )


async def _cost(
    connection: Connection, config: Config, new: _Chosen, aggregate: ComparedSlice | None
) -> Figure | None:
    """Return what the difference over all traffic costs in the window of the new side; None without a price."""
    prices = prices_of(config, new.version.model)
    if not prices.most or aggregate is None or aggregate.flip is None or new.window.grain is not Grain.ITEM:
        return None
    if aggregate.new.flip is None:
        return None
    flip = aggregate.flip
    share = msgspec.structs.replace(aggregate.new.flip, value=flip.mean, low=flip.low, high=flip.high)
    worth = await mean_worth(
        connection,
        prices,
        new.parts,
        version_id=new.version.id,
        slice_ids=[aggregate.slice_id],
    )
    return cost_figure(share, flip, prices, worth)


def _sides(side: _Chosen, cap: float) -> list[SummedVersion]:
    """Return the parts of a side as far as it has comparisons."""
    window = side.window
    parts = [(max(begin, window.begin), min(end, window.end)) for begin, end in side.parts]
    return [
        SummedVersion(version_id=side.version.id, begin=begin, end=end, cap=cap)
        for begin, end in parts
        if begin < end
    ]


async def _read_sides(
    connection: Connection,
    config: Config,
    old: _Chosen,
    new: _Chosen,
    names: Mapping[str, Sequence[SliceName]],
) -> "tuple[dict[str, _SliceSide], dict[str, _SliceSide]]":
    """Return each slice of both sides that has data, by its predicate."""
    caps = [config.budget(side.version.model).cap for side in (old, new)]
    is_pair = old.version.model == new.version.model and old.version.id != new.version.id
    if is_pair and all(side.window.grain is Grain.ITEM for side in (old, new)):
        of_model = {name.id: name for name in names[old.version.model]}
        pair = await pair_sums(
            connection, _sides(old, caps[0]), _sides(new, caps[1]), slice_ids=list(of_model)
        )
        of_old, of_new = (
            {
                of_model[row.slice_id].predicate: _of_clusters(config, side, of_model[row.slice_id], row, cap)
                for row in pair
                if row.version_id == side.version.id
            }
            for side, cap in zip((old, new), caps, strict=True)
        )
        return of_old, of_new
    first, second = [
        await _apart(connection, config, side, cap, {name.id: name for name in names[side.version.model]})
        for side, cap in zip((old, new), caps, strict=True)
    ]
    return first, second


class _SliceSide(NamedTuple):
    """One slice of one side: its figures, and what its interval at any level is made of."""

    figures: SideFigures
    clusters: SliceClusters | None
    interval: Callable[[Metric, float], Estimate | None]


async def _apart(
    connection: Connection, config: Config, side: _Chosen, cap: float, names: Mapping[int, SliceName]
) -> dict[str, _SliceSide]:
    """Return each slice of one side that has data, of sides that are not read in one pass.

    Roll-ups know no person. There a session counts as one unit in each hour, with the variance that values which are all
    alike would have.
    """
    if side.window.grain is Grain.ITEM:
        clusters = await cluster_sums(connection, _sides(side, cap), slice_ids=list(names))
        return {
            names[sums.slice_id].predicate: _of_clusters(config, side, names[sums.slice_id], sums, cap)
            for sums in clusters
        }
    totals = dict[int, Sums]()
    for begin, end in side.parts:
        window = SumWindow(begin=begin, end=end, grain=Grain.HOUR)
        sums = await Divergence(connection).sums(window, end - begin, {side.version.id: cap}, list(names))
        for (_, slice_id), more in by_key(sums).items():
            totals[slice_id] = totals.get(slice_id, Sums()) + more
    return {
        names[slice_id].predicate: _of_sums(config, side, names[slice_id], sums)
        for slice_id, sums in totals.items()
    }


def _of_clusters(
    config: Config, side: _Chosen, name: SliceName, clusters: SliceClusters, cap: float
) -> _SliceSide:
    return _of_sums(config, side, name, sums_of_clusters(clusters, cap), clusters)


def _of_sums(
    config: Config, side: _Chosen, name: SliceName, sums: Sums, clusters: SliceClusters | None = None
) -> _SliceSide:
    model, window = side.version.model, side.window
    scope = Scope(
        window=figures.period(window.begin, window.end),
        of=Subject(model=model, version=side.version.candidate_version, slice=name.name),
        as_of=window.end,
    )
    counted = Counted(
        n=sums.n_items,
        n_people=clusters.n_clusters if clusters and config.sampling.sticky_header else None,
        requests=sums.weight,
    )
    share, divergence = sums.estimate(Metric.FLIP), sums.estimate(Metric.DIVERGENCE)
    unit = config.measure(model).unit
    of_side = SideFigures(
        n_items=sums.n_items,
        n_exchanges=sums.n_groups,
        n_clusters=clusters.n_clusters if clusters else None,
        weight=sums.weight,
        flip=figures.estimate_figure(FigureName.CHANGED_SHARE, scope, counted, share),
        divergence=figures.estimate_figure(FigureName.DIVERGENCE, scope, counted, divergence, unit),
    )
    return _SliceSide(of_side, clusters, sums.estimate)


def _entries(
    names: Mapping[str, SliceName],
    old: Mapping[str, _SliceSide],
    new: Mapping[str, _SliceSide],
    cap: float,
    *,
    has_same_unit: bool,
) -> list[ComparedSlice]:
    """Return the slices of both sides; the p-values of all their differences are adjusted together."""
    keys = [key for key in old if key in new]
    caps = {metric: 1.0 if signal_of(metric).is_share else cap for metric in WATCHED}
    differences = adjusted(
        [
            _difference(metric, old[key], new[key], caps[metric])
            if has_same_unit or signal_of(metric).is_share
            else None
            for metric in caps
            for key in keys
        ]
    )
    flips, divergences = differences[: len(keys)], differences[len(keys) :]
    return [
        _compared(names[key], old[key].figures, new[key].figures, flip, divergence)
        for key, flip, divergence in zip(keys, flips, divergences, strict=True)
    ]


def _difference(metric: Metric, old: _SliceSide, new: _SliceSide, cap: float) -> Difference | None:
    if old.clusters is None or new.clusters is None:
        return difference_with_p(partial(old.interval, metric), partial(new.interval, metric))
    sides = old.clusters.of, new.clusters.of
    return compared(
        sides[0][metric],
        sides[1][metric],
        new.clusters.shared.get(metric),
        cap,
        flips=(sides[0][Metric.FLIP], sides[1][Metric.FLIP]),
    )


def _compared(
    name: SliceName,
    old: SideFigures,
    new: SideFigures,
    flip: Difference | None,
    divergence: Difference | None,
) -> ComparedSlice:
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


def _names(names: Mapping[str, SliceName], side: Collection[str], other: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names[key].name for key in side if key not in other))


def _version(side: _Chosen, everything: SideFigures | None) -> ComparedVersion:
    version, window = side.version, side.window
    return ComparedVersion(
        version_id=version.id,
        model=version.model,
        version=version.candidate_version,
        label=side.label,
        n_answers=everything.n_items if everything else side.n,
        n_people=everything.flip.n_people if everything and everything.flip else None,
        reference_digest=version.reference_digest,
        first_seen_at=version.first_seen_at,
        begin=window.begin,
        end=window.end,
        source=window.grain,
    )
