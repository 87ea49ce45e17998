"""Chats with images: a reference at a server is sent them as the client did, any other is not."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quantdrift.core.config.schema import Medium, Reference, Runtime
from quantdrift.core.errors import OperatorError, QuarantineError, QuarantineReason
from quantdrift.core.records import Exchange
from quantdrift.models.language.from_exchange import scoring_inputs
from quantdrift.models.language.scoring import SCORES, tokens_read
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from tests.support.shadow.language_models import loaded, model_of, rounded
from tests.support.shadow.openai_exchanges import exchange, prepared
from tests.support.shadow.vllm_like import VllmLike, serving

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def png(shade: int) -> bytes:
    """Return a picture of noise around a shade."""
    from PIL import Image

    pixels = np.random.default_rng(shade).integers(shade, shade + 40, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def eyes(image: bytes) -> torch.Tensor:
    """Return the quarters of a picture as vectors as wide as the model : (4, width)."""
    from PIL import Image

    pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(image)), dtype=np.float32) / 255.0)
    side = pixels.shape[0] // 2
    quarters = pixels.unfold(0, side, side).unfold(1, side, side).reshape(4, -1)
    projection = torch.randn(quarters.shape[1], 64, generator=torch.Generator().manual_seed(5))
    return quarters @ projection / 20


def seeing(folder: Path, *, levels: int = 0) -> VllmLike:
    """Return a server of a model that reads images; with `levels` its weights are rounded."""
    model, tokenizer = loaded(folder)
    tokenizer.chat_template = TEMPLATE
    return VllmLike(rounded(model, levels) if levels else model, tokenizer, name="digits", eyes=eyes)


def asked(*shades: int, **more: Any) -> dict[str, Any]:
    """Return what a client asks about images."""
    urls = [f"data:image/png;base64,{base64.b64encode(png(shade)).decode()}" for shade in shades]
    parts = [
        {"type": "text", "text": "what drifts?"},
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
    ]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    return {"model": "digits", "messages": messages, "temperature": 0, "max_tokens": 12, **more}


def answered(server: VllmLike, question: dict[str, Any]) -> Exchange:
    """Return the exchange of a question."""
    status, answer = server.answer(CHAT, question)
    assert status == 200
    return exchange(CHAT, question, answer)


def opening(url: str, *media: Medium) -> RuntimeRequest:
    """Return what the runtime is told of a reference that reads these."""
    told = Reference(runtime=Runtime.OPENAI, url=url, model="digits", media=media, timeout_s=150.0)
    return RuntimeRequest(model=model_of(told), reference=told)


@pytest.fixture(scope="module")
def reference(language_folder: Path) -> VllmLike:
    """Return the server of the reference."""
    return seeing(language_folder)


@pytest.fixture
def told(reference: VllmLike) -> Iterator[RuntimeRequest]:
    """Return what the runtime is told of it."""
    with serving(reference) as url:
        yield opening(url, Medium.IMAGE)


def replayed(told: RuntimeRequest, *exchanges: Exchange) -> list[ReplayResult]:
    """Return what becomes of these exchanges."""
    runtime = open_reference(told)
    outcomes = compare_batch([prepared(one, told.model, runtime) for one in exchanges], most_items=9)
    runtime.close()
    assert all(isinstance(one, ReplayResult) for one in outcomes), outcomes
    return [one for one in outcomes if isinstance(one, ReplayResult)]


@pytest.mark.parametrize("more", [{"logprobs": True, "top_logprobs": 5, "return_token_ids": True}, {}])
def test_an_answer_about_an_image_is_scored(
    told: RuntimeRequest, reference: VllmLike, language_folder: Path, more: dict[str, Any]
) -> None:
    """The model does not differ from itself, one with rounded weights does; the same answer to another image is unlikely."""
    sound = [answered(reference, asked(*shades, **more)) for shades in ((20, 180), (120,))]
    damaged = answered(seeing(language_folder, levels=2), asked(20, 180, **more))
    of_image, of_other, of_damaged = replayed(told, *sound, damaged)
    for one in (of_image, of_other):
        assert one.divergences.detail["measure"] == ["kl" if more else "regret"]
        assert one.divergences.divergence == pytest.approx([0.0], abs=1e-5)
        assert one.divergences.flip.tolist() == [0.0]
        assert one.divergences.detail["n_scored"][0] >= 11
    assert of_damaged.divergences.divergence[0] > 0.05
    swapped = msgspec.structs.replace(sound[0], inputs=answered(reference, asked(200, 60, **more)).inputs)
    (of_swapped,) = replayed(told, swapped)
    assert of_swapped.divergences.detail["nll"][0] > of_image.divergences.detail["nll"][0] + 1e-3


def test_texts_and_images_go_in_one_batch(told: RuntimeRequest, reference: VllmLike) -> None:
    """Each in its place; the image travels as the client sent it, and its tokens count as read."""
    text = asked()
    text["messages"][1]["content"] = "what drifts?"
    exchanges = [answered(reference, question) for question in (text, asked(20), text)]
    reference.asked.clear()
    found = replayed(told, *exchanges)
    assert [one.divergences.divergence[0] for one in found] == pytest.approx([0.0] * 3, abs=1e-5)
    sent = [body for path, body in reference.asked if path == CHAT and len(body["messages"]) == 3]
    assert sent[-1]["messages"][1] == asked(20)["messages"][1]
    runtime = open_reference(told)
    (case,) = [prepared(exchanges[1], told.model, runtime)]
    outputs = runtime.run(case.inputs)
    runtime.close()
    assert (
        tokens_read(outputs)
        == len(outputs[SCORES][0].ids) + reference.answer(CHAT, asked(20))[1]["usage"]["prompt_tokens"]
    )


def test_what_a_client_did_not_count_is_counted_by_the_reference(
    told: RuntimeRequest, reference: VllmLike
) -> None:
    """A stream without usage: the length of the prompt is asked for. Another length is another template or image processor."""
    status, answer = reference.answer(CHAT, asked(20))
    assert status == 200
    (found,) = replayed(told, exchange(CHAT, asked(20), {**answer, "usage": None}))
    assert found.divergences.flip.tolist() == [0.0]
    usage = {**answer["usage"], "prompt_tokens": answer["usage"]["prompt_tokens"] - 4}
    runtime = open_reference(told)
    case = prepared(exchange(CHAT, asked(20), {**answer, "usage": usage}), told.model, runtime)
    (outcome,) = compare_batch([case], most_items=9)
    runtime.close()
    assert isinstance(outcome, QuarantineError)
    assert "image processors differ" in outcome.detail


def test_a_text_with_other_tokens_than_were_served_is_not_measured(
    told: RuntimeRequest, reference: VllmLike
) -> None:
    """As without an image; a template that renders a prompt otherwise once it is answered is refused."""
    status, answer = reference.answer(CHAT, asked(20, return_token_ids=True))
    assert status == 200
    answer["choices"][0]["token_ids"][3:5] = [7, 8, 9]
    (found,) = replayed(told, exchange(CHAT, asked(20), answer))
    assert (found.divergences.detail["measure"].tolist(), found.divergences.detail["n_scored"][0]) == (
        ["none"],
        12,
    )
    template = TEMPLATE.replace(
        "{{ message['role'] }}", "{{ message['role'] }}{{ '!' if messages[-1]['role'] == 'assistant' }}"
    )
    runtime = open_reference(told)
    question = asked(20)
    reference.template = template
    (outcome,) = compare_batch(
        [prepared(exchange(CHAT, question, {**answer, "usage": None}), told.model, runtime)], most_items=9
    )
    reference.template = TEMPLATE
    runtime.close()
    assert isinstance(outcome, QuarantineError)
    assert "renders a prompt otherwise" in outcome.detail


@pytest.mark.parametrize(
    ("part", "taken", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, (), r"\(image_url\), and the reference reads text only"),
        ({"type": "input_audio", "input_audio": {"data": "AA"}}, (Medium.IMAGE,), r"\(input_audio\), and the reference reads text and image only"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, (Medium.IMAGE,), r"by address \(image_url\), which is never fetched"),
        ({"type": "file", "file": {"file_data": "AA"}}, (Medium.IMAGE, Medium.AUDIO), r"\(file\)"),
    ],
)  # fmt: skip
def test_what_the_reference_does_not_read_is_set_aside(
    part: dict[str, Any], taken: tuple[Medium, ...], why: str
) -> None:
    """With a reason of its own, and without what was sent."""
    question = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    answer = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
    with pytest.raises(QuarantineError, match=why) as caught:
        scoring_inputs(exchange(CHAT, question, answer), media=taken)
    assert caught.value.reason is QuarantineReason.MEDIA
    assert "AA" not in caught.value.detail
    assert "example" not in caught.value.detail


def test_a_server_that_reads_no_images_is_refused_at_the_start(language_folder: Path) -> None:
    """Not exchange by exchange later."""
    blind = VllmLike(*loaded(language_folder), name="digits")
    with serving(blind) as url:
        with pytest.raises(OperatorError, match=r"a chat with image \(HTTP 400: At most 0 image"):
            open_reference(opening(url, Medium.IMAGE))
        open_reference(opening(url)).close()
