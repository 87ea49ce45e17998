"""What a sidecar says of texts: words of short lists, by what was sent and answered."""

import hashlib
import hmac
import json
from typing import Any

import pytest

from quantdrift.core.config.schema import Capture, Config, Model, Slice
from quantdrift.core.records import TextAttribute
from quantdrift.core.slices import SliceAssigner
from quantdrift.sidecar.capture.recorder import Recorder, SidecarIdentity
from quantdrift.sidecar.capture.text_attributes import script_of
from quantdrift.sidecar.state.config import LiveConfig
from tests.support.sidecar.raw_exchanges import raw_exchange, recorded_by

pytestmark = pytest.mark.unit

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
IDENTITY = SidecarIdentity(source="pod-1", version="", salt=b"salt", hmac_key=b"key")
WITHOUT_LANGUAGE = tuple(name for name in TextAttribute if name is not TextAttribute.LANGUAGE)
SECRET = "the-word-that-stays-in-the-pod"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def attributes(
    path: str,
    request: dict[str, Any],
    answer: dict[str, Any] | None = None,
    *,
    capture: Capture | None = None,
) -> dict[str, str]:
    """Return the attributes of an exchange, without the prefix of texts."""
    config = Config(models=(Model(name="m"),), capture=capture or Capture(text=WITHOUT_LANGUAGE))
    served = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}} | (answer or {})]}
    if path == EMBEDDINGS:
        served = {"data": [{"index": 0, "embedding": [0.5]}]}
    meta, sent, got = raw_exchange(path=path, request={"model": "m", **request}, response=served, pi1=1.0)
    exchange = recorded_by(Recorder(LiveConfig.of(config), IDENTITY), meta, sent, got)
    assert exchange is not None
    return {key.removeprefix("text."): value for key, value in exchange.attributes.items()}


def said(*texts: str, **more: Any) -> dict[str, Any]:
    """Return a chat of a user who said these."""
    return {"messages": [{"role": "user", "content": text} for text in texts], **more}


def test_nothing_is_said_of_texts_unless_the_configuration_names_it() -> None:
    """And then only what it names."""
    assert attributes(CHAT, said("hello there"), capture=Capture()) == {}
    capture = Capture(text=(TextAttribute.SCRIPT,))
    assert attributes(CHAT, said("hello there"), capture=capture) == {"script": "latin"}


def test_a_chat_is_described_by_words_and_never_by_its_text() -> None:
    """Whatever role said something: the text is in no value."""
    request = {
        "messages": [
            {"role": "system", "content": f"You know {SECRET}."},
            {"role": "user", "content": [{"type": "text", "text": f"{SECRET}?"}, {"type": "image_url"}]},
            {"role": "assistant", "content": SECRET},
            {"role": "user", "content": f"{SECRET}!\n```\n{SECRET * 5}\n```\n"},
        ],
        "tools": TOOLS,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
    }
    hashed = hmac.new(b"key", f"You know {SECRET}.".encode(), hashlib.sha256).hexdigest()[:32]
    assert attributes(CHAT, request) == {
        "script": "latin",
        "code": "most",
        "prompt_length": "256-1023",
        "turns": "2",
        "system": hashed,
        "tools": "offered",
        "json": "object",
        "reasoning": "on",
        "answer_length": "0-63",
    }
    assert SECRET not in json.dumps(attributes(CHAT, request))


