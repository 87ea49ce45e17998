"""What a sidecar says of texts: the words of `capture.text` for a chat, a completion or a text to embed.

Each value is a word of a short list, whatever a client sends; the text itself goes nowhere.
"""

import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from quantdrift.core.config.schema import Capture
from quantdrift.core.errors import OperatorError
from quantdrift.core.records import GENERATED, Protocol, Tensor, TextAttribute
from quantdrift.core.slices import TEXT
from quantdrift.core.tasks import Task
from quantdrift.models.language.request_options import json_asked, object_of
from quantdrift.sidecar.capture.attributes import KeyedHash
from quantdrift.sidecar.protocols.decoder import DecodedRequest

_PROTOCOLS: Final = GENERATED | {Protocol.OPENAI_EMBEDDINGS}
_MOST_READ: Final = 2000
"""Characters of which the language and the script are determined: more take time and change neither."""
_LEAST_CONFIDENCE: Final = 0.5
_UNDETERMINED: Final = "und"  # of ISO 639
_NO_LANGUAGE: Final = "zxx"  # the same: no linguistic content
_LENGTHS: Final = (64, 256, 1024, 4096, 16384)
_TURNS: Final = (2, 3, 5, 9)
_FENCED: Final = re.compile(r"^```.*?(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_MOST_CODE: Final = 0.5
_SCRIPTS: Final = {"cjk": "han", "hiragana": "kana", "katakana": "kana"}
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_BYTES: Final = struct.Struct("<I")


class TextAttributes:
    """Says what `capture.text` names, keyed `text.NAME`; of requests that are no text it says nothing.

    Parameters
    ----------
    capture
        What is recorded.
    keyed_hash
        Of the system prompt, and of what `capture.hmac` names.

    Raises
    ------
    OperatorError
        The language is to be recorded, and the library that knows languages is not installed.
    """

    def __init__(self, capture: Capture, keyed_hash: KeyedHash) -> None:
        self._wanted = frozenset(capture.text)
        self._hashed = frozenset(capture.hashed)
        self._keyed_hash = keyed_hash
        self._language_of = _languages() if TextAttribute.LANGUAGE in self._wanted else None

    def of_request(self, protocol: str, query: DecodedRequest) -> dict[str, str]:
        """Return what the request says."""
        if not self._wanted or not (query.text or protocol in _PROTOCOLS):
            return {}
        document = query.text or query.document
        messages = _messages(document)
        texts = [text for role, text in messages if role == "user"] or [text for _, text in messages]
        user_text = "\n".join(reversed(texts))  # the newest first
        values: dict[TextAttribute, str] = {}
        if user_text:
            plain = _FENCED.sub("", user_text[: 4 * _MOST_READ])[:_MOST_READ]
            n_code = sum(len(fence[0]) for fence in _FENCED.finditer(user_text))
            values = {
                TextAttribute.SCRIPT: script_of(plain),
                TextAttribute.CODE: _share(n_code / len(user_text)),
                TextAttribute.PROMPT_LENGTH: _range(sum(len(text) for _, text in messages), _LENGTHS, 0),
            }
            if self._language_of is not None:
                values[TextAttribute.LANGUAGE] = self._language_of(plain)
        if "messages" in document:
            n_turns = sum(role == "user" for role, _ in messages)
            values[TextAttribute.TURNS] = _range(n_turns, _TURNS, 1) if n_turns else "0"
            system = "\n".join(text for role, text in messages if role in _SYSTEM_ROLES)
            if system and TextAttribute.SYSTEM in self._wanted:
                values[TextAttribute.SYSTEM] = system
        if protocol != Protocol.OPENAI_EMBEDDINGS:
            is_offered = document.get("tools") or query.parameters.get("functions")
            values[TextAttribute.TOOLS] = "offered" if is_offered else "none"
            values[TextAttribute.JSON] = _json(query.parameters)
            values[TextAttribute.REASONING] = "on" if _asks_to_reason(query.parameters) else "off"
        return self._kept(values)

    def of_answer(self, protocol: str, task: Task, outputs: Iterable[Tensor]) -> dict[str, str]:
        """Return what the answer says; where both say something, the answer knows better."""
        if not self._wanted or not (task is Task.GENERATION or protocol in _PROTOCOLS):
            return {}
        values: dict[TextAttribute, str] = {}
        for tensor in outputs:
            if tensor.name == "text":
                n_longest = max((len(text.decode(errors="replace")) for text in _texts(tensor)), default=0)
                values[TextAttribute.ANSWER_LENGTH] = _range(n_longest, _LENGTHS, 0)
            elif tensor.name == "reasoning":
                values[TextAttribute.REASONING] = "on"
            elif tensor.name == "tool_calls":
                values[TextAttribute.TOOLS] = "used"
        return self._kept(values)

    def _kept(self, values: Mapping[TextAttribute, str]) -> dict[str, str]:
        kept = {f"{TEXT}{name}": value for name, value in values.items() if name in self._wanted}
        return {key: self._keyed_hash(value) if key in self._hashed else value for key, value in kept.items()}


def script_of(text: str) -> str:
    """Return the script of most letters, as Unicode names it: `latin`, `cyrillic`, `han`, `kana`; `none` without letters.

    Japanese has more Han than Kana in many sentences: a fifth of Kana is `kana`.
    """
    counts: Counter[str] = Counter()
    for letter, count in Counter(filter(str.isalpha, text)).items():
        word = unicodedata.name(letter, "other").split()[0].split("-")[0].lower()
        counts[_SCRIPTS.get(word, word)] += count
    if not counts:
        return "none"
    return "kana" if counts["kana"] * 5 >= counts.total() else counts.most_common(1)[0][0]


@cache
def _languages() -> Callable[[str], str]:
    """Return the function that says the language of a text by its code of ISO 639.

    A naive Bayes classifier of byte n-grams (Lui, Baldwin 2012, https://aclanthology.org/P12-3005) for 139 languages: some 0.1 ms a
    sentence. What it is not sure of is `und`: single words above all.
    """
    try:
        from py3langid.langid import (  # noqa: PLC0415 - 100 MB, where it is asked for
            MODEL_FILE,
            LanguageIdentifier,
        )
    except ModuleNotFoundError as error:
        raise OperatorError(
            "capture.text names `language`, and this installation lacks the package that knows languages: run"
            " pip install 'quantdrift[language]'"
        ) from error
    identifier = LanguageIdentifier.from_model_file(
        MODEL_FILE, norm_probs=True, min_confidence=_LEAST_CONFIDENCE
    )

    def language_of(text: str) -> str:
        language = str(identifier.classify(text)[0])
        return _UNDETERMINED if language == _NO_LANGUAGE else language

    return language_of


def _messages(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return role and text of each message; a prompt, or a text to embed, is one of a user."""
    messages = document.get("messages")
    if isinstance(messages, list):
        return [
            (str(message.get("role")), "\n".join(_parts(message.get("content"))))
            for message in map(object_of, messages)
        ]
    return [("user", text) for text in _parts(document.get("prompt", document.get("input")))]


def _parts(content: Any) -> Iterator[str]:
    """Yield the texts of a message: one, or several among images and the like."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _json(options: Mapping[str, Any]) -> str:
    is_asked, schema = json_asked(options)
    if not is_asked:
        return "none"
    return "schema" if schema else "object"


def _asks_to_reason(options: Mapping[str, Any]) -> bool:
    effort, template = options.get("reasoning_effort"), object_of(options.get("chat_template_kwargs"))
    is_effort = isinstance(effort, str) and effort != "none"
    return (
        is_effort
        or options.get("thinking") is True
        or template.get("enable_thinking") is True
        or template.get("thinking") is True
    )


def _share(share: float) -> str:
    if not share:
        return "none"
    return "most" if share >= _MOST_CODE else "some"


def _range(value: int, edges: Sequence[int], least: int) -> str:
    """Return the range of whole numbers that `value` is in: `64-255`, `2`, `16384+`."""
    for edge in edges:
        if value < edge:
            return str(least) if edge == least + 1 else f"{least}-{edge - 1}"
        least = edge
    return f"{least}+"


def _texts(tensor: Tensor) -> Iterator[bytes]:
    """Yield the elements of a tensor of BYTES."""
    data, position = tensor.data, 0
    while position < len(data):
        begin = position + _BYTES.size
        position = begin + _BYTES.unpack_from(data, position)[0]
        yield bytes(data[begin:position])
