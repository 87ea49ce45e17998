"""The HTML of the report."""

import re
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from markupsafe import Markup

from quantdrift.cli.look.report import summary
from quantdrift.core.records import Loss, Metric
from quantdrift.facts.figures import FigureName
from quantdrift.facts.interval import Quantile
from quantdrift.facts.words.losses import REASONS
from quantdrift.report.figures import ReportFigures
from quantdrift.show.report.markdown import render_markdown
from quantdrift.show.report.page import render
from quantdrift.show.trends import Plot, Trend
from tests.support.monitor.report_figures import Page, make_episode, make_figures, make_slice

pytestmark = pytest.mark.unit

EVIL = """</style></title><script>alert(1)</script><img src=x onerror='a()'>" onmouseover="a() {{ 7 * 7 }}"""
DRAWN = dict.fromkeys(
    (Metric.FLIP, Metric.DIVERGENCE),
    Plot(drawing=Markup("<svg></svg>"), trend=Trend(points=(), width=timedelta(minutes=10), top=0.0)),
)
DRAWINGS = {1: {2: DRAWN}}


def _page(figures: ReportFigures, title: str = "Quantisation drift") -> Page:
    return Page(render(title, figures, DRAWINGS, most_table=25, most_tail=12))


def _poisoned(value: Any) -> Any:
    """Return the record with every text in it replaced, addresses and closed sets excepted."""
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(
            value,
            **{
                name: _poisoned(getattr(value, name))
                for name in value.__struct_fields__
                if name not in {"trace_url", "source"}
            },
        )
    if isinstance(value, tuple):
        return tuple(_poisoned(entry) for entry in value)
    if isinstance(value, dict):
        return dict(zip([EVIL], map(_poisoned, value.values()), strict=False))
    return EVIL if type(value) is str and value != "true" else value


def test_no_text_from_outside_becomes_markup() -> None:
    """Every text of the figures and the title are hostile: the page has the kinds of tags of a harmless one."""
    harmless, hostile = _page(make_figures()), _page(_poisoned(make_figures()), EVIL)
    assert set(hostile.tags) == set(harmless.tags)
    assert {name for name, _ in hostile.attributes} == {name for name, _ in harmless.attributes}
    assert not any(name.startswith("on") for name, _ in hostile.attributes)
    assert "{{ 7 * 7 }}" in hostile.text
    assert hostile.text.count("<script>alert(1)</script>") > 20


def test_the_page_loads_and_runs_nothing() -> None:
    """No script, image, frame or style sheet from elsewhere, and a policy that forbids them."""
    page = _page(make_figures())
    assert not {"script", "img", "iframe", "link", "object", "embed", "form", "base"} & set(page.tags)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert [value for name, value in page.attributes if name in {"src", "href", "xlink:href"}] == [
        "https://drift.example.com/alert/1",
        "https://tracing.example.com/1",
    ]


@pytest.mark.parametrize(
    ("name", "cell"), [(FigureName.CHANGED, "520 so far"), (FigureName.CHANGED_PER_DAY, "520")]
)
def test_a_count_in_the_column_of_rates_says_so_itself(name: FigureName, cell: str) -> None:
    """In the first minutes there is no rate of a day: the number in the cell is what came so far."""
    figures = make_figures()
    (model,) = figures.models
    faint, *others = model.slices
    changed = faint.figures.changed
    assert changed is not None
    measured = msgspec.structs.replace(faint.figures, changed=msgspec.structs.replace(changed, name=name))
    slices = (msgspec.structs.replace(faint, figures=measured), *others)
    html = render(
        "t",
        msgspec.structs.replace(figures, models=(msgspec.structs.replace(model, slices=slices),)),
        {},
        most_table=25,
        most_tail=12,
    )
    row = html[html.index(">scanner=faint<small>") :]
    cells = [" ".join(Page(cell).text.split()) for cell in row[: row.index("</tr>")].split("<td>")]
    assert cell in cells


