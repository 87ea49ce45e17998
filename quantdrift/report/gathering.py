"""Reading of the facts of a report, in one snapshot, with as few rows of `comparison` as possible."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import msgspec

from quantdrift.core.config.schema import Config
from quantdrift.core.slices import EVERYTHING
from quantdrift.report.figures import CoverageFigures, Gap, Unreferenced
from quantdrift.report.finding import (
    EpisodeFacts,
    Facts,
    Measured,
    bins_by_key,
    by_key,
    gaps,
    ranked,
)
from quantdrift.report.period import MOST_ITEMS, Period, Resolution, ceiling, floor, resolution
from quantdrift.storage.report.facts import Changes, Episode, Extent, Grain, SliceSums, Version, Window
from quantdrift.storage.report.reading import Reader

MOST_TABLE = 25  # slices in a version's table
MOST_PLOTS = 12  # slices of a version that are drawn, and whose tail is shown
MOST_EPISODES = 20  # alerts shown in full
MOST_EXAMPLES = 5

_MOST_EPISODE_ITEMS = 200_000  # with more, the time around an alert is summed from the roll-ups
_HISTORY = timedelta(hours=24)
_EXAMPLE_SPAN = timedelta(hours=1)
_HOUR = timedelta(hours=1)


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a report, as read.

    Parameters
    ----------
    extent, resolution
        How much data there is, and how finely it is summed; None without data.
    drawn
        Per version the slices to draw, worst first.
    series
        Buckets of the drawn slices and the aggregates.
    n_episodes_left_out
        Alerts beyond `MOST_EPISODES`.
    """

    extent: Extent
    resolution: Resolution | None
    facts: Facts
    drawn: dict[int, tuple[int, ...]]
    series: tuple[SliceSums, ...]
    changes: Changes
    n_episodes_left_out: int
    coverage: CoverageFigures


async def gather(
    reader: Reader,
    config: Config,
    period: Period,
    *,
    model: str,
    now: datetime,
    progress: Callable[[str], None],
) -> Gathered:
    """Read the facts of a report.

    Parameters
    ----------
    reader
        Reads in one snapshot.
    model
        Only this model; empty: all.
    now
        Gaps are looked for up to this time.
    progress
        Called with one readable line per step.
    """
    progress("reading slices and verdicts")
    versions = tuple(await reader.versions(model))
    slices = {name.id: name for name in await reader.slices(model)}
    caps = {version.id: config.budget(version.model).cap for version in versions}
    extent = await reader.divergence.extent(period.begin, period.end, MOST_ITEMS + 1)
    how = resolution(period, extent)
    verdicts = {
        (fact.version_id, fact.slice_id): fact for fact in await reader.verdicts(period.end, list(caps))
    }
    open_then = await reader.episodes(period.begin, period.end, list(caps))

    progress("summing divergence")
    totals = {}
    if how is not None:
        length = how.window.end - how.window.begin
        totals = by_key(await reader.divergence.sums(how.window, length, caps, list(slices)))
    version_ids = {version for version, _ in totals} | {episode.version_id for episode in open_then}
    facts = Facts(
        versions=versions,
        slices=slices,
        totals=totals,
        bins={},
        verdicts={key: fact for key, fact in verdicts.items() if key[0] in version_ids},
        episodes=(),
    )
    shown, drawn = _choose(config, facts, open_then)

    series: list[SliceSums] = []
    if how is not None:
        bins = bins_by_key(await reader.divergence.bins(how.window, caps, sorted(shown)))
        wanted = sorted({slice_id for chosen in drawn.values() for slice_id in chosen} | _everything(facts))
        series = await reader.divergence.sums(how.window, how.width, caps, wanted)
        facts = msgspec.structs.replace(facts, bins=bins)

    progress("reading alerts")
    episodes = [
        await _read_episode(reader, episode, period, caps, _everything(facts))
        for episode in open_then[:MOST_EPISODES]
    ]

    progress("counting coverage and losses")
    return Gathered(
        extent=extent,
        resolution=how,
        facts=msgspec.structs.replace(facts, episodes=tuple(episodes)),
        drawn=drawn,
        series=tuple(series),
        changes=await reader.changes(period.begin, period.end, list(caps)),
        n_episodes_left_out=max(0, len(open_then) - MOST_EPISODES),
        coverage=await _coverage(
            reader,
            period,
            model,
            by_stratum=extent.n_items <= MOST_ITEMS,
            versions=versions,
            gaps=_gaps(facts, how, series, min(period.end, now)),
        ),
    )


