"""The report as Markdown, for a mail, a ticket or a wiki: the same figures as the page, without the plots. Pure."""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from quantdrift.core.notation import count_of, moment, percent
from quantdrift.core.records import Metric, Verdict
from quantdrift.facts.status import said
from quantdrift.facts.words.amount import measured, points
from quantdrift.facts.words.first_screen import over
from quantdrift.facts.words.happened import SINCE
from quantdrift.facts.words.size import size
from quantdrift.report.figures import EpisodeFigures, ReportedSlice, ReportFigures

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~!&])")


def render_markdown(title: str, figures: ReportFigures, *, most_table: int) -> str:
    """Return the report as Markdown; every text from outside is escaped, so that it can neither mark up nor link.

    Parameters
    ----------
    most_table
        Largest number of rows of a table of slices; the text says how many are left out.
    """
    parts = [f"# {_text(title)}", f"{moment(figures.begin)} to {moment(figures.end)}"]
    for brief in figures.briefs:
        parts += [
            f"## {_text(brief.model)}: is the quantised model still good enough?",
            f"**{_text(brief.answer)}**",
        ]
        incidents = [f"- **Incident**: {_text(text)}" for text in brief.incidents]
        parts += [
            "\n".join([*incidents, *(f"- **{line.question}**: {_text(line.answer)}" for line in brief.lines)])
        ]
        if brief.others:
            parts += [
                "Other versions:",
                "\n".join(f"- **{_text(line.question)}**: {_text(line.answer)}" for line in brief.others),
            ]
    if not figures.briefs:
        parts.append(f"**{figures.silence()}**")
    parts += [
        *_alerts(figures),
        *_releases(figures, most_table),
        *_labels(figures, most_table),
        *_slices(figures, most_table),
    ]
    if figures.marks:
        parts += [
            "## Releases and decisions",
            _table(
                ("when", "model", "what", "who", "why"),
                (
                    (moment(mark.at), mark.model or "all", mark.what, mark.who, mark.why)
                    for mark in figures.marks
                ),
            ),
        ]
    parts += ["## Coverage", _coverage(figures)]
    return "\n\n".join(parts) + "\n"


def _alerts(figures: ReportFigures) -> list[str]:
    parts: list[str] = []
    if figures.episodes:
        parts.append("## Alerts")
    for episode in figures.episodes:
        state = over(episode.resolved_at, episode.ended) + (
            "" if episode.resolved_at is None else f" ({moment(episode.resolved_at)})"
        )
        parts += [
            f"### {_text(episode.slice)}",
            _text(
                f"{episode.model} {episode.version}, opened {moment(episode.opened_at)}, {state}."
                f" {SINCE}: {episode.since} Size: {_size(episode)}."
            ),
            *(_text(finding) for finding in episode.findings),
            *(
                "\n".join([f"**{title}**", "", *(f"{n}. {_text(step)}" for n, step in enumerate(steps, 1))])
                for title, steps in (
                    ("Do now", episode.do_now),
                    ("Tomorrow, for the owner", episode.tomorrow),
                )
                if steps
            ),
        ]
        if episode.page_url:
            parts.append(_link("This alert on the live page", episode.page_url))
    return parts


def _size(episode: EpisodeFigures) -> str:
    now = episode.now.changed_share if episode.now else None
    is_page, is_over = episode.severity is Verdict.FIRING, episode.resolved_at is not None
    return size(episode.when_paged, now, is_page=is_page, is_over=is_over)


def _releases(figures: ReportFigures, most_table: int) -> list[str]:
    parts: list[str] = []
    for comparison in figures.comparisons:
        table = comparison.table(most_table)
        parts += [
            f"## Release: {_text(comparison.model)} {_text(comparison.new.version)}",
            _text(comparison.sentence + (f" Careful: {comparison.warning}." if comparison.warning else "")),
            _table(table.head, table.rows),
        ]
    return parts


def _labels(figures: ReportFigures, most_table: int) -> list[str]:
    parts: list[str] = []
    for labels in figures.labels:
        parts += [
            f"## True labels: {_text(labels.model)} {_text(labels.version)}",
            _text(labels.sentence),
            _table(
                (
                    "slice",
                    "result",
                    "loses, %",
                    "only the candidate wrong",
                    "only the reference wrong",
                    "both wrong",
                    "labels",
                ),
                (
                    (
                        entry.slice,
                        entry.words,
                        points(entry.loss),
                        points(entry.harm),
                        points(entry.help),
                        points(entry.both_wrong),
                        entry.counted,
                    )
                    for entry in labels.slices[:most_table]
                ),
            ),
        ]
    return parts


def _slices(figures: ReportFigures, most_table: int) -> list[str]:
    parts: list[str] = []
    if figures.models:
        parts.append("## Slices")
    for model in figures.models:
        slices = [entry for entry in (model.aggregate, *model.slices[:most_table]) if entry is not None]
        measure = model.measure
        parts += [
            f"### {_text(model.model)} {_text(model.version)}: {_text(model.serving.words)}",
            _table_of(
                ("slice", "verdict", "answers that changed", "budget", measure.name, "compared", "traffic"),
                (_slice(entry, measure.unit) for entry in slices),
            ),
        ]
        parts += [_text(f"{entry.name}, {line}") for entry in slices for line in entry.signal_lines]
        if model.speed:
            parts.append(_text(model.speed))
        if len(model.slices) > most_table:
            parts.append(
                f"{count_of(len(model.slices) - most_table, 'slice')} with less divergence left out."
            )
    return parts


def _slice(entry: ReportedSlice, unit: str) -> tuple[str, ...]:
    """Return the cells of a slice, already escaped."""
    cells = (
        said(entry.verdict),
        measured(Metric.FLIP, entry.flip, ""),
        percent(entry.flip_budget) if entry.flip_budget else "none",
        measured(Metric.DIVERGENCE, entry.divergence, unit),
        f"{entry.n_items:,}",
        percent(entry.figures.share),
    )
    return (_link(entry.name, entry.page_url), *map(_text, cells))


def _coverage(figures: ReportFigures) -> str:
    lost = sum(loss.n for loss in figures.coverage.losses)
    seen = f"- {figures.n_offered:,} requests seen, {figures.n_compared:,} compared"
    lines = [f"{seen}, {lost:,} lost of {figures.coverage.taken:,} taken"]
    if figures.replays is not None and figures.replays.per_million is not None:
        lines.append(f"- {figures.replays.per_million:,.0f} replays for a million requests")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return _table_of(head, (tuple(map(_text, row)) for row in rows))


def _table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are already escaped."""
    lines = [tuple(map(_text, head)), tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _link(text: str, url: str) -> str:
    """Return a text that leads to an address, or the text alone if there is none."""
    # Brackets stay as they are: an IPv6 address stands between them.
    return f"[{_text(text)}]({quote(url, safe='/:[]')})" if url else _text(text)


def _text(text: str) -> str:
    """Return a text with everything escaped that Markdown or HTML would read, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
