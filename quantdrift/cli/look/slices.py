"""The command `quantdrift slices`: list, search, show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from quantdrift.cli.options import CONFIG, DATA, JSON, LazyGroup, emit, prepare
from quantdrift.cli.output import Steps, show
from quantdrift.core.config.load import Role
from quantdrift.core.errors import OperatorError
from quantdrift.core.notation import count_of, number
from quantdrift.core.records import Metric, Verdict
from quantdrift.core.text import columns
from quantdrift.facts.figures import shown
from quantdrift.facts.status import said
from quantdrift.facts.words.tokens import of_grammar, of_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantdrift.drift.evidence.interval import WeightedEstimate
    from quantdrift.monitor.baselines.signal_view import SelfNoise, SignalView, TailFigure

if TYPE_CHECKING:
    from quantdrift.core.config.load import Secrets
    from quantdrift.core.config.schema import Config
    from quantdrift.core.tasks import Measure
    from quantdrift.core.token_histogram import TokenQuantiles
    from quantdrift.monitor.baselines.signal_view import SelfNoise, SignalView
    from quantdrift.monitor.discovery.round import Round, VersionSearch
    from quantdrift.storage.figures.figures import SliceFigures
    from quantdrift.storage.figures.grammar import GrammarTokens
    from quantdrift.storage.fold.discovery_log import StatusChange
    from quantdrift.storage.slices.slice_list import ListedSlice

_MODEL = click.option("--model", default="", help="Only this model.  [default: all]")


_ELSEWHERE: Final = {
    "clusters": "look.clusters:clusters",
    "fit": "look.clusters:fit",
    "forget": "look.retirement:forget",
    "restore": "look.retirement:restore",
    "retire": "look.retirement:retire",
}
_NOISE_HEAD = ("noise", "mean", "exchanges", "added to the budget")
_HEAD = ("signal", "compared with", "evidence", "recent mean, or tail")


@click.group(cls=LazyGroup, lazy=_ELSEWHERE)
def slices() -> None:
    """List, search, show, retire, restore and forget slices, and fit learned slices."""


@slices.command("list")
@CONFIG
@DATA
@_MODEL
@click.option("--all", "everything", is_flag=True, help="Include expired, retired and lapsed slices.")
@JSON
def slices_list(config_path: Path, data: Path | None, model: str, everything: bool, as_json: bool) -> None:
    """List every slice with its kind, status, verdict and share of the traffic on the last day with data.

    For a learned or discovered slice that is newer, the share is that of the full hours since it was created.
    Candidates that are still being tested are listed below the slices; they have no id yet.

    \b
    Examples:
      quantdrift slices list --model digits
      quantdrift slices list --all
    """
    import asyncio

    config, secrets = prepare(config_path, Role.REPORT, data)
    slices_known = asyncio.run(listed_slices(config, secrets, model))
    listed = [slice_ for slice_ in slices_known if everything or not slice_.ended]
    left_out = len(slices_known) - len(listed)
    if as_json:
        emit({"slices": listed, "n_left_out": left_out})
        return
    show(_table(listed, model))
    if left_out:
        click.echo(f"{left_out} more are expired, retired or lapsed; --all shows them")


@slices.command("search")
@CONFIG
@DATA
@click.option(
    "--model",
    default="",
    help="With --dry-run: show only this model. A real search always covers all models.",
)
@click.option("--dry-run", is_flag=True, help="Store nothing; no candidate is created or tested.")
@JSON
def slices_search(config_path: Path, data: Path | None, model: str, dry_run: bool, as_json: bool) -> None:
    """Search now for slices in which the divergence is concentrated, as the monitor does every night.

    A slice that is found is not proven, because the search chose it from the same data. It becomes a candidate, which
    is tested on traffic captured from now on, and a slice once the test confirms it. More searches do not cause more
    false confirmations; they make each search stricter.

    \b
    Examples:
      quantdrift slices search --dry-run
      quantdrift slices search --json
    """
    import asyncio

    if model and not dry_run:
        raise OperatorError("--model needs --dry-run: a real search covers all models")
    config, secrets = prepare(config_path, Role.MONITOR, data)
    with Steps(quiet=as_json) as step:
        step("searching")
        result = asyncio.run(_searched(config, secrets, dry_run=dry_run))
    version_searches = [
        version_search for version_search in result.searches if model in {"", version_search.version.model}
    ]
    if as_json:
        emit(
            {
                "dry_run": dry_run,
                "allowance": result.allowed,
                "searches": [_as_json(version_search) for version_search in version_searches],
            }
        )
    else:
        click.echo(_search_text(result, version_searches, dry_run=dry_run))


@slices.command("show")
@CONFIG
@DATA
@_MODEL
@click.argument("which")
@JSON
def slices_show(config_path: Path, data: Path | None, model: str, which: str, as_json: bool) -> None:
    """Show one slice or candidate. WHICH is its id, its name or its predicate.

    \b
    Examples:
      quantdrift slices show 12
      quantdrift slices show 'x-scanner=faint & contrast<0.75'
    """
    import asyncio

    import msgspec

    config, secrets = prepare(config_path, Role.REPORT, data)
    listed = pick(asyncio.run(listed_slices(config, secrets, model)), which, model)
    signals, history, noise, alert, link, figures, measure, tokens, grammar = asyncio.run(
        _more(config, secrets, listed)
    )
    unit = measure.unit
    if as_json:
        more = {"signals": signals, "history": history, "noise": noise, "alert": alert, "page": link}
        more |= {"figures": figures, "divergence_is": measure.name}
        if tokens:
            more["divergence_of_tokens"] = tokens
        if grammar:
            more["grammar"] = grammar
        emit(msgspec.structs.asdict(listed) | more)
    else:
        click.echo(
            "\n".join(
                [
                    _shown(listed, alert),
                    *_size_lines(figures),
                    *([f"  divergence {measure.name}"] if measure.measured_by_divergence else []),
                    *([f"  tokens     {of_tokens(tokens)}, last day"] if tokens else []),
                    *(
                        [f"  grammar    {of_grammar(**msgspec.structs.asdict(grammar))}, last day"]
                        if grammar
                        else []
                    ),
                    *([f"  live page  {link}"] if link else []),
                    *_history_lines(history),
                    *signal_lines(signals, verdict=listed.verdict, unit=unit),
                    *noise_lines(noise, unit=unit),
                ]
            )
        )


def _size_lines(figures: SliceFigures | None) -> list[str]:
    """Return how many answers of a slice changed on the last day with data."""
    if figures is None or figures.changed_share is None:
        return []
    share = shown(figures.changed_share)
    of = count_of(figures.n, "answer")
    between = f" ({share.interval})" if share.interval else ""
    return [f"  changed    {share}{between} of {of} on the last day with data"]


def pick(listed: list[ListedSlice], which: str, model: str = "") -> ListedSlice:
    """Return the slice or candidate whose id, name or predicate is `which`.

    Parameters
    ----------
    model
        Named in the error; `listed` has slices of this model only, or of all models if empty.

    Raises
    ------
    OperatorError
        There is none, or several models have one.
    """
    matches = [
        slice_
        for slice_ in listed
        if which in {slice_.name, slice_.predicate} or (slice_.id is not None and which == str(slice_.id))
    ]
    if not matches:
        whose = f" of model `{model}`" if model else ""
        raise OperatorError(f"there is no slice `{which}`{whose}: `quantdrift slices list --all` lists them")
    if len(matches) > 1:
        models = ", ".join(sorted({slice_.model for slice_ in matches}))
        raise OperatorError(f"`{which}` is a slice of {models}: give --model, or an id")
    return matches[0]


async def listed_slices(config: Config, secrets: Secrets, model: str) -> list[ListedSlice]:
    """Return every slice and candidate of `model`, or of all models if it is empty.

    Raises
    ------
    OperatorError
        Neither the database nor the configuration has `model`.
    """
    from quantdrift.core.clock import SystemClock
    from quantdrift.core.config.wrong_values import nearest
    from quantdrift.storage.database import Database
    from quantdrift.storage.slices.slice_list import list_slices

    as_of = SystemClock().now()
    async with Database(secrets.dsn) as database, database.begin() as connection:
        max_share = config.monitor.max_loss_ratio
        slices = await list_slices(connection, model=model, as_of=as_of, max_share=max_share)
        if model and not slices and config.model(model) is None:
            known_models = {slice_.model for slice_ in await list_slices(connection, model="", as_of=as_of)}
            names = sorted(known_models | {configured.name for configured in config.models})
            raise OperatorError(
                f"neither the database nor the configuration has a model `{model}`: {nearest(model, names)}"
            )
        return slices


async def _more(
    config: Config, secrets: Secrets, listed: ListedSlice
) -> tuple[
    list[SignalView],
    list[StatusChange],
    list[SelfNoise],
    str,
    str,
    SliceFigures | None,
    Measure,
    TokenQuantiles | None,
    GrammarTokens | None,
]:
    """Return the signals of a slice, its history, its noise, its alert's text, its address on the live page, its last day, what its divergence is, that of its tokens, and those of a grammar."""
    from datetime import timedelta

    from quantdrift.core.clock import SystemClock
    from quantdrift.core.links import slice_page
    from quantdrift.core.slices import EVERYTHING
    from quantdrift.monitor.baselines.signal_view import self_noises, signal_views
    from quantdrift.storage.alerts.alerts import lately_replaced
    from quantdrift.storage.database import Database
    from quantdrift.storage.figures.figures import last_day, versions
    from quantdrift.storage.figures.grammar import grammar_tokens
    from quantdrift.storage.figures.tokens import token_bins
    from quantdrift.storage.fold.discovery_log import changes_of, place_changes_of
    from quantdrift.storage.noise import floors_of
    from quantdrift.storage.slices.slice_list import alert_of, signals_of
    from quantdrift.storage.versions import measure_of_text

    measure, now = config.measure(listed.model), SystemClock().now()
    async with Database(secrets.dsn) as database, database.begin() as connection:
        rows = [] if listed.id is None else await signals_of(connection, listed.id)
        history = [] if listed.discovery is None else await changes_of(connection, listed.discovery.id)
        history += [] if listed.id is None else await place_changes_of(connection, listed.id)
        noise: list[SelfNoise] = []
        if rows and listed.id is not None:
            of_version, of_slice = await floors_of(connection, rows[0].model_version_id, listed.id)
            noise = self_noises(of_version, None if listed.predicate == EVERYTHING else of_slice)
        alert = None if listed.id is None else await alert_of(connection, listed.id)
        ended = [
            ended_alert
            for ended_alert in await lately_replaced(connection, model=listed.model)
            if ended_alert.slice_id == listed.id
        ]
        text = "\n".join(
            [
                *(f"Alert {ended_alert.id}: {line}" for ended_alert in ended for line in ended_alert.over()),
                *([alert.words.plain()] if alert else []),
            ]
        )
        link = slice_page(config, rows[0].model_version_id, listed.id) if rows and listed.id else ""
        figures = tokens = grammar = None
        if rows and listed.id is not None:
            ids = [rows[0].model_version_id]
            measure = await measure_of_text(connection, ids[0], measure, now)
            if measure.measured_by_divergence:
                day = now - timedelta(days=1)
                tokens = (await token_bins(connection, ids[0], listed.id, day, now)).quantiles
                grammar = await grammar_tokens(connection, ids[0], listed.id, day, now)
            for version in (await versions(connection, ids)).values():
                figures_by_slice = await last_day(
                    connection, version, now, slice_ids=[listed.id], unit=measure.unit
                )
                figures = figures_by_slice.get(listed.id)
        return signal_views(rows), history, noise, text, link, figures, measure, tokens, grammar