@pytest.mark.parametrize(
    ("request_", "answer", "expected"),
    [
        (said("hello"), {}, {"tools": "none", "json": "none", "reasoning": "off", "code": "none"}),
        (said("hello", tools=TOOLS), {}, {"tools": "offered"}),
        (
            said("hello", tools=TOOLS),
            {"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}},
            {"tools": "used", "answer_length": "0-63"},
        ),
        (said("hello", functions=[{"name": "f"}]), {}, {"tools": "offered"}),
        (
            said(
                "hello",
                response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
            ),
            {},
            {"json": "schema"},
        ),
        (said("hello", guided_json={"type": "object"}), {}, {"json": "schema"}),
        (said("hello", chat_template_kwargs={"enable_thinking": True}), {}, {"reasoning": "on"}),
        (said("hello", reasoning_effort="none"), {}, {"reasoning": "off"}),
        (
            said("hello"),
            {"message": {"role": "assistant", "content": "x" * 64, "reasoning_content": "hm"}},
            {"reasoning": "on", "answer_length": "64-255"},
        ),
        (said("a", "b", "c", "d"), {}, {"turns": "3-4"}),
        (said(*"abcdefghi"), {}, {"turns": "9+"}),
        (said("x" * 16384), {}, {"prompt_length": "16384+"}),
        (said("see:\n```python\nx = 1\n```\n" + "and tell me what it does " * 9), {}, {"code": "some"}),
        (said("```\nnever closed " * 2), {}, {"code": "most"}),
        (said("größe", "Какая столица Перу?"), {}, {"script": "cyrillic"}),
    ],
)
def test_each_word_follows_from_what_was_asked_and_answered(
    request_: dict[str, Any], answer: dict[str, Any], expected: dict[str, str]
) -> None:
    """The newest message of the user comes first, and an answer knows better than its request."""
    found = attributes(CHAT, request_, answer)
    assert {name: found.get(name) for name in expected} == expected


def test_completions_and_texts_to_embed_have_what_applies_to_them() -> None:
    """A prompt has no turns, and tokens have no script."""
    completion = attributes(COMPLETIONS, {"prompt": "Once upon a time"}, {"text": "there"})
    assert completion["prompt_length"] == "0-63"
    assert "turns" not in completion
    assert attributes(COMPLETIONS, {"prompt": [1, 2]}, {"text": "there"}).keys() == {
        "answer_length",
        "json",
        "reasoning",
        "tools",
    }
    assert attributes(EMBEDDINGS, {"input": "größe" * 20}) == {
        "code": "none",
        "prompt_length": "64-255",
        "script": "latin",
    }


@pytest.mark.parametrize(
    "content", [None, 3, {"text": "x"}, [], ["x", {"type": "text"}, {"text": 4}], "", "\x00"]
)
def test_no_form_of_a_message_loses_an_exchange(content: Any) -> None:
    """Clients send what they like; what is no text says nothing."""
    messages = [{"role": role, "content": content} for role in ("system", "user", "tool", None, 7)]
    options = {"reasoning_effort": {}, "chat_template_kwargs": 3, "response_format": [], "tools": []}
    body = json.dumps({"model": "m", "messages": [*messages, "none", None], **options}).encode()
    config = Config(models=(Model(name="m"),), capture=Capture(text=WITHOUT_LANGUAGE))
    meta, sent, got = raw_exchange(
        path=CHAT, request=body, response={"choices": [{"index": 0, "message": {}}]}, pi1=1.0
    )
    exchange = recorded_by(Recorder(LiveConfig.of(config), IDENTITY), meta, sent, got)
    assert exchange is not None
    assert exchange.attributes["text.turns"] == "1"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("What is it?", "latin"),
        ("日本の首都はどこですか", "kana"),
        ("中国的首都是哪里", "han"),
        ("안녕하세요", "hangul"),
        ("Ποια είναι", "greek"),
        ("مرحبا", "arabic"),
        ("राजधानी", "devanagari"),
        ("12:30?", "none"),
    ],
)
def test_the_script_is_that_of_most_letters(text: str, script: str) -> None:
    """As Unicode names them."""
    assert script_of(text) == script


@pytest.mark.slow
def test_the_language_is_that_of_the_user_and_not_of_the_code() -> None:
    """Its code of ISO 639; `und` where a text is too short to tell."""
    capture = Capture(text=(TextAttribute.LANGUAGE,))
    texts = {
        "Was ist die Hauptstadt von Peru?": "de",
        "What is the capital of Peru?": "en",
        "Quelle est la capitale du Pérou ?": "fr",
        "¿Cuál es la capital de Perú?": "es",
        "Fasse das bitte kurz zusammen:\n```\nfor one in the_list:\n    return what(one)\n```": "de",
        "hm": "und",
    }
    found = {text: attributes(CHAT, said(text), capture=capture)["language"] for text in texts}
    assert found == texts


def test_a_slice_by_text_has_a_value_for_each_word() -> None:
    """Declared like one by header; its values may be named."""
    config = Config(
        models=(Model(name="m"),),
        capture=Capture(text=(TextAttribute.LANGUAGE, TextAttribute.TURNS)),
        slices=(Slice(name="language", text="language"), Slice(name="first", text="turns", values=("1",))),
    )
    recorded = {"text.language": "de", "text.turns": "1"}
    keys = SliceAssigner(config, "m").assign(recorded, {})
    assert [(key.name, key.predicate) for key in keys[1:]] == [
        ("language=de", 'text.language = "de"'),
        ("first=1", 'text.turns = "1"'),
    ]
