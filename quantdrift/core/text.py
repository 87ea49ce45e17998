"""Texts from outside, made safe to show: in a terminal, a log, a report, a page or an event."""

import math
import re
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

_EXCERPT: Final = re.compile(r"\n    (\S.*)\n +\^$", re.MULTILINE)
_CONTROL = (
    *range(0x20),
    *range(0x7F, 0xA0),
)  # C0, DEL and C1: ESC, and U+009B, which some terminals take for ESC [
_LINES = (0x2028, 0x2029)  # line breaks that are no control characters
_DIRECTIONS = (
    0x061C,
    0x200E,
    0x200F,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)  # they reorder what is around them
_SURROGATES = range(0xD800, 0xE000)
UNSAFE: Final = MappingProxyType(
    dict.fromkeys((*_CONTROL, *_LINES, *_DIRECTIONS, *_SURROGATES), "\N{REPLACEMENT CHARACTER}")
)
"""For `str.translate`: characters that change how the text around them is shown."""
_REMOVED = dict.fromkeys(
    (
        *UNSAFE,
        0x00AD,
        0x034F,
        0x115F,
        0x1160,
        0x180E,
        0x200B,
        *range(0x2060, 0x2065),
        0x3164,
        *range(0xFE00, 0xFE10),
        0xFEFF,
        0xFFA0,
    )
)  # fillers, soft hyphens, variation selectors: without a width, or of an empty glyph
_LOOSE_JOINER = re.compile(r"(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])")
_TAGS = str.maketrans({"<": "\u2039", ">": "\u203a"})
_MENTION = re.compile(r"(?<!\w)@")
_IN_LINES = {number: text for number, text in UNSAFE.items() if number not in {0x09, 0x0A}}


def visible(text: str) -> str:
    """Return a text without what nobody sees: two values that look alike would otherwise be two slices.

    Joiners stay between letters of scripts that need them. Letters of different scripts may still look alike.
    """
    text = text.translate(_REMOVED)
    return text if text.isascii() else _LOOSE_JOINER.sub("", text)


def plain(text: str, max_length: int = 0) -> str:
    """Return a text without control characters, line breaks, direction marks and surrogates; each becomes U+FFFD.

    Parameters
    ----------
    max_length
        Longer texts are cut and end with an ellipsis; 0: no limit.
    """
    safe = text if _is_plain_ascii(text) else text.translate(UNSAFE)
    return f"{safe[:max_length]}…" if 0 < max_length < len(safe) else safe


def are_plain(texts: Iterable[str]) -> bool:
    """Return whether all texts are of printable ASCII alone, which `plain` returns as they are; quicker than to call it for each."""
    return _is_plain_ascii("".join(texts))


def _is_plain_ascii(text: str) -> bool:
    return text.isascii() and text.isprintable()


def plain_lines(text: str) -> str:
    """Return a text of several lines, otherwise as `plain`."""
    return text.translate(_IN_LINES)


def unmarked(text: str, url: str = "") -> str:
    """Return a text in which no chat, mail or page finds a link, a picture, a tag or a mention, but links below our own address.

    Names of slices and versions are values of clients. Receivers read Slack's markup, Markdown or HTML, or make a link of every
    address: so the signs that begin one of these become others that look alike.

    Parameters
    ----------
    url
        `web.url`, as it is configured; empty: there is no own address.
    """
    own = rf"({re.escape(url.rstrip('/'))}/[\w/]*)" if url else "((?!))"
    parts = re.split(own, text)
    parts[::2] = [
        _MENTION.sub("\uff20", part.translate(_TAGS).replace("](", "] (").replace("://", ":\u2215\u2215"))
        for part in parts[::2]
    ]
    return "".join(parts)


class Table(msgspec.Struct, frozen=True):
    """A table of texts.

    Parameters
    ----------
    text
        What a terminal shows; empty: left-aligned columns as wide as their longest cell.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: str = ""

    def __str__(self) -> str:
        """Return it as people read it in a terminal."""
        if self.text:
            return self.text
        lines = [self.head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def columns(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text."""
    return str(Table(tuple(head), tuple(map(tuple, rows))))


_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(?=$|-)")


def traceparent(text: str) -> str:
    """Return the version, ids and flags of a W3C `traceparent`; empty if it is none.

    Clients may send any text in this header, and it is stored and becomes a part of links.
    """
    match = _TRACEPARENT.match(text)
    return match[0] if match is not None else ""


_MISFIT: Final = re.compile(
    r"Expected `[\w |]+`(?:, got `\w+`)?|Object missing required field `\w+`|Input data was truncated|"
    r"(?:JSON|MessagePack data) is malformed|Invalid enum value"
)
_PATH: Final = re.compile(r" - at `(?:key in )?(\$[\w.\[\]]{0,200})`\Z")


def misfit(error: Exception) -> str:
    """Return where a document does not fit its type, without any of its values: for an error of msgspec, which may quote one.

    The path has the names of our own fields; keys of mappings stand as `[...]` in it.
    """
    message = str(error)
    match, path = _MISFIT.match(message), _PATH.search(message)
    return f"{match[0] if match else 'it does not fit'}{f' at {path[1]}' if path else ''}"


def number_of(text: str) -> float:
    """Return the number that a text is; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def in_one_line(text: str) -> str:
    """Return an error message of several lines, such as that of a configuration, as one: for a log and a list."""
    text = _EXCERPT.sub(r": `\1`", text)
    return text.replace(":\n  - ", ": ").replace("\n  - ", "; ").replace("\n", ". ")
