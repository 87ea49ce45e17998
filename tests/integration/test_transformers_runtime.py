"""Language models in a folder: what is refused, and what a template makes of a chat."""

import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, trainers

from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.models.language.free_running_answer import FreeAnswer, FreeAnswerOutcome, FreeAnswerRequest
from quantdrift.models.language.scoring import (
    ANSWER,
    PROMPT,
    REQUEST,
    SCORES,
    UNKNOWN,
    ScoringRequest,
    TokenRow,
    objects,
)
from quantdrift.models.language.unlikely import unlikely_tokens
from quantdrift.models.runtimes.registry import open_reference
from tests.support.shadow.language_models import loaded, opening
from tests.support.shadow.score_streams import scored

pytestmark = pytest.mark.integration

SAID = ({"role": "user", "content": "what drifts?"},)


@pytest.fixture
def folder(language_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the model's folder, to be spoilt."""
    return Path(shutil.copytree(language_folder, tmp_path / "copy"))


def _configured(folder: Path, **members: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))


def _stored(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_pickle_is_not_loaded(folder: Path) -> None:
    """It is code."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(OperatorError, match=r"pytorch_model\.bin"):
        open_reference(opening(folder))


def test_code_of_its_own_is_not_run(folder: Path) -> None:
    """Nor asked for."""
    _configured(folder, auto_map={"AutoModelForCausalLM": "own.Model"})
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(OperatorError, match="auto_map"):
        open_reference(opening(folder))


def test_what_is_quantised_is_no_reference(folder: Path) -> None:
    """It says so itself."""
    _configured(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(OperatorError, match="itself quantised"):
        open_reference(opening(folder))


def test_a_parent_in_bfloat16_must_be_named(folder: Path) -> None:
    """It is computed in float32 all the same, and recorded."""
    _stored(folder, lambda stored: {name: one.bfloat16() for name, one in stored.items()})
    _configured(folder, dtype="bfloat16")
    with pytest.raises(OperatorError, match="bfloat16"):
        open_reference(opening(folder))
    runtime = open_reference(opening(folder, reference={"allow_reduced_precision": ("bfloat16",)}))
    assert "bfloat16" in runtime.artefact.precision
    (scores,) = scored(runtime, ScoringRequest(messages=SAID, served="the mean"))
    assert np.isfinite(scores.logprobs).all()


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    """`transformers` itself would go on with random ones."""
    _stored(folder, lambda stored: {k: v for k, v in stored.items() if "layers.1.mlp.up" not in k})
    with pytest.raises(OperatorError, match="would be random"):
        open_reference(opening(folder))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"]
)
def test_the_digest_is_that_of_everything_that_is_read(folder: Path, name: str) -> None:
    """Weights, tokenizer, template and configuration; a pin refuses any other."""
    digest = open_reference(opening(folder)).artefact.digest
    assert open_reference(opening(folder, reference={"digest": f"sha256:{digest}"})).artefact.digest == digest
    (folder / "README.md").write_text("not read")
    assert open_reference(opening(folder)).artefact.digest == digest
    path = folder / name
    if name.endswith(".safetensors"):
        _stored(folder, lambda stored: {key: one * 1.01 for key, one in stored.items()})
    else:
        path.write_text(path.read_text() + "\n")
    with pytest.raises(OperatorError, match="pins"):
        open_reference(opening(folder, reference={"digest": f"sha256:{digest}"}))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """With what is to be there."""
    with pytest.raises(OperatorError, match="save_pretrained"):
        open_reference(opening(tmp_path / "nowhere"))


def test_a_chat_is_made_by_the_tokenizers_template(language_folder: Path) -> None:
    """Texts give what their tokens give; tools and arguments of the template count."""
    _, tokenizer = loaded(language_folder)
    runtime = open_reference(opening(language_folder))
    prompt = "<s>user: what drifts?</s><s>assistant: "
    ids = tuple(tokenizer(prompt)["input_ids"])
    served = tuple(tokenizer("the mean")["input_ids"])
    parts = ({"role": "user", "content": [{"type": "text", "text": "what drifts?"}]},)
    tool = {"type": "function", "function": {"name": "find"}}
    chat, of_parts, of_ids, other, with_tool = scored(
        runtime,
        ScoringRequest(messages=SAID, served="the mean"),
        ScoringRequest(messages=parts, served="the mean"),
        ScoringRequest(prompt_ids=ids, served_ids=served),
        ScoringRequest(messages=SAID, template={"add_generation_prompt": False}, served="the mean"),
        ScoringRequest(messages=SAID, tools=(tool,), served="the mean"),
    )
    np.testing.assert_allclose(chat.logprobs, of_ids.logprobs, atol=1e-5)
    np.testing.assert_allclose(of_parts.logprobs, of_ids.logprobs, atol=1e-5)
    assert np.abs(other.logprobs - chat.logprobs).max() > 1e-3
    assert np.abs(with_tool.logprobs - chat.logprobs).max() > 1e-3


@pytest.mark.parametrize(
    "asked",
    [
        ScoringRequest(messages=({"role": "user", "content": [{"type": "image_url"}]},), served="a"),
        ScoringRequest(messages=SAID, template={"chat_template_kwargs": {"tokenize": False}}, served="a"),
        ScoringRequest(prompt="", served="a"),
    ],
    ids=["an image", "an argument of ours", "no prompt"],
)
def test_what_the_model_cannot_read_is_refused(language_folder: Path, asked: ScoringRequest) -> None:
    """As a replay error of that exchange alone."""
    with pytest.raises(QuarantineError, match="replay"):
        scored(open_reference(opening(language_folder)), asked)


def test_served_tokens_that_are_another_text_are_refused(language_folder: Path) -> None:
    """Each exchange until one agrees: a candidate with another vocabulary is never compared, and afterwards nothing is asked."""
    runtime = open_reference(opening(language_folder))
    _, tokenizer = loaded(language_folder)
    text = "You may obtain a copy of the License at"
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    other = tuple(reversed(ids[1:])) + tuple(range(40, 60))

    def asked(served_ids: tuple[int, ...], served: str = text) -> ScoringRequest:
        return ScoringRequest(prompt="of", served=served, served_ids=served_ids)

    for _ in range(2):
        with pytest.raises(QuarantineError, match="tokenizer: the tokens of the answer are another text"):
            scored(runtime, asked(other))
    scored(runtime, asked(other[:7]))  # too few to say anything
    scored(runtime, asked((*other, *ids)))  # the server has left out what was said first
    scored(runtime, asked(other))
    runtime.close()
    runtime = open_reference(opening(language_folder))
    scored(runtime, asked((*ids, *ids), text + " the"))  # a stop has taken the rest
    with pytest.raises(QuarantineError, match="tokenizer: a token id is not below"):
        scored(runtime, ScoringRequest(prompt="of", served="a", served_ids=(10**6,)))
    with pytest.raises(QuarantineError, match="tokenizer: the candidate made 7 tokens of the prompt"):
        scored(runtime, ScoringRequest(prompt="of", served="a", n_prompt_tokens=7))
    runtime.close()


def _prepending() -> Any:
    """Return a tokenizer that puts a space before any text, as those of Llama 2 and Mistral do."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    from transformers import PreTrainedTokenizerFast

    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[*"\n▁abcdefghijklmnopqrstuvwxyz"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["relay", "forwards", "relay", "forwards"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_a_space_that_a_tokenizer_prepends_is_not_doubled(language_folder: Path, tmp_path: Path) -> None:
    """An answer goes on where its prompt ends: together they are the tokens of the whole."""
    from examples.generation.make import save

    model, _ = loaded(language_folder)
    tokenizer = _prepending()
    runtime = open_reference(opening(save(tmp_path / "prepending", model, tokenizer)))
    whole = tokenizer("a relay forwards")["input_ids"]
    n_prompt = len(tokenizer("a relay")["input_ids"])
    (scores,) = scored(runtime, ScoringRequest(prompt="a relay", served=" forwards"))
    assert scores.ids == tuple(whole[n_prompt:])


def test_a_uniform_model_is_as_likely_everywhere(language_folder: Path, tmp_path: Path) -> None:
    """Each token costs the logarithm of the vocabulary."""
    from examples.generation.make import save

    model, tokenizer = loaded(language_folder)
    torch.nn.init.zeros_(model.lm_head.weight)
    runtime = open_reference(opening(save(tmp_path / "uniform", model, tokenizer)))
    (scores,) = scored(runtime, ScoringRequest(prompt="a", served=" relay and a detector"))
    np.testing.assert_allclose(scores.logprobs, -math.log(model.config.vocab_size), rtol=1e-6)
    assert set(scores.ranks) == {1.0}


@pytest.mark.parametrize("bound", ["logits", "tokens"])
def test_rows_that_do_not_fit_together_are_computed_apart(
    language_folder: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Memory for layers and logits is bounded, and the scores are the same, in the same order."""
    asked = [ScoringRequest(prompt="a" * n, served=" relay" * n) for n in (1, 5, 2, 9)]
    together = scored(open_reference(opening(language_folder)), *asked)
    if bound == "logits":
        monkeypatch.setattr("quantdrift.models.runtimes.text.transformers._LOGITS_BYTES", 1)
    monkeypatch.setattr("quantdrift.models.runtimes.text.transformers._POSITIONS", 2)
    most = 1 if bound == "tokens" else 1000
    apart = scored(open_reference(opening(language_folder, batch_tokens=most)), *asked)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_without_memory_fewer_are_tried_and_have_room(language_folder: Path) -> None:
    """What the failed call had computed is gone before the next one, of scores and of own answers.

    It would be there for as long as the error: on a GPU halves would find no more room than the whole.
    """
    from quantdrift.models.runtimes.text.transformers import TransformersLanguage

    language = TransformersLanguage(opening(language_folder))
    held: list[weakref.ref[torch.Tensor]] = []

    def hungry(_: torch.nn.Module, __: Any, logits: torch.Tensor) -> None:
        held.append(weakref.ref(logits))
        torch.empty(len(logits) ** 20)  # of four more than any machine has

    language._model.lm_head.register_forward_hook(hungry)
    rows = [TokenRow(prompt=(0, 5), served=(7, 8))] * 4
    with pytest.raises(QuarantineError, match="memory") as caught:
        language.score(rows)
    assert [one() for one in held] == [None]
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert len(language.score(rows[:2])) == 2
    language._model.lm_head.register_forward_hook(lambda *_: torch.empty(4**20))
    own = FreeAnswerRequest(max_tokens=2, is_capped=True, options={"temperature": 0}, seed=3)
    with pytest.raises(QuarantineError, match="memory") as caught:
        language.answer(ScoringRequest(), own, lambda: (0, 5), within_s=60.0)
    assert [one() for one in held] == [None] * 3
    assert caught.value.__cause__ is caught.value.__context__ is None
    language.close()


def _own(folder: Path, max_tokens: int = 16, seed: int = 3, **options: Any) -> FreeAnswer:
    runtime = open_reference(opening(folder))
    wanted = FreeAnswerRequest(max_tokens=max_tokens, is_capped=True, options=options, seed=seed)
    (scores,) = scored(runtime, ScoringRequest(messages=SAID, served="a", free_answer=wanted))
    runtime.close()
    assert scores.free_answer is not None
    return scores.free_answer


def test_an_own_answer_is_sampled_as_the_client_asked(language_folder: Path) -> None:
    """By its seed, else by the exchange's; the likeliest token where there is no choice."""
    greedy = _own(language_folder, temperature=0)
    assert _own(language_folder, temperature=1.0, top_k=1) == greedy
    assert _own(language_folder, temperature=1.0, top_p=1e-6) == greedy
    sampled = _own(language_folder)
    assert _own(language_folder) == sampled
    assert sampled.text != greedy.text
    others = [_own(language_folder, seed=4), _own(language_folder, seed=3)]
    assert [one == sampled for one in others] == [False, True]
    assert _own(language_folder, temperature=1.0, seed=9) != sampled
    before = torch.get_rng_state()
    _own(language_folder)
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's draws change


def test_an_own_answer_ends_where_the_client_said(language_folder: Path) -> None:
    """Before a sequence, at a token, or not too early."""
    whole = _own(language_folder, temperature=0)
    stop = whole.text[5]
    stopped = _own(language_folder, temperature=0, stop=[stop, "never there"])
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert stopped.n_tokens is not None
    assert 0 < stopped.n_tokens < 16
    _, tokenizer = loaded(language_folder)
    ids = tokenizer(whole.text)["input_ids"]
    assert _own(language_folder, temperature=0, stop_token_ids=ids[:1]).n_tokens == 1
    later = _own(language_folder, temperature=0, stop_token_ids=ids[:1], min_tokens=2)
    assert later.n_tokens is not None
    assert later.n_tokens > 1


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({"logit_bias": {"1": 5}}, FreeAnswerOutcome.UNABLE),
        ({"presence_penalty": 0.5}, FreeAnswerOutcome.UNABLE),
        ({"presence_penalty": 0, "repetition_penalty": 1.3}, FreeAnswerOutcome.DONE),
        ({"tool_choice": "required"}, FreeAnswerOutcome.UNABLE),
        ({"guided_regex": "a"}, FreeAnswerOutcome.UNABLE),
        ({"response_format": {"type": "json_object"}}, FreeAnswerOutcome.UNFORCED),
        ({"guided_json": {"type": "object"}}, FreeAnswerOutcome.UNFORCED),
        ({"guided_json": {"type": "object"}, "ignore_eos": True}, FreeAnswerOutcome.UNABLE),
    ],
)
def test_what_a_folder_cannot_do_is_left_out(
    language_folder: Path, options: dict[str, Any], outcome: FreeAnswerOutcome
) -> None:
    """It has no grammar: of JSON it tells what the reference says of itself."""
    assert _own(language_folder, temperature=0, **options).outcome is outcome


def test_what_a_client_names_not_is_the_folders(folder: Path) -> None:
    """As servers take it from there; what it names goes first. The ends are the folder's, too."""
    path = folder / "generation_config.json"
    told = json.loads(path.read_text())
    greedy = _own(folder, temperature=0)
    path.write_text(json.dumps({**told, "do_sample": True, "temperature": 0.7, "top_k": 1}))
    assert _own(folder) == greedy
    assert _own(folder, top_k=50, temperature=5.0) != greedy
    path.write_text(json.dumps({**told, "repetition_penalty": 5.0}))
    assert _own(folder, temperature=0) != greedy
    assert _own(folder, temperature=0, repetition_penalty=1.0) == greedy
    _, tokenizer = loaded(folder)
    first = tokenizer(greedy.text)["input_ids"][0]
    path.write_text(json.dumps({**told, "eos_token_id": [1, first]}))
    assert (_own(folder, temperature=0).n_tokens, _own(folder, temperature=0).finish_reason) == (1, "stop")


def test_whether_an_own_answer_calls_a_tool_is_known_where_the_template_says_how(
    language_folder: Path, tmp_path: Path
) -> None:
    """It was not trained to call: with tools it calls none, or nothing is known of that. Without tools there is nothing to call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    found = []
    for marker in ("", "{# <tool_call> #}"):
        folder = shutil.copytree(language_folder, tmp_path / f"model{bool(marker)}")
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text() + marker)
        runtime = open_reference(opening(folder))
        own = FreeAnswerRequest(max_tokens=200, is_capped=True, options={"temperature": 0}, seed=3)
        for tools in ((), (tool,)):
            asked = ScoringRequest(messages=SAID, tools=tools, served="a", free_answer=own)
            (scores,) = scored(runtime, asked)
            assert scores.free_answer is not None
            assert scores.free_answer.finish_reason == "stop"
            found.append(scores.free_answer.calls)
        runtime.close()
    assert found == [(), None, (), ()]


def test_an_own_answer_that_takes_too_long_is_broken_off(language_folder: Path) -> None:
    """A part of it tells nothing."""
    from quantdrift.models.runtimes.text.transformers import TransformersLanguage

    language = TransformersLanguage(opening(language_folder))
    wanted = FreeAnswerRequest(max_tokens=200, is_capped=True, options={"temperature": 0}, seed=3)
    own = language.answer(ScoringRequest(), wanted, lambda: (0, 5), within_s=1e-6)
    assert own == FreeAnswer(outcome=FreeAnswerOutcome.LATE)
    language.close()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_unlikely_tokens_are_found_among_all_tokens(language_folder: Path, temperature: float) -> None:
    """As from a list of the whole vocabulary."""
    request = opening(language_folder)
    generation = msgspec.structs.replace(request.model.generation, top=100_000)
    request = msgspec.structs.replace(
        request, model=msgspec.structs.replace(request.model, generation=generation)
    )
    runtime = open_reference(request)
    asked = ScoringRequest(prompt_ids=(0, 5, 9), served_ids=(7, 30, 200, 4), temperature=temperature)
    (scores,) = scored(runtime, asked)
    runtime.close()
    assert len(scores.unlikely) == 4
    listed = unlikely_tokens(msgspec.structs.replace(scores, unlikely=UNKNOWN), temperature)
    assert scores.unlikely == pytest.approx(listed, abs=1e-6)


_CALLING = (
    "{% for message in messages %}<s>{{ message['role'] }}:{% if message['reasoning_content'] %} think {{ message['reasoning_content'] }} "
    "so{% endif %} {{ message['content'] }}{% for call in message['tool_calls'] or [] %} call {{ call['function']['name'] }} "
    "{{ call['function']['arguments'] | tojson }}{% endfor %}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
_CALLED = {"id": "c", "type": "function", "function": {"name": "measure", "arguments": '{"at":  "home"}'}}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "", "tool_calls": [_CALLED]}, ' call measure {"at": "home"}'),
        ({"content": "the mean", "reasoning_content": "a drift"}, "think a drift so the mean"),
    ],
    ids=["a call", "reasoning"],
)
def test_an_answer_that_was_taken_apart_is_rendered(folder: Path, message: dict[str, Any], text: str) -> None:
    """By the template, as the next turn would show it: with the end if the model ended it, and without what the template writes behind."""
    (folder / "chat_template.jinja").write_text(_CALLING)
    runtime = open_reference(opening(folder))
    said = {"role": "assistant", **message}
    _, tokenizer = loaded(folder)
    prompt = tokenizer.apply_chat_template(list(SAID), add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(
        [*SAID, {**said, "tool_calls": [{"function": {"name": "measure", "arguments": {"at": "home"}}}]}]
        if "tool_calls" in said
        else [*SAID, said],
        return_dict=False,
    )
    end = tokenizer.eos_token_id
    ids = tuple(whole[len(prompt) : whole.index(end, len(prompt))])
    assert tokenizer.decode(ids).strip() == text.strip()
    for is_ended, wanted in ((True, (*ids, end)), (False, ids)):
        rendered, known = scored(
            runtime,
            ScoringRequest(messages=SAID, served_message=said, is_ended=is_ended),
            ScoringRequest(messages=SAID, served_ids=wanted, is_ended=is_ended),
        )
        assert rendered.ids == wanted
        np.testing.assert_allclose(rendered.logprobs, known.logprobs, atol=1e-5)
    runtime.close()


def test_the_vector_of_a_prompt_is_its_last_hidden_state(language_folder: Path) -> None:
    """Whatever was answered, with what is shared as without, and also where no token of the answer is known."""
    prompts = [tuple(range(5, 25)), tuple(range(5, 40)), tuple(range(5, 25))]
    requests = [ScoringRequest(prompt_ids=prompt, served_ids=(7, 8)) for prompt in prompts[:2]]
    requests.append(ScoringRequest(prompt_ids=prompts[2]))
    inputs = {name: objects(["", "", ""]) for name in ("prompt", "answer")} | {"request": objects(requests)}
    runtime = open_reference(opening(language_folder, embedding="prompt_state"))
    found = [runtime.run(inputs)["prompt_state"] for _ in range(2)]
    runtime.close()
    assert [spec.name for spec in runtime.outputs] == ["scores", "prompt_state"]
    model, _ = loaded(language_folder)
    with torch.inference_mode():
        states = [
            model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
            for prompt in prompts
        ]
    for vectors in found:
        np.testing.assert_allclose(vectors, np.stack(states), atol=1e-4)


def test_a_gguf_file_is_a_reference_and_a_copy(tmp_path: Path) -> None:
    """In F32 it has the scores of the folder that it was made of, its chat template too; one of 4 bits is a copy, and no reference."""
    from quantdrift.demo.text.model import FULL, REFERENCE, REPAIRED, TextSize, build

    build(tmp_path, 1, lambda _: None, TextSize(steps=2, vocabulary=512))
    (tmp_path / "generation_config.json").write_text("{ not read")
    asked = ScoringRequest(
        messages=({"role": "user", "content": "Was ist die Hauptstadt von Peru?"},),
        served="Die Hauptstadt ist Lima.",
    )
    found = {}
    for name, is_copy in ((REFERENCE, False), (FULL, False), (REPAIRED, True)):
        runtime = open_reference(msgspec.structs.replace(opening(tmp_path / name), is_copy=is_copy))
        inputs = {PROMPT: objects([""]), ANSWER: objects([""]), REQUEST: objects([asked])}
        found[name] = runtime.run(inputs)[SCORES][0]
    assert found[REFERENCE].ids == found[FULL].ids == found[REPAIRED].ids
    np.testing.assert_allclose(found[FULL].logprobs, found[REFERENCE].logprobs, atol=1e-5)
    assert 1e-4 < np.abs(found[REPAIRED].logprobs - found[REFERENCE].logprobs).max() < 1
    with pytest.raises(OperatorError, match=r"not full precision: stored tensor `token_embd.weight` is q4_0"):
        open_reference(opening(tmp_path / REPAIRED))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(OperatorError, match=r"cannot be read as GGUF|cannot load the reference"):
        open_reference(opening(tmp_path / "broken.gguf"))