def _history_lines(history: list[StatusChange]) -> list[str]:
    return [
        f"  {change.made_at:%Y-%m-%d %H:%M} UTC  {change.status} by {change.made_by}: {change.reason}"
        for change in history
    ]


async def _searched(config: Config, secrets: Secrets, *, dry_run: bool) -> Round:
    from quantdrift.core.clock import SystemClock
    from quantdrift.monitor.discovery.round import LIMIT_S, discover
    from quantdrift.storage.database import Database

    # A person waits and can interrupt it: a statement may take as long as in a round of the monitor.
    async with Database(secrets.dsn, statement_timeout_s=LIMIT_S) as database:
        return await discover(database, config, SystemClock().now(), dry_run=dry_run)


def _table(slices: list[ListedSlice], model: str) -> str:
    if not slices:
        return (
            f"no slices of model `{model}`: none of its exchanges was compared"
            if model
            else "no slices yet: no exchange was compared"
        )
    rows = [
        (
            "-" if slice_.id is None else str(slice_.id),
            slice_.model,
            slice_.kind.value,
            slice_.status,
            "-" if slice_.share is None else f"{slice_.share:.2%}",
            said(slice_.verdict) if slice_.verdict else "-",
            slice_.serving.words if slice_.serving else "-",
            slice_.name,
        )
        for slice_ in slices
    ]
    return columns(("id", "model", "kind", "status", "share", "verdict", "version", "slice"), rows)


