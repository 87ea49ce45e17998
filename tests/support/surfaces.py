"""What surfaces show: every figure that they name, and the words that they use."""

import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import Any, Final

import msgspec

_STATUS_WORDS: Final = re.compile(r"\b(firing|warning)\b")


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


class _Elements(HTMLParser):
    """Collects elements that carry a figure, and the text that people see."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[dict[str, str | None]] = []
        self.text: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "style", "svg", "code", "title"}:
            self._hidden += 1
        of = dict(attrs)
        if "data-figure" in of:
            self.figures.append(of)

    def handle_endtag(self, tag: str) -> None:
        if tag in {"script", "style", "svg", "code", "title"}:
            self._hidden -= 1

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.append(data)


def of_html(surface: str, page: str) -> tuple[list[Shown], str]:
    """Return the figures of a page, and its text."""
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
    return figures, " ".join(" ".join(elements.text).split())


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