def test_unknown_is_shown_with_its_reason_and_never_as_ok() -> None:
    """The badge of an unknown slice is that of unknown."""
    figures = make_figures()
    html = render("t", figures, {}, most_table=25, most_tail=12)
    row = html[html.index("scanner=offset<small>") :]
    row = row[: row.index("</tr>")]
    assert 'class="badge unknown"' in row
    assert "evidence 34 against 10" in row
    assert "badge ok" not in row


def test_what_is_left_out_is_counted() -> None:
    """Caps say how much they hide."""
    figures = make_figures()
    page = Page(render("t", figures, DRAWINGS, most_table=1, most_tail=1))
    assert "1 slice with less divergence is left out here; 1 not known" in page.text
    assert "2 slices are not drawn" in page.text
    assert "3 more alerts are in the table" in page.text


def test_every_part_of_the_page_is_there() -> None:
    """Figures that fill every part are all told."""
    text = _page(make_figures()).text
    for part in (
        "No, not everywhere: in scanner=faint digits int8-7 has drifted.",
        "100,000",
        "against reference 5f1d5f1d5f1d, float32+bfloat16",
        "page scanner=faint",
        "Changed answers when it paged 5.2 % 3.9 to 6.8 % 1,042 answers",
        "n too small",
        "the stream did not keep up",
        "Versions without a reference",
        "Gaps",
        "No verdicts yet",
        "anytime-valid",
        "this report counts hourly sums, so the period is widened to whole hours",
    ):
        assert part in text


def test_the_page_shows_what_decided_and_counts_in_the_singular() -> None:
    """The share when it paged stands beside the newest one, each with its answers."""
    figures = make_figures()
    episode = msgspec.structs.replace(
        make_episode(metric=Metric.DIVERGENCE),
        decided="mean KL 0.09 nat since the onset (254 exchanges), 0.04 nat accepted",
    )
    text = _page(msgspec.structs.replace(figures, episodes=(episode,), n_episodes_left_out=1)).text
    for part in (
        "Changed answers when it paged 5.2 % 3.9 to 6.8 % 1,042 answers",
        "In its newest hours 3.1 % 2.3 to 4 % 2,400 answers",
        "Decided by mean KL 0.09 nat since the onset (254 exchanges), 0.04 nat accepted.",
        "1 more alert is in the table",
    ):
        assert part in text, part
    assert "1 exchanges" not in text


def test_what_to_do_now_and_what_to_do_tomorrow_are_two_lists() -> None:
    """Each under its heading, numbered, with the steps of the figures in their order; without steps there is no heading."""
    lasting = msgspec.structs.replace(
        make_episode(),
        do_now=("Route scanner=faint to the FP32 model.", "Acknowledge it: quantdrift alerts ack 1"),
        tomorrow=("Find the cause: quantdrift diagnose 1 --candidate <file>",),
    )
    ended = msgspec.structs.replace(make_episode(), alert_id=2, do_now=(), tomorrow=("Nothing.",))
    figures = msgspec.structs.replace(make_figures(), episodes=(lasting, ended))
    lists = _page(figures).lists
    assert lists == [
        ("Do now", list(lasting.do_now)),
        ("Tomorrow, for the owner", list(lasting.tomorrow)),
        ("Tomorrow, for the owner", list(ended.tomorrow)),
    ]


def test_figures_survive_json() -> None:
    """What --json prints is read back as it was."""
    figures = make_figures()
    assert msgspec.json.decode(msgspec.json.encode(figures), type=ReportFigures) == figures


def test_the_terminal_shows_the_headlines_the_worst_tails_and_the_path() -> None:
    """What matters, with a dash where too little is known, and where the rest is."""
    shown = [" ".join(line.split()) for line in summary(make_figures()).splitlines()]
    assert shown == [
        "No, not everywhere: in scanner=faint digits int8-7 has drifted.",
        "",
        "digits int8-7, KL in nats",
        "slice verdict changed answers KL p95 p99 p99.9 mean above p99 exchanges",
        "all OK 0.4 % 0.01 - - - 0.31 20,000",
        "scanner=faint drifted 5.2 % 0.01 - - - 0.31 1,000",
        "scanner=offset not known 5.2 % 0.01 - - - 0.31 200",
        "",
        "report: report.html",
    ]


