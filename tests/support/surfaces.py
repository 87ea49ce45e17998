"""What surfaces show: every figure that they name, the numbers that they do not name, and the words that they use."""

import re
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from math import isfinite
from numbers import Real
from typing import Any, Final

import msgspec

from quantdrift.core.notation import estimated

_STATUS_WORDS: Final = re.compile(r"\b(firing|warning)\b")
_MONTH: Final = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that may stand without a name, and why."""

    pattern: str
    reason: str


NAMELESS: Final = (
    Kind(
        pattern=r"values above 10 count as 10|p99\.9 needs 10,000|a factor of 1\.29|from 1 % to 1\.5 %|some 7,600 exchanges",
        reason="the legend of the report says how many exchanges a quantile and a small change need: constants of the method",
    ),
    Kind(
        pattern=rf"\d{{4}}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?|\d{{1,2}} {_MONTH} \d{{4}}(?:, \d\d:\d\d)?",
        reason="a date or a time says what it is",
    ),
    Kind(
        pattern=r"\b\d[\d.,]*\s(?:second|minute|hour|day|week|month|ms|s|min|h|d)s?\b|\b\d[\d.,]*(?:s|m|h|d)\b",
        reason="a span of time, from one of these to another or to the moment of asking, has a unit",
    ),
    Kind(
        pattern=r"https?://\S+|\b\d+\.\d+\.\d+\.\d+(?::\d+)?|[\w.]+:\d+\b",
        reason="the port, the host and the path of an address",
    ),
    Kind(
        pattern=r"[\w.=/@+-]*(?:\d[\w.=/@+-]*[^\W\d_]|[^\W\d_][\w.=/@+-]*\d)[\w.=/@+-]*",
        reason="the name of a model, a version, a slice, an exchange or a quantile: letters with digits",
    ),
    Kind(
        pattern=r"(?i:\b(?:alert|incident|item)s?:?) \d+(?:(?:,| and) \d+(?! [A-Z][a-z]{2} \d{4}))*",
        reason="the number of an alert, of an incident or of an item is its name",
    ),
    Kind(pattern=r"\breference [0-9a-f]{12}\b", reason="the digest of a reference is its name"),
    Kind(pattern=r"(?m:^[ \t]*\d+\\?\. )", reason="the number of a step or of a heading is its place"),
    Kind(pattern=r"(?m:(?:quantdrift|python -m) [a-z]+ .*$)", reason="a command is to be typed as it stands"),
    Kind(
        pattern=r"\b95 % (?:confidence|interval)|95 % C?I|with 95 %|\(95 %\)",
        reason="the level of every interval is one constant, and its name stands behind it",
    ),
    Kind(
        pattern=r"(?:Label 50 of them|\b50 labels would tell|Labels of 50 of them)",
        reason="how many labels are advised is a constant of the sentence",
    ),
    Kind(
        pattern=r"\bneeds (?:some |about )?[\d,]+ more \w+|margin below 0\.1\b",
        reason="a reason was worded with its verdict and is kept as it was: its signal has the number as `missing`",
    ),
)


class Number(msgspec.Struct, frozen=True):
    """A number that a document or an element names: the name is its path, such as `changed_share.n` or `slices.length`."""

    name: str
    value: float


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """Which numbers a number in a text may be, by the words around it: the first that matches says so.

    Parameters
    ----------
    before, after
        What stands directly before and behind it.
    names
        Searched in the name; with `others` it must not be found there.
    """

    before: str = ""
    after: str = ""
    names: str
    others: bool = False

    def fits(self, text: str, number: re.Match[str]) -> bool:
        """Return whether it is about a number in a text."""
        return bool(
            re.search(f"(?:{self.before})$", text[: number.start()])
            and re.match(self.after, text[number.end() :])
        )

    def may_be(self, name: str) -> bool:
        """Return whether the number may be one of this name."""
        return bool(re.search(self.names, name)) is not self.others


_COUNTED: Final = r"(^|\.)(n|n_\w+|length|items|\w*_?ids?|alerts?|incident)$"
BOUND: Final = (
    Bound(after=r"(?:\s(?:to|and)\s[+-]?[\d.,]+)?\s?(?:%|points)", names=_COUNTED, others=True),
    Bound(after=r"\snat\b", names=_COUNTED, others=True),
    Bound(before=r"standard error ", names=r"_se$"),
    Bound(before=r"evidence(?: of recovery is)?\s+", names=r"evidence"),
    Bound(after=r",? (?:is )?needed\b", names=r"threshold"),
    Bound(before=r"pages at ", names=r"threshold"),
    Bound(before=r"\(", after=r" to [\d.,]+\)", names=r"low$"),
    Bound(before=r"\([\d.,]+ to ", after=r"\)", names=r"high$"),
    Bound(before=r"\[(?:[+-]?[\d.,]+, )?", names=r"low$|high$"),
    Bound(before=r"\[[+-]?[\d.,]+, ", names=r"high$"),
    Bound(after=r"\s(?:people|person)\b", names=r"people|clusters"),
    Bound(after=r"\schanged answers?\b", names=r"changed"),
    Bound(
        after=r"\s(?:effective )?(?:exchange|observation)s?\b",
        names=r"exchanges|groups|observ|(^|\.)n_\w+$|\.n$",
    ),
    Bound(after=r"\sanswers?\b", names=r"answers|items|(^|\.)n$|\.n$"),
    Bound(after=r"\srequests?\b", names=r"request|offered|taken|sampled|captured"),
    Bound(after=r"\s(?:of \d+ )?slices?\b", names=r"slice|verdicts|length|watched"),
    Bound(before=r"People: at least ", names=r"people"),
    Bound(after=r"\sa day\b", names=r"per_day"),
    Bound(after=r"\salerts?\b", names=r"alerts?|length"),
    Bound(after=r"\sincidents?\b", names=r"incidents?|length"),
)
_WHOLE: Final = re.compile(
    f"{_COUNTED}|changed|people|per_day|requests|recent$|total$|verdicts|threshold|evidence|per_million|strata"
)
_NAMELESS: Final = re.compile("|".join(kind.pattern for kind in NAMELESS))
_NUMBER: Final = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")
_OF_HUNDRED: Final = re.compile(r"(?:\s(?:to|and)\s[+-]?[\d.,]+)?\s?(?:%|points)")
_END: Final = re.compile(r"\[(?:[+-]?[\d.,]+, )?$")
_ERROR_OF_POINTS: Final = re.compile(r"points \(standard error $")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A figure as a surface shows it.

    Parameters
    ----------
    key
        Name, window with its ends, and model, version and slice.
    value, low, high
        None where the surface does not show it.
    """

    surface: str
    key: tuple[str, ...]
    value: float | None
    low: float | None = None
    high: float | None = None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What a page shows.

    Parameters
    ----------
    figures
        Those that its elements name.
    named
        The numbers that they name, and those of other elements that have a name.
    wrong
        Figures whose text is not their number.
    lines
        The text that people see, without that of named elements, a line for each block.
    text
        All of it in one line.
    """

    figures: list[Shown]
    named: list[Number]
    wrong: list[str]
    lines: str
    text: str


_HIDDEN: Final = frozenset({"script", "style", "svg", "code", "title"})
_VOID: Final = frozenset({"br", "hr", "img", "input", "link", "meta"})
_INLINE: Final = frozenset({"a", "b", "i", "span", "data", "time", "code", "em"})


class _Elements(HTMLParser):
    """Collects elements that name a number, and the text that people see."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[dict[str, str | None]] = []
        self.named: list[Number] = []
        self.wrong: list[str] = []
        self.text: list[str] = []
        self.lines: list[str] = []
        self._open: list[str] = []
        self._naming: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.lines.append(" " if tag in _INLINE else "\n")
        if tag in _VOID:
            return
        self._open.append(tag)
        of = dict(attrs)
        if tag != "data":
            return
        self._naming = of
        if "data-figure" in of:
            self.figures.append(of)
        name = of.get("data-figure") or of.get("data-name") or ""
        self.named += [
            Number(f"{name}.{part}", float(text))
            for part in ("value", "low", "high", "n", "people")
            if (text := of.get(f"data-{part}"))
        ]

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if tag == "data":
            self._naming = None
        if tag not in _INLINE:
            self.lines.append("\n")

    def handle_data(self, data: str) -> None:
        if not _HIDDEN.isdisjoint(self._open):
            return
        self.text.append(data)
        text = data.replace("\n", " ").replace("\xa0", " ")
        if self._naming is None:
            self.lines.append(text)
            return
        value = self._naming.get("data-value")
        if value and not all(_is_rounding(*found, float(value)) for found in _found(text)):
            self.wrong.append(f"{self._naming}: {text}")