def _shown(listed: ListedSlice, alert: str) -> str:
    lines = [
        f"{listed.name}  ({listed.kind.value}, {listed.status})",
        f"  model      {listed.model}",
        f"  predicate  {listed.predicate}",
        f"  id         {'none yet' if listed.id is None else listed.id}",
    ]
    if listed.share is not None:
        lines.append(f"  share      {listed.share:.2%} of the answers on the last day with data, estimated")
    if listed.verdict is not None:
        lines.append(f"  verdict    {said(listed.verdict)} on {listed.candidate_version}: {listed.reason}")
    if listed.serving is not None:
        lines.append(f"  version    {listed.candidate_version}: {listed.serving.words}")
    if listed.evidence is not None and listed.threshold is not None:
        lines += [
            f"  {'' if index else 'alert':<10} {line}" for index, line in enumerate(_night_lines(alert))
        ]
        lines.append(f"  evidence   {_evidence(listed.verdict or '', listed.evidence, listed.threshold)}")
    if (trial := listed.discovery) is not None:
        ratio = _ratio(trial.log_evidence, trial.log_threshold)
        lines.append(
            f"  found      {trial.first_found_at:%Y-%m-%d}, mean {trial.metric} {number(trial.found_mean, 4)}"
            f" in {trial.found_share:.2%} of the traffic, {number(trial.overall_mean, 4)} over all"
        )
        lines.append(
            f"  test       is its mean above {number(trial.null_mean, 4)}? {count_of(trial.n_tested, 'exchange')} captured since"
            f" {trial.frozen_at:%Y-%m-%d %H:%M} UTC, evidence {ratio} of what confirms it"
        )
        if trial.confirmed_at is not None:
            lines.append(f"  confirmed  {trial.confirmed_at:%Y-%m-%d %H:%M} UTC")
        if trial.status == "expired" and trial.expired_at is not None:
            lines.append(f"  expired    {trial.expired_at:%Y-%m-%d %H:%M} UTC")
        if trial.waits_since is not None:
            lines.append(f"  waits      for a free slot since {trial.waits_since:%Y-%m-%d %H:%M} UTC")
        if trial.held:
            lines.append("  held       no search tests it until `quantdrift slices restore`")
    return "\n".join(lines)


