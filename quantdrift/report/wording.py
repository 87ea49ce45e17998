"""Numbers and sentences of the report."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from quantdrift.core.notation import count_of, decimals, fixed, number, percent
from quantdrift.core.records import SHARES, Metric, Verdict
from quantdrift.facts.estimate import Change, Estimate
from quantdrift.facts.words.ending import ENDS
from quantdrift.report.figures import EpisodeFigures, LabelFigures, SliceFigures, VersionComparison
from quantdrift.storage.page.history import Times
from quantdrift.storage.page.now import Saved

_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def amount(metric: Metric, value: float, unit: str) -> str:
    """Return a value of a metric as text: `5.2 %`, or with the unit of the model's divergence, if any: `0.021 nat`."""
    return percent(value) if metric in SHARES else f"{number(value)} {unit}".rstrip()


def interval(metric: Metric, estimate: Estimate | None) -> str:
    """Return the bounds with as many decimals as the mean: `[3.9, 6.8]`; empty where there are none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    scale = 100 if metric in SHARES else 1
    n_decimals = decimals(scale * (estimate.mean or estimate.high))
    return f"[{fixed(scale * estimate.low, n_decimals)}, {fixed(scale * estimate.high, n_decimals)}]"


def measured(metric: Metric, estimate: Estimate | None, unit: str) -> str:
    """Return mean and bounds: `5.2 % [3.9, 6.8]`."""
    if estimate is None:
        return "no data"
    return f"{amount(metric, estimate.mean, unit)} {interval(metric, estimate)}".strip()


def signed(metric: Metric, estimate: Estimate) -> str:
    """Return a difference with its sign and bounds, flips in percentage points: `+1.2 [0.4, 2.1]`."""
    scale = 100 if metric in SHARES else 1
    mean = scale * estimate.mean
    text = f"{'+' if mean > 0 else ''}{number(mean)}"
    if estimate.low is None or estimate.high is None:
        return f"{text} [too few]"
    n_decimals = decimals(mean or max(-scale * estimate.low, scale * estimate.high))
    return f"{text} [{fixed(scale * estimate.low, n_decimals)}, {fixed(scale * estimate.high, n_decimals)}]"


def speed_sentence(
    times: Times | None, saved: Sequence[Saved], budget_s: float, learned_s: float | None = None
) -> str:
    """Return how long the answers of a version took, and what an item cost the reference; empty: no time was measured.

    Parameters
    ----------
    saved
        Of the version, one entry for each device of the reference.
    budget_s
        The latency budget; 0: there is none.
    learned_s
        What at most 1 % of all traffic exceeded when it was learned; None: nothing was learned.
    """
    if times is None:
        return ""
    against = (
        f" ({number(budget_s)} s is the budget, {percent(times.slower)} took longer)" if budget_s else ""
    )
    learned = (
        ""
        if learned_s is None
        else f" In the time that was learned from, 99 % took {number(learned_s)} s at most."
    )
    text = (
        f"Half of its answers took {number(times.median)} s at most, as the relay saw it, and 99 % took {number(times.p99)} s"
        f" at most{against}, from {count_of(times.n, 'exchange')} of the last day.{learned}"
    )
    for one in saved:
        device = one.device or "a device that is not known"
        text += (
            f" An item took the reference {number(one.reference)} s of computing in batches on {device}, and the candidate"
            f" {number(one.candidate)} s with waiting and network: two measurements, and no benchmark."
        )
    return text


def compared_sentence(found: VersionComparison) -> str:
    """Return what a comparison of two versions shows, in one or two sentences without a unit of divergence."""
    old = found.old.label or found.old.version
    title = f"{found.model} {found.new.label or found.new.version}"
    n_slices, n_worse, n_better = len(found.slices), found.n_of(Change.WORSE), found.n_of(Change.BETTER)
    if found.aggregate is None:
        return f"{title} and {old} have no traffic in common that was compared."
    changed = ""
    if found.aggregate.old.flip and found.aggregate.new.flip:
        changed = (
            f" Over all traffic {percent(found.aggregate.new.flip.mean)} of its answers changed; with"
            f" {old} it was {percent(found.aggregate.old.flip.mean)}."
        )
    if n_worse:
        names = _listed([entry.name for entry in found.slices if entry.change is Change.WORSE])
        also = f", and better in {n_better:,}" if n_better else ""
        text = f"{title} is worse than {old} in {n_worse:,} of {count_of(n_slices, 'slice')}: {names}{also}."
    elif found.aggregate.change is Change.WORSE:
        text = f"{title} is worse than {old} over all traffic; no single slice shows it."
    elif n_better or found.aggregate.change is Change.BETTER:
        where = f"in {n_better:,} of {count_of(n_slices, 'slice')}" if n_better else "over all traffic"
        text = f"{title} is better than {old} {where}, and worse in none."
    else:
        text = f"{title} shows no clear difference from {old} in any of {count_of(n_slices, 'slice')}."
    return text + changed


def count(n: float) -> str:
    """Return a whole number with separated thousands."""
    return f"{n:,.0f}"


def moment(at: datetime) -> str:
    """Return a time in UTC, to the minute."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def duration(span: timedelta) -> str:
    """Return a duration in the largest unit that fits: `12 minutes`, `1.5 days`."""
    seconds = span.total_seconds()
    size, name = next(((size, name) for size, name in _UNITS if seconds >= size), (1, "second"))
    number = f"{seconds / size:.1f}".removesuffix(".0")
    return f"{number} {name}{'' if number == '1' else 's'}"


