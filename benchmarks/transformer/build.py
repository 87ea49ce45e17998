"""Train the head, export, quantise and answer: `python -m benchmarks.transformer.build`.

On the transformer's embeddings a linear head is trained that tells which of six packages a passage is about. Embedding
and head are one ONNX graph:

- FP32, the reference, replayed by the shadow's own runtime in batches;
- `int8-1`, ONNX Runtime's dynamic quantisation with one scale per column of a weight matrix, served one passage at a time;
- `int8-2`, a build that lost the setting `per_channel`: one scale per matrix, which is the default;
- `int8-3`, the weights of `int8-1` behind a server whose engine was built for 128 tokens and drops the rest.
"""

import argparse
import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.transformer.answers import (
    ANSWERS,
    CURRENT,
    CUT,
    CUT_TOKENS,
    MODEL,
    PACKAGES,
    REBUILT,
    REFERENCE,
)
from benchmarks.transformer.passages import AREAS, Form, Passage, gather

MOST_TOKENS = 512
_SEED = 7
_TRAINED_ON = {Form.SENTENCE: 900, Form.SECTION: 600}
_TRAFFIC = {Form.SENTENCE: 1200, Form.SECTION: 900, Form.LONG: 360, Form.CODE: 600, Form.ENCODED: 600}
_BATCH = 8
_INPUTS = ("input_ids", "attention_mask")
Tokens = list[list[int]]


def build(packages: Path, out: Path) -> None:
    """Do all of it in this process, whose path `packages` is added to."""
    sys.path.append(str(packages))  # last: what the project has goes first
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    out.mkdir(parents=True, exist_ok=True)
    learnt, traffic = gather_both()
    words = Words(packages / MODEL / "model")
    _say("train the head on FP32 embeddings")
    network = network_of(packages / MODEL / "model")
    _train_head(network, words, learnt)
    _say("export and quantise")
    models = {name: out / f"{name}.onnx" for name in (REFERENCE, CURRENT, REBUILT)}
    export(network, words.of(["a passage", "and another one"]), models[REFERENCE], output="logits")
    _quantise(models)
    for form in Form:
        passages = [passage for passage in traffic if passage.form is form]
        _say(f"answer {len(passages)} passages of form {form}")
        tokens = words.of([passage.text for passage in passages])
        logits = {REFERENCE: _replayed(models[REFERENCE], tokens)}
        logits |= {version: _served(models[version], tokens) for version in (CURRENT, REBUILT)}
        logits[CUT] = _cut(models[CURRENT], tokens, logits[CURRENT])
        truth = np.array([passage.area for passage in passages])
        right = {name: float((values.argmax(axis=1) == truth).mean()) for name, values in logits.items()}
        _say("  right: " + ", ".join(f"{name} {share:.3f}" for name, share in right.items()))
        np.savez(
            out / f"{form}.npz",
            labels=truth,
            lengths=np.array([len(ids) for ids in tokens]),
            **logits,  # type: ignore[arg-type] # numpy's stub takes them for its own flag
        )


def gather_both() -> tuple[list[Passage], list[Passage]]:
    """Return the passages that the head learns from and those that are sent, no file in both."""
    counts = {form: max(_TRAINED_ON.get(form, 0), _TRAFFIC.get(form, 0)) for form in Form}
    learnt, traffic = gather(counts, seed=_SEED, n_parts=2)
    return _at_most(learnt, _TRAINED_ON), _at_most(traffic, _TRAFFIC)


def _at_most(passages: Iterable[Passage], n: dict[Form, int]) -> list[Passage]:
    left, kept = dict(n), []
    for passage in passages:
        if left.get(passage.form, 0):
            left[passage.form] -= 1
            kept.append(passage)
    return kept


class Words:
    """The model's own tokeniser."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = import_module("tokenizers").Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MOST_TOKENS)

    def of(self, texts: Sequence[str]) -> Tokens:
        """Return the token ids of each text."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]


def network_of(model: Path) -> Any:
    """Return the embedding with an untrained head."""
    import torch

    transformer = import_module("transformers").AutoModel.from_pretrained(model, attn_implementation="eager")

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = transformer
            self.head = torch.nn.Linear(transformer.config.hidden_size, len(AREAS))

        def embed(self, input_ids: Any, attention_mask: Any) -> Any:
            """Average the tokens and scale to length 1, as the model's cards say (1_Pooling, modules.json)."""
            hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=1)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.head(self.embed(input_ids, attention_mask))

    return Network().eval()