def _night_lines(alert: str) -> list[str]:
    """Return the lines of an alert's text before its details."""
    return alert.partition("\n\n")[0].splitlines()


def _evidence(verdict: str, evidence: float, threshold: float) -> str:
    if verdict == "firing":
        return f"{number(evidence, 3)} at the alarm, which needed {number(threshold, 3)}; each signal restarted from zero after it"
    return f"{number(evidence, 3)} of all signals together; pages at {number(threshold, 3)}"


def _search_text(result: Round, version_searches: list[VersionSearch], *, dry_run: bool) -> str:
    if not version_searches:
        return "nothing to search: no version with a reference was compared within the last day"
    frozen = {(row.model, row.predicate) for row in result.frozen}
    lines = []
    for version_search in version_searches:
        left_out = version_search.search.n_left_out
        lines.append(
            f"{version_search.version.model} {version_search.version.candidate_version}: {count_of(version_search.search.n_items, 'item')},"
            f" {count_of(version_search.search.n_scored, 'slice')} scored, {len(version_search.origins)} found"
            + (f"; the limits left out {left_out} keys, values and conditions" if left_out else "")
        )
        for origin in version_search.origins:
            found_slice, key = origin.found, origin.key
            if origin.watched:
                status = "already watched or tested"
            elif (key.model, key.predicate) in frozen:
                status = "would become a candidate" if dry_run else "candidate, tested from now on"
            else:
                status = "no free place: too many candidates of this model are tested already"
            lines.append(
                f"  {key.name}: mean {found_slice.metric.value} {found_slice.mean / max(found_slice.overall, 1e-12):.1f}x the overall mean,"
                f" {found_slice.share:.2%} of the traffic; {status}"
            )
    to_be = "to be " if dry_run else ""
    lines += [
        f"{row.model}: {row.name} is {to_be}{row.status.value}: {result.reasons.get(row.id, '')}"
        for row in result.settled
    ]
    return "\n".join(lines)