def of_html(surface: str, page: str) -> Page:
    """Return what a page shows."""
    elements = _Elements()
    elements.feed(page)
    figures = [
        Shown(
            surface=surface,
            key=tuple(
                of.get(f"data-{name}") or ""
                for name in ("figure", "window", "from", "to", "model", "version", "slice")
            ),
            **{name: _number(of.get(f"data-{name}")) for name in ("value", "low", "high")},
        )
        for of in elements.figures
    ]
    return Page(
        figures=figures,
        named=elements.named,
        wrong=elements.wrong,
        lines="".join(elements.lines),
        text=" ".join(" ".join(elements.text).split()),
    )


def numbers_of(record: Any, name: str = "") -> Iterator[Number]:
    """Yield the numbers of a JSON document by name, and how many entries its lists have; those of a figure by the figure's name, too."""
    if isinstance(record, Mapping):
        figure = record["name"] if {"name", "value", "window", "of"} <= record.keys() else ""
        for key, part in record.items():
            yield from numbers_of(part, f"{name}.{figure}.{key}" if figure else f"{name}.{key}")
    elif isinstance(record, list):
        yield Number(f"{name}.length", float(len(record)))
        for part in record:
            yield from numbers_of(part, name)
    elif isinstance(record, int | float) and not isinstance(record, bool) and isfinite(record):
        yield Number(name, float(record))


