"""Figures made by hand for the report's unit tests, and a parser that tells what a page holds."""

from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import msgspec

from quantdrift.core.records import Metric, Verdict
from quantdrift.core.tasks import Task
from quantdrift.facts.figures import Figure, FigureName, Subject, period
from quantdrift.facts.interval import Quantile
from quantdrift.report.figures import (
    Brief,
    CoverageFigures,
    EpisodeFigures,
    ExampleFigures,
    Gap,
    ModelFigures,
    ReportedSlice,
    ReportFigures,
    UnreferencedVersion,
)
from quantdrift.report.period import PeriodKind
from quantdrift.storage.account.coverage import Fleet, ReasonCount, StratumCounts
from quantdrift.storage.figures.figures import SliceFigures

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


def _figure(
    name: FigureName, of: str, n: int, value: float, ends: tuple[float | None, float | None] = (None, None)
) -> Figure:
    return Figure(
        name=name,
        value=value,
        low=ends[0],
        high=ends[1],
        unit="nat" if name is FigureName.DIVERGENCE else "",
        n=n,
        window=period(NOW - timedelta(days=7), NOW),
        of=Subject(model="digits", version="int8-7", slice=of),
        as_of=NOW,
    )


def make_measured(of: str, flip: float, n: int) -> SliceFigures:
    """Return what is measured of a slice, without a rate of a day."""
    requests = _figure(FigureName.REQUESTS, of, n, 10.0 * n)
    return SliceFigures(
        changed_share=_figure(FigureName.CHANGED_SHARE, of, n, flip, (flip * 0.75, flip * 1.3)),
        divergence=_figure(FigureName.DIVERGENCE, of, n, 0.01),
        requests=requests,
        changed=msgspec.structs.replace(requests, name=FigureName.CHANGED, value=requests.value * flip),
        share=0.04,
        sampled=0.1,
    )


def make_slice(
    name: str = "scanner=faint",
    *,
    slice_id: int = 2,
    verdict: Verdict = Verdict.FIRING,
    flip: float = 0.052,
    n: int = 1000,
) -> ReportedSlice:
    """Return a slice; `all` is the aggregate."""
    return ReportedSlice(
        slice_id=1 if name == "all" else slice_id,
        name=name,
        predicate="true" if name == "all" else 'header.x-scanner = "faint"',
        verdict=verdict,
        reason="evidence 34 against 10",
        n_items=n,
        n_exchanges=n,
        n_effective=float(n),
        figures=make_measured(name, flip, n),
        flip_budget=0.01,
        divergence_budget=0.02,
        n_infinite=2,
        tail=(Quantile(probability=0.5, value=0.001, low=0.0009, high=None), None, None, None),
        shortfall=Quantile(probability=0.99, value=0.31, low=0.2, high=0.5),
    )


def make_episode(
    *,
    slice_name: str = "scanner=faint",
    slice_id: int = 2,
    severity: Verdict = Verdict.FIRING,
    metric: Metric = Metric.FLIP,
    resolved_at: datetime | None = None,
    ended: str = "",
) -> EpisodeFigures:
    """Return an alert that opened an hour after its onset."""
    return EpisodeFigures(
        page_url="https://drift.example.com/alert/1",
        alert_id=1,
        model="digits",
        version="int8-7",
        slice_id=slice_id,
        slice=slice_name,
        predicate='header.x-scanner = "faint"',
        severity=severity,
        task=Task.CLASSIFICATION,
        metric=metric,
        onset_at=NOW - timedelta(hours=3),
        opened_at=NOW - timedelta(hours=2),
        resolved_at=resolved_at,
        ended=ended,
        headline=f"digits int8-7: at least 3.1 % of answers in {slice_name} changed (budget: 1 %).",
        when_paged=_figure(FigureName.CHANGED_SHARE, slice_name, 1042, 0.052, (0.039, 0.068)),
        now=make_measured(slice_name, 0.031, 2400),
        budget=0.01,
        aggregate_verdict=Verdict.OK,
        examples=(
            ExampleFigures(
                exchange_id="0" * 32,
                item=1,
                captured_at=NOW,
                flip=True,
                divergence=None,
                trace_url="https://tracing.example.com/1",
                detail={
                    "candidate_top": 0,
                    "tv": 0.41234,
                    "lost": True,
                    "gained": False,
                    "classes": [],
                    "finish_reason": "<stop>",
                    "by_output": {"latent": 0.25},
                    "clustering": 3,
                },
            ),
        ),
        explanation=(
            "Numeric damage: the flip rate rose by +5 points on inputs that are as hard as before.",
        ),
        since="about 2026-11-16 09:00 UTC (estimated).",
        do_now=("Look at 5.2 % of it.",),
    )


