"""Chats with more than text, as questions to a server that return the log-probabilities of an answer."""

import base64
import io
import struct
import wave
import zlib
from collections.abc import Mapping
from typing import Any, Final

from quantdrift.core.config.schema import Medium
from quantdrift.models.language.scoring import ScoringRequest, replay_error

_SIDE: Final = 64  # pixels: below 28 some image processors refuse
_RATE: Final = 16_000
_TEXT: Final = {"type": "text", "text": "a"}


def question_of(request: ScoringRequest, *, is_answered: bool) -> dict[str, Any]:
    """Return messages, tools and template of a chat as they were sent; with its answer, which the last message then ends in.

    Raises
    ------
    QuarantineError
        Reason `replay`: the answer continues a message that is not a text.
    """
    question: dict[str, Any] = {"messages": request.messages, **request.template}
    if request.tools:
        question["tools"] = request.tools
    if not is_answered:
        return question
    before: tuple[Mapping[str, Any], ...] = request.messages
    answer: Mapping[str, Any] = {"role": "assistant", "content": ""}
    if request.template.get("continue_final_message"):
        *before_it, answer = request.messages
        before = tuple(before_it)
    if not isinstance(answer.get("content"), str):
        raise replay_error("the answer continues a message that is not a text")
    answered = {**answer, "content": f"{answer['content']}{request.served or ''}"}
    return {
        **question,
        "messages": (*before, answered),
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def probe_question(medium: Medium | None = None) -> ScoringRequest:
    """Return a short chat with its answer and, if one is given, a small picture or a second of silence."""
    parts = {None: [], Medium.IMAGE: [_picture()], Medium.AUDIO: [_silence()]}[medium]
    return ScoringRequest(messages=({"role": "user", "content": [*parts, _TEXT]},), served="a")


def _picture() -> dict[str, Any]:
    """Return a grey PNG as part of a message."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\x80" * (3 * _SIDE)) * _SIDE
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(png)}"}}


def _silence() -> dict[str, Any]:
    """Return a WAV as part of a message."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_RATE)
        sound.writeframes(bytes(2 * _RATE))
    return {"type": "input_audio", "input_audio": {"data": _base64(file.getvalue()), "format": "wav"}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