def _as_json(version_search: VersionSearch) -> dict[str, Any]:
    return {
        "model": version_search.version.model,
        "candidate_version": version_search.version.candidate_version,
        "n_items": version_search.search.n_items,
        "n_scored": version_search.search.n_scored,
        "n_left_out": version_search.search.n_left_out,
        "found": [
            {
                "name": origin.key.name,
                "predicate": origin.key.predicate,
                "metric": origin.found.metric.value,
                "ratio": origin.found.mean / max(origin.found.overall, 1e-12),
                "share": origin.found.share,
                "n_items": origin.found.n_items,
                "watched": origin.watched,
            }
            for origin in version_search.origins
        ],
    }


def _ratio(log_evidence: float, log_threshold: float) -> str:
    if log_evidence >= log_threshold:
        return "all"
    import math

    return number(math.exp(log_evidence - log_threshold))


def signal_lines(signals: Sequence[SignalView], *, verdict: str | None, unit: str) -> list[str]:
    """Return the signals of one slice as a table: what each is compared with, evidence, mean; a tail has more lines.

    Parameters
    ----------
    verdict
        Verdict on the slice. While it fires the evidence is left out, because it restarted from zero at the alarm.
    unit
        Unit of the model's graded divergence.
    """
    if not signals:
        return []
    rows: list[tuple[str, ...]] = []
    for signal in signals:
        idle = verdict == Verdict.FIRING.value or signal.missing
        evidence = "-" if idle else number(signal.evidence, 3)
        mean = None if signal.tail else signal.recent
        recent = "" if mean is None else _recent(signal.metric, unit, mean)
        rows.append((f"{signal.metric} {signal.kind}", _against(signal, unit), evidence, recent))
        rows += [
            (f"  {figure.name}", "", "", _quantile(signal.metric, unit, figure)) for figure in signal.tail
        ]
    return ["", *(f"  {line}" for line in columns(_HEAD, rows).splitlines())]


def noise_lines(noises: Sequence[SelfNoise], *, unit: str) -> list[str]:
    """Return the noise of reference and candidate in a slice as a table, with the part that is added to its budgets.

    Parameters
    ----------
    noises
        Noise of one slice.
    unit
        Unit of the model's graded divergence.
    """
    from quantdrift.facts.words.amount import amount

    if not noises:
        return []
    rows = []
    for noise in noises:
        state = amount(Metric(noise.metric), noise.added, unit) if noise.added else "nothing"
        rows.append(
            (
                f"{noise.metric} {noise.side.value}",
                "not measured yet"
                if noise.mean is None
                else _measured(noise.metric, unit, noise.mean, noise.low, noise.high),
                f"{noise.n_groups:,}",
                state
                + (", too much" if noise.exceeds else "")
                + ("" if noise.own else ", as over all traffic: too few exchanges of this slice"),
            )
        )
    return ["", *(f"  {line}" for line in columns(_NOISE_HEAD, rows).splitlines())]


def _against(signal: SignalView, unit: str) -> str:
    from quantdrift.facts.words.amount import amount

    if signal.budget is not None:
        noise = f" and noise of {amount(Metric(signal.metric), signal.noise, unit)}" if signal.noise else ""
        return f"a budget of {amount(Metric(signal.metric), signal.budget, unit)}{noise}"
    if signal.missing:
        return f"learning; needs about {count_of(signal.missing, 'more exchange')}"
    limit = "" if signal.limit_s is None else f": 1 % may take longer than {number(signal.limit_s)} s"
    return f"a baseline of {count_of(signal.n_learned or 0, 'exchange')}{limit}"


def _quantile(metric: str, unit: str, figure: TailFigure) -> str:
    from quantdrift.facts.words.amount import amount

    if figure.value is None:
        return "too few exchanges"
    if figure.low is None or figure.high is None:
        return f"{amount(Metric(metric), figure.value, unit)}, extrapolated"
    return _measured(metric, unit, figure.value, figure.low, figure.high)


def _recent(metric: str, unit: str, recent: WeightedEstimate) -> str:
    """Return mean and interval; where the interval would hold every value, how much is missing for one."""
    if not recent.missing:
        return _measured(metric, unit, recent.mean, recent.low, recent.high)
    from quantdrift.facts.words.amount import amount

    needed = f"{count_of(recent.missing, 'more exchange')} {'is' if recent.missing == 1 else 'are'} needed"
    return f"{amount(Metric(metric), recent.mean, unit)}; {needed} for an interval"


def _measured(metric: str, unit: str, mean: float, low: float, high: float) -> str:
    from quantdrift.facts import estimate
    from quantdrift.facts.words.amount import measured

    return measured(Metric(metric), estimate.Estimate(mean=mean, low=low, high=high), unit)