def nameless(text: str, named: Iterable[Number]) -> list[str]:
    """Return the numbers in a text that are the rounding of no number that their words name, each with what stands around it."""
    wanted = list(named)
    return [
        " ".join(f"`{number.group()}` in: {text[max(0, number.start() - 60) : number.end() + 40]}".split())
        for blank, number in _found(text)
        if not _is_named(blank, number, wanted)
    ]


def _is_named(text: str, number: re.Match[str], wanted: Iterable[Number]) -> bool:
    bound = next((bound for bound in BOUND if bound.fits(text, number)), None)
    return any(
        _may_be(each.name, number, bound) and _is_rounding(text, number, each.value) for each in wanted
    )


def _may_be(name: str, number: re.Match[str], bound: Bound | None) -> bool:
    """Return whether a number may be one of this name; in the cell of a table its column has the words, and its form must do."""
    if bound is not None:
        return bound.may_be(name)
    if "." in number.group():
        return re.search(_COUNTED, name) is None
    return _WHOLE.search(name) is not None


def _found(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield the numbers of a text that need a name, each with the text in which the others are blank."""
    blank = _NAMELESS.sub(lambda found: " " * len(found.group()), text.replace("\xa0", " "))
    for number in _NUMBER.finditer(blank):
        yield blank, number


def _is_rounding(text: str, number: re.Match[str], value: float) -> bool:
    return _fits(number.group().rstrip(","), _scales(text, number), value)


def _scales(text: str, number: re.Match[str]) -> tuple[float, ...]:
    """Return what a number may be multiplied by to be shown so: a share is shown in percent."""
    if _OF_HUNDRED.match(text, number.end()) or _ERROR_OF_POINTS.search(text[: number.start()]):
        return (100.0,)
    # The head of a column can say that it is of hundred; a count never is, but the ends of an interval may be whole.
    is_end = _END.search(text[: number.start()]) is not None
    return (1.0, 100.0) if is_end or "." in number.group() else (1.0,)


def _fits(text: str, scales: tuple[float, ...], value: float) -> bool:
    shown = float(text.replace(",", ""))
    half = 0.5 * 10 ** -len(text.partition(".")[2]) * (1 + 1e-9)
    is_count = "." not in text
    return any(
        min(abs(scale * value - shown), abs(scale * value + shown)) <= half
        or (is_count and scale == 1 and value >= 1 and estimated(value) == shown)
        for scale in scales
    )


def _number(text: str | None) -> float | None:
    return float(text) if text else None


def of_json(surface: str, value: Any) -> Iterator[Shown]:
    """Yield the figures in a JSON document, at any depth."""
    if isinstance(value, Mapping):
        if {"name", "value", "window", "of"} <= value.keys():
            window, of = value["window"], value["of"]
            yield Shown(
                surface=surface,
                key=(
                    value["name"],
                    window["name"],
                    _moment(window["begin"]),
                    _moment(window["end"]),
                    of["model"],
                    of["version"],
                    of["slice"],
                ),
                value=value["value"],
                low=value.get("low"),
                high=value.get("high"),
            )
        for part in value.values():
            yield from of_json(surface, part)
    elif isinstance(value, list):
        for part in value:
            yield from of_json(surface, part)


def _moment(text: str) -> str:
    return text.replace("Z", "+00:00")


_ROW_KEYS: Final = ("model", "candidate_version", "version", "before_version", "slice", "day")


def of_rows(surface: str, table: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Shown]:
    """Yield the numbers of a table, each named by table, column and row."""
    for row in rows:
        values = {name: str(row[name]) for name in _ROW_KEYS if row.get(name)}
        row_key = tuple(f"{name}={value[:10] if name == 'day' else value}" for name, value in values.items())
        for column, value in row.items():
            if not isinstance(value, bool) and isinstance(value, Real) and isfinite(float(value)):
                yield Shown(surface=surface, key=(column, table, *row_key), value=float(value))


def differing(shown: list[Shown]) -> list[str]:
    """Return where two surfaces show another number for one figure."""
    first: dict[tuple[str, ...], Shown] = {}
    wrong = []
    for each in shown:
        other = first.setdefault(each.key, each)
        for name in ("value", "low", "high"):
            one, two = getattr(other, name), getattr(each, name)
            if one is not None and two is not None and one != two:
                wrong.append(f"{each.key}: {name} {one!r} at {other.surface}, {two!r} at {each.surface}")
    return wrong


def wrong_words(surface: str, text: str) -> list[str]:
    """Return the words for a status that people are not to read."""
    return [f"{surface}: `{found}`" for found in _STATUS_WORDS.findall(text)]