def test_a_terminal_is_not_flooded_with_slices() -> None:
    """The worst are shown, the others counted."""
    figures = make_figures()
    many = tuple(make_slice(f"s{number}", slice_id=number) for number in range(10, 40))
    figures = msgspec.structs.replace(
        figures, models=(msgspec.structs.replace(figures.models[0], slices=many),)
    )
    said = summary(figures)
    assert "25 more are in the report" in said
    assert "s15" not in said


def test_the_page_has_the_tail_of_each_slice() -> None:
    """Quantiles up to p99.9 and the mean above p99, each with its interval, or that there is too little for it."""
    text = _page(make_figures()).text
    assert "Slice p50 p95 p99 p99.9 Mean above p99 Infinite Effective exchanges" in text
    assert (
        "scanner=faint 0.001 at least 0.0009 n too small n too small n too small 0.31 [0.2, 0.5] 2 items"
        in text
    )


def test_the_page_says_above_where_the_histogram_ends() -> None:
    """A p99 in the open last bin, and a mean that rests on it, are lower bounds and no points."""
    figures = make_figures()
    model = figures.models[0]
    far = Quantile(probability=0.99, value=7.77, low=0.2, high=None, above=True)
    slices = tuple(
        msgspec.structs.replace(entry, tail=(None, None, far, None), shortfall=far) for entry in model.slices
    )
    shown = msgspec.structs.replace(figures, models=(msgspec.structs.replace(model, slices=slices),))
    assert "above 7.8 at least 0.2 n too small above 7.8 at least 0.2" in _page(shown).text


def test_the_page_tells_ties_beside_flips() -> None:
    """Their share stands in the cell of the flips, and the glossary says what they are; without ties neither does."""
    figures = make_figures()
    assert "ties" not in _page(figures).text
    model = figures.models[0]
    assert model.aggregate is not None
    whole = msgspec.structs.replace(model.aggregate, tie=0.0123)
    shown = msgspec.structs.replace(figures, models=(msgspec.structs.replace(model, aggregate=whole),))
    text = _page(shown).text
    assert "ties 1.2 %" in text
    assert "which one is first is a matter of their order" in text


def test_losses_are_listed_by_model_where_it_is_known() -> None:
    """And every reason that a sidecar may count has its meaning on the page."""
    assert "Lost by model" in _page(make_figures()).text
    assert {loss.value for loss in Loss} <= set(REASONS)


def test_no_text_from_outside_marks_up_the_markdown() -> None:
    """With hostile texts no tag, link, code or table cell is left unescaped, and every line keeps its kind."""
    harmless = render_markdown("t", make_figures(), most_table=25)
    hostile = render_markdown("t", _poisoned(make_figures()), most_table=25)
    assert "<script" not in re.sub(r"\\.", "", hostile)
    assert re.sub(r"\\.", "", hostile).count("|") == harmless.count("|")
    kinds = [
        [line[:1] * (line[:1] in set("#-|")) for line in text.splitlines()] for text in (hostile, harmless)
    ]
    assert kinds[0] == kinds[1]


def test_the_markdown_leads_to_the_live_page_whatever_a_slice_is_called() -> None:
    """A name can neither end the link nor open another; an IPv6 address stays one; without `web.url` there is no link."""
    name = "a](https://elsewhere.example) | `x` <b>"
    figures = make_figures()
    (model, *others) = figures.models
    for url, cell in (
        ("http://[::1]:9468/slice/1/2", "](http://[::1]:9468/slice/1/2) |"),
        ("https://drift.example.com/slice/1/2", "](https://drift.example.com/slice/1/2) |"),
        ("", ""),
    ):
        entry = make_slice(name)
        entry = msgspec.structs.replace(entry, page_url=url)
        changed = msgspec.structs.replace(model, slices=(entry,))
        page = render_markdown(
            "t", msgspec.structs.replace(figures, models=(changed, *others)), most_table=25
        )
        (line,) = [line for line in page.splitlines() if line.startswith(("| [a\\]", "| a\\]"))]
        bare = re.sub(r"\\.", "", line)
        assert bare.count("](") == (1 if url else 0)
        assert bare.count("|") == 8
        assert cell in line