def detail(figures: Mapping[str, Any]) -> str:
    """Return the comparator's measures of an item as text, from `comparison.detail`: `missed 2, box shift 0.12`.

    Parameters
    ----------
    figures
        By name: numbers, flags, texts, lists, or further figures by name.
    """
    return ", ".join(
        name.replace("_", " ") + _figure(value)
        for name, value in figures.items()
        if name != "clustering" and value is not None and value is not False and value not in ([], {})
    )


def _figure(value: Any) -> str:
    """Return a figure as it follows its name; empty for a flag."""
    match value:
        case bool():
            return ""
        case float():
            return f" {number(value)}"
        case list() if all(isinstance(one, list) for one in value):  # classes with their scores
            return f" {', '.join(f'{label} ({percent(score)})' for label, score in value)}"
        case list():
            return f" {'/'.join(map(str, value))}"
        case dict():
            return f" ({detail(value)})"
    return f" {value}"


def headline(
    title: str,
    slices: Sequence[SliceFigures],
    aggregate: SliceFigures | None,
    episodes: Sequence[EpisodeFigures],
) -> str:
    """Return a summary of one candidate version for a director, in one or two sentences.

    Parameters
    ----------
    title
        Model and version.
    slices
        The slices besides the aggregate.
    aggregate
        The slice `all`, where it has data.
    episodes
        Alerts of this version that were open in the period, pages first.
    """
    pages = [episode for episode in episodes if episode.severity is Verdict.FIRING]
    unknown = sum(entry.verdict is Verdict.UNKNOWN for entry in slices)
    if aggregate is None or aggregate.flip is None:
        what = "was compared" if aggregate is None else "gave outputs that can be compared"
        text = f"No exchange of {title} {what} in this period, so its health is unknown"
        if not episodes:
            return f"{text}."
        return f"{text}; {count_of(len(episodes), 'alert')} {'was' if len(episodes) == 1 else 'were'} open."
    if pages:
        return _drifted(title, len(slices), aggregate, pages) + _unknown(unknown)
    if episodes:
        first = episodes[0]
        return (
            f"{title} raised no page, but {count_of(len(episodes), 'ticket')} "
            f"{'was' if len(episodes) == 1 else 'were'} open: {_says(first)}." + _unknown(unknown)
        )
    if aggregate.verdict is Verdict.UNKNOWN and unknown == len(slices):
        why = f" ({aggregate.reason})" if aggregate.reason else ""
        return f"The health of {title} is not known yet{why}: unknown does not mean healthy."
    drifted = f"None of the {len(slices)} slices of {title} drifted" if slices else f"{title} did not drift"
    if len(slices) == 1:
        drifted = f"The one slice of {title} did not drift"
    return f"{drifted}; over all its traffic it {_verb(Metric.FLIP, aggregate)}." + _unknown(unknown)