def _everything(facts: Facts) -> set[int]:
    return {name.id for name in facts.slices.values() if name.predicate == EVERYTHING}


def _choose(
    config: Config, facts: Facts, episodes: Sequence[Episode]
) -> tuple[set[int], dict[int, tuple[int, ...]]]:
    """Return the slices whose histogram is needed, and per version those to draw: alerted first, then worst."""
    shown, drawn = _everything(facts), {}
    for version in facts.versions:
        alerted = [episode.slice_id for episode in episodes if episode.version_id == version.id]
        order = list(dict.fromkeys([*alerted, *ranked(config, facts, version)]))
        shown.update(order[:MOST_TABLE])
        with_data = [
            slice_id
            for slice_id in order
            if (version.id, slice_id) in facts.totals and slice_id not in _everything(facts)
        ]
        drawn[version.id] = tuple(with_data[:MOST_PLOTS])
    return shown, drawn


async def _read_episode(
    reader: Reader, episode: Episode, period: Period, caps: dict[int, float], everything: set[int]
) -> EpisodeFacts:
    until = min(episode.resolved_at or period.end, period.end)
    before = await _window(reader, episode.onset_at - _HISTORY, episode.onset_at, outward=False)
    after = await _window(reader, episode.onset_at, until, outward=True)
    measured = []
    for window in (before, after):
        by_slice = await _measure(reader, window, episode, caps, everything)
        measured.append(
            (
                by_slice.get(episode.slice_id),
                next((by_slice[key] for key in by_slice if key in everything), None),
            )
        )
    examples = await reader.examples(
        max(episode.onset_at, episode.opened_at - _EXAMPLE_SPAN),
        episode.opened_at + timedelta(seconds=1),
        version=episode.version_id,
        slice_id=episode.slice_id,
        most=MOST_EXAMPLES,
    )
    return EpisodeFacts(
        episode=episode,
        before=measured[0][0],
        after=measured[1][0],
        all_before=measured[0][1],
        all_after=measured[1][1],
        examples=tuple(examples),
    )


async def _window(reader: Reader, begin: datetime, end: datetime, *, outward: bool) -> Window:
    n = await reader.divergence.count(begin, end, _MOST_EPISODE_ITEMS + 1)
    if 0 < n <= _MOST_EPISODE_ITEMS:
        return Window(begin=begin, end=end, grain=Grain.ITEM)
    last = ceiling(end, _HOUR) if outward else floor(end, _HOUR)
    return Window(begin=floor(begin, _HOUR), end=last, grain=Grain.HOUR)


async def _measure(
    reader: Reader, window: Window, episode: Episode, caps: dict[int, float], everything: set[int]
) -> dict[int, Measured]:
    own_cap = {episode.version_id: caps[episode.version_id]}
    wanted = [episode.slice_id, *sorted(everything)]
    bins = {entry.slice_id: entry.bins for entry in await reader.divergence.bins(window, own_cap, wanted)}
    entries = await reader.divergence.sums(window, window.end - window.begin, own_cap, wanted)
    return {entry.slice_id: Measured(sums=entry.sums, bins=bins.get(entry.slice_id, ())) for entry in entries}


def _gaps(
    facts: Facts, how: Resolution | None, series: Sequence[SliceSums], until: datetime
) -> tuple[Gap, ...]:
    if how is None:
        return ()
    everything = _everything(facts)
    totals = [point for point in series if point.slice_id in everything]
    return gaps(totals, how.window.begin, until, how.width)


async def _coverage(
    reader: Reader,
    period: Period,
    model: str,
    *,
    by_stratum: bool,
    versions: Sequence[Version],
    gaps: tuple[Gap, ...],
) -> CoverageFigures:
    strata, fleet = await reader.coverage.strata(period.begin, period.end, by_stratum=by_stratum)
    return CoverageFigures(
        strata=tuple(strata),
        skipped=tuple(await reader.coverage.skipped(period.begin, period.end)),
        quarantined=tuple(await reader.coverage.quarantined(period.begin, period.end, model)),
        unreferenced=tuple(
            Unreferenced(
                model=version.model, version=version.candidate_version, first_seen_at=version.first_seen_at
            )
            for version in versions
            if not version.reference_digest
        ),
        gaps=gaps,
        fleet=fleet,
        judged_until=await reader.judged_until(),
    )
