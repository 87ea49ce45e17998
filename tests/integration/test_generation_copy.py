"""A copy of the candidate that scores what was served, where the wire brings no log-probabilities."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from quantdrift.cli.main import main
from quantdrift.core.config.schema import CandidateCopy, Generation
from quantdrift.core.errors import OperatorError, QuarantineError, RetryError
from quantdrift.core.records import Exchange
from quantdrift.models.runtimes.protocol import replayed_by
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.models.runtimes.text.candidate_replica import open_with_replica
from quantdrift.models.tensors.codec import decode
from quantdrift.shadow.replay.references import is_remote
from quantdrift.shadow.replay.replay import Outcome, ReplayResult, compare_batch
from tests.integration.test_generation import CHAT, IDS, LISTS, chats
from tests.support.shadow.language_models import opening
from tests.support.shadow.openai_exchanges import prepared
from tests.support.shadow.vllm_like import VllmLike, serving

pytestmark = pytest.mark.integration

SCORED = "/v1/completions"


@pytest.fixture
def url(int8: VllmLike) -> Iterator[str]:
    """Return where a copy of that candidate is."""
    with serving(int8) as address:
        int8.asked.clear()
        yield address


@pytest.fixture(scope="module")
def int8_folder(language_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model's weights in INT8."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    folder = tmp_path_factory.mktemp("int8")
    quantise = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(language_folder, quantization_config=quantise).save_pretrained(
        folder
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((language_folder / name).read_bytes())
    return folder


def _told(
    folder: Path, top: int = 20, own_share: float = 0.0, own_tokens: int = 256, **copy: Any
) -> RuntimeRequest:
    configured = CandidateCopy(**{"versions": ("int8",), "model": "digits" if "url" in copy else "", **copy})
    return opening(
        folder, reference={"copy": configured}, top=top, own_share=own_share, own_tokens=own_tokens
    )


def _outcomes(exchanges: Sequence[Exchange], told: RuntimeRequest) -> list[Outcome]:
    runtime = open_with_replica(told)
    try:
        batch = [prepared(one, told.model, runtime) for one in exchanges]
        return compare_batch(batch, most_items=len(exchanges))
    finally:
        runtime.close()


def _compared(exchanges: Sequence[Exchange], told: RuntimeRequest) -> list[ReplayResult]:
    outcomes = _outcomes(exchanges, told)
    assert all(isinstance(one, ReplayResult) for one in outcomes), outcomes
    return [one for one in outcomes if isinstance(one, ReplayResult)]


def _column(found: Sequence[ReplayResult], name: str) -> Any:
    return np.concatenate([one.divergences.detail[name] for one in found])


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(IDS, marks=pytest.mark.release),
        {},
        pytest.param({"temperature": 1}, marks=pytest.mark.release),
    ],
    ids=["ids", "text", "sampled"],
)
def test_a_copy_of_the_reference_does_not_diverge(
    language_folder: Path, fp32: VllmLike, more: dict[str, Any]
) -> None:
    """However the tokens are told, and of answers that were sampled too."""
    with serving(fp32) as address:
        found = _compared(chats(fp32, **more), _told(language_folder, url=address))
    np.testing.assert_allclose(_column(found, "kl"), 0, atol=1e-6)
    assert not np.concatenate([one.divergences.flip for one in found]).any()
    assert set(_column(found, "logprobs")) == {"copy"}
    assert set(_column(found, "measure")) == {"kl"}
    np.testing.assert_array_equal(_column(found, "same_top1"), 1.0)
    np.testing.assert_array_equal(_column(found, "candidate_top1"), 1.0)
    np.testing.assert_allclose(_column(found, "perplexity_ratio"), 1.0, atol=1e-4)


def test_a_quantised_copy_diverges_by_what_the_two_models_say(
    language_folder: Path, int8: VllmLike, fp32: VllmLike, url: str
) -> None:
    """KL, the likeliest tokens and the ratio of perplexities are those of both models, asked directly."""
    exchanges = chats(int8, **IDS)
    n_tokens = len(fp32.places([0, 1])[1])
    found = _compared(exchanges, _told(language_folder, top=n_tokens, url=url))
    for one, of in zip(exchanges, found, strict=True):
        prompt, served = _ids(one)
        p, q = (_logprobs(model.places(prompt + served)[len(prompt) :]) for model in (fp32, int8))
        _same(of, p, q, served)


@pytest.mark.release
def test_a_quantised_folder_is_a_copy_and_no_reference(
    language_folder: Path, int8_folder: Path, fp32: VllmLike, int8: VllmLike
) -> None:
    """Its weights stay in INT8, and what it says is what `transformers` says of it."""
    from transformers import AutoModelForCausalLM

    with pytest.raises(OperatorError, match="itself quantised"):
        open_reference(opening(int8_folder))
    exchanges = chats(int8, **IDS)
    n_tokens = len(fp32.places([0, 1])[1])
    found = _compared(exchanges, _told(language_folder, top=n_tokens, path=str(int8_folder)))
    model = AutoModelForCausalLM.from_pretrained(int8_folder)
    assert "Int8" in type(model.model.layers[0].mlp.up_proj.weight).__name__
    for one, of in zip(exchanges, found, strict=True):
        prompt, served = _ids(one)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + served])).logits[0, len(prompt) - 1 : -1]
        p = _logprobs(fp32.places(prompt + served)[len(prompt) :])
        _same(of, p, torch.log_softmax(logits.double(), dim=-1).numpy(), served)


def _ids(one: Exchange) -> tuple[list[int], list[int]]:
    tensors = {tensor.name: decode(tensor).tolist() for tensor in one.outputs}
    return tensors["prompt_token_ids"], tensors["token_ids.0"]


def _logprobs(places: Sequence[dict[int, tuple[float, int]]]) -> Any:
    return np.array([[place[token][0] for token in range(len(place))] for place in places])


def _same(found: ReplayResult, p: Any, q: Any, served: Sequence[int]) -> None:
    detail = {name: column[0] for name, column in found.divergences.detail.items()}
    kl = float((np.exp(p) * (p - q)).sum(axis=1).mean())
    assert kl > 1e-6
    assert detail["kl"] == found.divergences.divergence[0] == pytest.approx(kl, rel=1e-3, abs=1e-6)
    ours, theirs = (side >= side.max(axis=1, keepdims=True) - Generation().tie for side in (p, q))
    turns = ~(ours & theirs).any(axis=1)
    assert detail["same_top1"] == pytest.approx(1 - turns.mean())
    assert bool(found.divergences.flip[0]) == turns.any()
    if turns.any():
        assert detail["first_change"] == turns.argmax()
    ratio = np.exp(np.mean([b[token] - a[token] for a, b, token in zip(p, q, served, strict=True)]))
    assert detail["perplexity_ratio"] == pytest.approx(ratio, rel=1e-4)


def test_log_probabilities_that_were_served_go_first(language_folder: Path, int8: VllmLike, url: str) -> None:
    """The copy is not even asked about them; beside others it is asked about those alone."""
    on_wire, without = chats(int8, **LISTS, **IDS), chats(int8, **IDS)
    alone = _compared(on_wire, opening(language_folder))
    int8.asked.clear()
    found = _compared([on_wire[0], without[1], on_wire[2]], _told(language_folder, url=url))
    assert _column(found, "logprobs").tolist() == ["wire", "copy", "wire"]
    for index in (0, 2):
        assert found[index].divergences.divergence[0] == pytest.approx(
            alone[index].divergences.divergence[0], rel=1e-3
        )
    probe, asked = (body["prompt"] for path, body in int8.asked if path == SCORED)
    assert (len(probe), len(asked)) == (1, 1)


def test_a_copy_gives_no_figures_for_another_version(language_folder: Path, int8: VllmLike, url: str) -> None:
    """Its KL would be that of a model that served nobody."""
    found = _compared(chats(int8, **IDS), _told(language_folder, url=url, versions=("int8-2*",)))
    assert set(_column(found, "logprobs")) == {"unavailable"}
    assert set(_column(found, "measure")) == {"regret"}


@pytest.mark.release
def test_a_copy_that_is_away_is_waited_for(language_folder: Path, int8: VllmLike) -> None:
    """At the start and later, as a reference is; answers that need no copy go on."""
    on_wire, without = chats(int8, **LISTS), chats(int8)
    with serving(int8) as address:
        told = _told(language_folder, url=address)
        runtime = open_with_replica(told)
        batch = [prepared(one, told.model, runtime) for one in without]
        int8.fails = [503]
        with pytest.raises(RetryError, match="503"):
            compare_batch(batch, most_items=8)
        assert all(isinstance(one, ReplayResult) for one in compare_batch(batch, most_items=8))
    with pytest.raises(RetryError, match=r"candidate's replica.*is away"):
        open_with_replica(told)
    entry = prepared(on_wire[0], told.model, runtime)
    assert isinstance(compare_batch([entry], most_items=8)[0], ReplayResult)
    runtime.close()


def test_what_a_copy_refuses_is_set_aside_alone(language_folder: Path, int8: VllmLike, url: str) -> None:
    """As what a reference refuses."""
    first, *others = chats(int8)
    far = msgspec.structs.replace(first, outputs=tuple(_of_other_tokens(tensor) for tensor in first.outputs))
    outcomes = _outcomes([far, *others], _told(language_folder, url=url))
    assert isinstance(outcomes[0], QuarantineError)
    assert "made 1 tokens of the prompt" in outcomes[0].detail
    assert all(isinstance(one, ReplayResult) for one in outcomes[1:])


def _of_other_tokens(tensor: Any) -> Any:
    if tensor.name != "usage":
        return tensor
    return msgspec.structs.replace(tensor, data=np.array([1, 24], dtype=np.int64).tobytes())


def test_a_copy_gives_no_answer_of_its_own(language_folder: Path, int8: VllmLike, url: str) -> None:
    """The reference does."""
    told = _told(language_folder, url=url, own_share=1.0, own_tokens=4)
    found = _compared(chats(int8), told)
    assert set(_column(found, "own")) == {"done"}
    int8.asked = [(path, body) for path, body in int8.asked if path in {CHAT, SCORED}]
    assert all("prompt_logprobs" in body for path, body in int8.asked if "prompt" in body)
    assert sum(path == CHAT for path, _ in int8.asked) == len(found)  # what the client asked


@pytest.mark.release
def test_a_check_of_references_opens_the_copy_too(
    language_folder: Path, int8_folder: Path, tmp_path: Path
) -> None:
    """And tells its digest; a pickle is no copy either."""
    path = tmp_path / "config.toml"
    path.write_text(
        '[[models]]\nname = "digits"\ntask = "generation"\n[[models.references]]\nruntime = "transformers"\n'
        f'path = "{language_folder}"\n[models.references.copy]\nversions = ["int8"]\npath = "copy"\n'
    )
    check = ["config", "check", "--references", "--config", str(path)]
    copy = shutil.copytree(int8_folder, tmp_path / "copy")
    ran = CliRunner().invoke(main, check)
    assert ran.exit_code == 0, ran.output
    assert "float32" in ran.output
    assert "unverified" in ran.output
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    ran = CliRunner().invoke(main, check)
    assert ran.exit_code == 2
    assert "[models.references.copy]" in str(ran.output) + str(ran.exception)


def test_the_database_names_the_copy(language_folder: Path, int8_folder: Path, fp32: VllmLike) -> None:
    """Its digest, its precision as it is told, and what computed it, beside the reference's own."""
    runtime = open_with_replica(_told(language_folder, path=str(int8_folder), precision="int8 weights"))
    told, own = replayed_by(runtime), open_reference(opening(language_folder)).artefact
    assert (told.digest, told.precision) == (own.digest, "float32")
    assert len(told.copy) == 64
    assert told.copy != told.digest
    assert (told.copy_precision, told.copy_runtime.split()[0]) == ("int8 weights", "transformers")
    runtime.close()
    with serving(fp32) as address:
        remote = _told(language_folder, url=address)
        runtime = open_with_replica(remote)
    assert is_remote(remote.model)  # what waits for it holds up no other model
    assert replayed_by(runtime).copy_precision == "unverified"
    runtime.close()
    assert b"copy" not in msgspec.json.encode(replayed_by(open_reference(opening(language_folder))))
