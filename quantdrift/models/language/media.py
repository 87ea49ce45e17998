"""Parts of messages that are not text: which of them a reference at a server can be sent.

A part is sent as the client sent it, so it must bring its content along: what an address shows may have changed since, and nobody
fetches it on a client's word.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from quantdrift.core.config.schema import Medium
from quantdrift.models.language.request_options import object_of

_BY_ADDRESS: Final[Mapping[str, Medium]] = {"image_url": Medium.IMAGE, "audio_url": Medium.AUDIO}
_INLINE: Final = "data:"


def media_parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the parts of messages that are not text."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in map(object_of, content) if not isinstance(part.get("text"), str))


def has_media(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a message has a part that is not text."""
    return next(media_parts(messages), None) is not None


def media_problem(messages: Iterable[Mapping[str, Any]], taken: Sequence[Medium]) -> str:
    """Return why the parts of messages that are not text cannot be replayed; empty: they can, or there are none.

    Parameters
    ----------
    taken
        What the reference reads besides text.
    """
    parts = list(media_parts(messages))
    found = [(str(part.get("type", "unknown")), *_content_of(part)) for part in parts]
    if others := sorted({kind for kind, medium, _ in found if medium not in taken}):
        told = f"reads text{''.join(f' and {medium.value}' for medium in taken)} only"
        hint = "" if taken else ": see models.references.media"
        return f"a message has parts that are not text ({', '.join(others)[:100]}), and the reference {told}{hint}"
    if away := sorted({kind for kind, _, is_inline in found if not is_inline}):
        return (
            f"a message has parts by address ({', '.join(away)[:100]}), which is never fetched: only what a request itself contains"
            " (data:...) is replayed"
        )
    return ""


def _content_of(part: Mapping[str, Any]) -> tuple[Medium | None, bool]:
    """Return of which medium a part is, None if of none that is sent, and whether it contains it."""
    kind = part.get("type")
    if kind == "input_audio":
        return Medium.AUDIO, isinstance(object_of(part.get("input_audio")).get("data"), str)
    if isinstance(kind, str) and kind in _BY_ADDRESS:
        address = object_of(part.get(kind)).get("url")
        return _BY_ADDRESS[kind], isinstance(address, str) and address.startswith(_INLINE)
    return None, False