def _train_head(network: Any, words: Words, passages: Sequence[Passage]) -> None:
    import torch
    from sklearn.linear_model import LogisticRegression

    tokens = words.of([passage.text for passage in passages])
    vectors = np.empty((len(tokens), network.head.in_features), dtype=np.float32)
    with torch.no_grad():
        for places, ids, mask in batches(tokens):
            vectors[places] = network.embed(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    fit = LogisticRegression(C=10.0, max_iter=2000).fit(vectors, [passage.area for passage in passages])
    with torch.no_grad():
        network.head.weight.copy_(torch.from_numpy(fit.coef_.astype(np.float32)))
        network.head.bias.copy_(torch.from_numpy(fit.intercept_.astype(np.float32)))


def batches(
    tokens: Tokens,
) -> Iterable[tuple[npt.NDArray[np.intp], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield places, padded ids and mask of passages of like length together."""
    order = np.argsort([len(ids) for ids in tokens], kind="stable")
    for begin in range(0, len(order), _BATCH):
        places = order[begin : begin + _BATCH]
        longest = max(len(tokens[place]) for place in places)
        ids = np.zeros((len(places), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, place in enumerate(places):
            ids[row, : len(tokens[place])] = tokens[place]
            mask[row, : len(tokens[place])] = 1
        yield places, ids, mask


def export(network: Any, tokens: Tokens, path: Path, *, output: str) -> None:
    """Write a network of token ids and mask as an ONNX file; `tokens` are two or more texts of any kind."""
    import onnx
    import torch

    _, ids, mask = next(iter(batches(tokens)))
    items, length = torch.export.Dim("items"), torch.export.Dim("tokens", max=MOST_TOKENS)
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(
            network,
            (torch.from_numpy(ids), torch.from_numpy(mask)),
            str(path),
            input_names=list(_INPUTS),
            output_names=[output],
            dynamic_shapes=({0: items, 1: length}, {0: items, 1: length}),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    # What the exporter says of the shape of folded weights is that before folding; the quantiser checks it.
    model = onnx.load(path)
    del model.graph.value_info[:]
    onnx.save(model, path)


def _quantise(models: dict[str, Path]) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name, per_channel in ((CURRENT, True), (REBUILT, False)):
        quantize_dynamic(
            str(models[REFERENCE]), str(models[name]), per_channel=per_channel, weight_type=QuantType.QInt8
        )


def _replayed(path: Path, tokens: Tokens) -> npt.NDArray[np.float32]:
    """Return the reference's logits, (n, classes), as a shadow worker gets them: in batches."""
    from quantdrift.core.config.schema import Provider
    from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime

    runtime = OnnxRuntime(path, provider=Provider.CPU)
    logits = np.empty((len(tokens), len(AREAS)), dtype=np.float32)
    for places, ids, mask in batches(tokens):
        logits[places] = runtime.run(dict(zip(_INPUTS, (ids, mask), strict=True)))["logits"]
    return logits


def _served(path: Path, tokens: Tokens) -> npt.NDArray[np.float32]:
    """Return a candidate's logits, (n, classes), each passage served alone: its ranges are those of one request."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rows = []
    for ids in tokens:
        row = np.array([ids], dtype=np.int64)
        rows.append(session.run(["logits"], dict(zip(_INPUTS, (row, np.ones_like(row)), strict=True)))[0][0])
    return np.array(rows, dtype=np.float32)


def _cut(path: Path, tokens: Tokens, whole: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the logits where only the first tokens are read; `whole` are those of all of them."""
    logits = whole.copy()
    places = [place for place, ids in enumerate(tokens) if len(ids) > CUT_TOKENS]
    if places:
        logits[places] = _served(
            path, [[*tokens[place][: CUT_TOKENS - 1], tokens[place][-1]] for place in places]
        )
    return logits


def _say(text: str) -> None:
    print(f"... {text}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transformer.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--packages", type=Path, default=PACKAGES)
    parser.add_argument("--out", type=Path, default=ANSWERS)
    given = parser.parse_args()
    build(given.packages, given.out)