def ended(episode: EpisodeFigures) -> str:
    """Return whether an alert is over, and why."""
    if episode.resolved_at is None:
        return "still open"
    return ENDS.get(episode.ended, "resolved")


def _drifted(title: str, n_slices: int, aggregate: SliceFigures, pages: Sequence[EpisodeFigures]) -> str:
    names = list(dict.fromkeys(page.slice for page in pages if page.slice_id != aggregate.slice_id))
    if not names:
        return f"All traffic of {title} drifted: {_says(pages[0])}."
    lead = next(page for page in pages if page.slice_id != aggregate.slice_id)
    more = f"; also {_listed(names[1:])}" if len(names) > 1 else ""
    whole = (
        f", while in all traffic {percent(aggregate.flip.mean)} changed"
        if aggregate.flip and lead.metric is Metric.FLIP
        else ""
    )
    over = "" if lead.resolved_at is None else f"; {ended(lead)} on {moment(lead.resolved_at)}"
    return (
        f"{len(names)} of {count_of(n_slices, 'slice')} of {title} drifted: {_says(lead)}{whole}{over}{more}."
    )


def _says(episode: EpisodeFigures) -> str:
    """Return what an alert said first when it was written, without its model and version."""
    return episode.headline.removeprefix(f"{episode.model} {episode.version}: ").rstrip(".")


def _verb(metric: Metric, aggregate: SliceFigures) -> str:
    against = (
        "" if aggregate.flip_budget is None else f" against a budget of {percent(aggregate.flip_budget)}"
    )
    return f"flips {measured(metric, aggregate.flip, '')} of decisions{against}"


def _unknown(n: int) -> str:
    if not n:
        return ""
    return f" {count_of(n, 'slice')} {'is' if n == 1 else 'are'} unknown: there is too little data to call {'it' if n == 1 else 'them'} healthy."


def points(estimate: Estimate | None) -> str:
    """Return a share in percent with its interval, to a tenth: `5.0 (3.0 to 7.3)`; a dash for None."""
    if estimate is None:
        return "-"
    mean, low, high = (
        "" if value is None else f"{round(100 * value, 1) + 0.0:.1f}"  # + 0.0: no -0.0
        for value in (estimate.mean, estimate.low, estimate.high)
    )
    return f"{mean} ({low} to {high})" if low and high else mean


def labels_sentence(labels: LabelFigures) -> str:
    """Return in one sentence whether accuracy was lost, and where."""
    worse = [one for one in labels.slices if one.loss.low is not None and one.loss.low > 0]
    if worse:
        first = worse[0]
        where = "all traffic" if first.slice == "all" else first.slice
        more = f" Accuracy is lost in {count_of(len(worse) - 1, 'more slice')}." if len(worse) > 1 else ""
        return (
            f"Yes: by {first.n_items:,} true labels, in {where} {points(first.loss)} % fewer answers are right than the"
            f" unquantised model's.{more}"
        )
    n = max((one.n_items for one in labels.slices), default=0)
    return (
        f"Not clearly: by {n:,} true labels, no slice answers worse than the unquantised model beyond chance."
    )


def _listed(names: Sequence[str]) -> str:
    listed_names = ", ".join(names[:3])
    return listed_names if len(names) <= 3 else f"{listed_names} and {len(names) - 3} more"