def make_figures() -> ReportFigures:
    """Return figures that fill every part of the page."""
    everything, faint = make_slice("all", verdict=Verdict.OK, flip=0.004, n=20_000), make_slice()
    unknown = make_slice("scanner=offset", slice_id=3, verdict=Verdict.UNKNOWN, n=200)
    return ReportFigures(
        kind=PeriodKind.WEEK,
        begin=NOW - timedelta(days=7),
        end=NOW,
        path="report.html",
        source="rollup_hour",
        bucket_s=10_800.0,
        first_at=NOW - timedelta(days=6),
        last_at=NOW,
        n_offered=100_000,
        n_compared=20_000,
        n_slices=2,
        n_pages=1,
        n_tickets=0,
        briefs=(
            Brief(
                model="digits",
                version="int8-7",
                status=Verdict.FIRING,
                answer="No, not everywhere: in scanner=faint digits int8-7 has drifted.",
                lines=(),
            ),
        ),
        models=(
            ModelFigures(
                version_id=1,
                model="digits",
                version="int8-7",
                reference_digest="5f1d" * 16,
                precision="float32+bfloat16",
                status=Verdict.FIRING,
                n_slices=2,
                n_unknown=1,
                aggregate=everything,
                slices=(faint, unknown),
                speed="Half of its answers took 0.1 s at most.",
            ),
        ),
        episodes=(make_episode(),),
        n_episodes_left_out=3,
        coverage=CoverageFigures(
            strata=(
                StratumCounts(
                    stratum="default",
                    offered=100_000,
                    taken=21_000,
                    thinned=0,
                    published=20_900,
                    compared=None,
                    lost={"queue_full": 100},
                    models={"digits": {"queue_full": 60}},
                ),
            ),
            skipped=(ReasonCount(reason="no_reference", n=41),),
            quarantined=(ReasonCount(reason="schema", n=3, detail="input `x` is missing"),),
            unreferenced=(UnreferencedVersion(model="digits", version="int8-8", first_seen_at=NOW),),
            gaps=(Gap(begin=NOW - timedelta(hours=2), end=NOW - timedelta(hours=1)),),
            fleet=Fleet(sources=1, boots=2, blind_connections=0),
            judged_until=None,
        ),
    )


class Page(HTMLParser):
    """What a page holds: tags, attributes, text, and its numbered lists, each with the heading before it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.lists: list[tuple[str, list[str]]] = []
        self._open: list[str] = []
        self._heading = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag and its attributes."""
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._open = [*self._open, tag] if tag in {"ol", "li", "ul", "h2", "h3", "h4"} else self._open
        if tag == "ol":
            self.lists.append((self._heading, []))
        elif self._open[-2:] == ["ol", "li"] and tag == "li":
            self.lists[-1][1].append("")
        elif tag in {"h2", "h3", "h4"}:
            self._heading = ""

    def handle_endtag(self, tag: str) -> None:
        """Note the end of a heading, a list or an entry."""
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        """Note text."""
        self.words.append(data)
        text = data.replace("\u00a0", " ")
        if self._open[-2:] == ["ol", "li"]:
            self.lists[-1][1][-1] += text
        elif self._open and self._open[-1][0] == "h":
            self._heading += text

    @property
    def text(self) -> str:
        """All of the text, spaces joined."""
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())
