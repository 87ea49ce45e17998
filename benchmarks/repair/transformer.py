"""A sentence transformer of 132 sites that is damaged everywhere, and how much of it six sites restore.

all-MiniLM-L6-v2 is quantised by ONNX Runtime as its documentation says: matrix products, one scale for each column of a weight, ranges
from 64 sentences. It has no fault, and still half of its damage comes from the outputs of a few layers with very wide ranges. The
damage is 1 - cosine to the reference's vector, on sentences that neither calibrated nor diagnosed it.
"""

import itertools
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
from tokenizers import Tokenizer

from benchmarks.repair.network import reader_of
from benchmarks.repair.peers import ratios
from benchmarks.transformer.answers import MODEL, PACKAGES, install
from benchmarks.transformer.build import Words, export, network_of
from benchmarks.transformer.passages import Form, gather
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.comparators.vectors.embedding import EmbeddingComparator
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.sites import SiteKind, SwitchableCopy

_OUTPUT: Final = "vector"
_CALIBRATION, _SLICE, _OTHERS = 64, 400, 400
_TOKENS: Final = 32  # longer sentences are cut: some in ten
_BATCH: Final = 8
_SITES: Final = 6
_BUDGET: Final = 0.01
_SEED: Final = 3


def transformer_figures(packages: Path = PACKAGES) -> dict[str, float]:
    """Return the figures; none, with the reason on standard error, where the weights cannot be had."""
    if problem := install(packages):
        print(f"no transformer: {problem}", file=sys.stderr)
        return {}
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of the exporter
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _figures(packages / MODEL / "model", Path(folder))
    finally:
        logging.disable(logging.NOTSET)


def _figures(weights: Path, folder: Path) -> dict[str, float]:
    calibration, slice_, others = _sentences(weights)
    reference, candidate = folder / "fp32.onnx", folder / "int8.onnx"
    _write(weights, reference)
    _quantise(reference, candidate, calibration)
    comparator = EmbeddingComparator(neighbours=1, reservoir=1)

    def compare(served: Outputs, expected: Outputs) -> Divergences:
        return comparator.compare(served[_OUTPUT], expected[_OUTPUT])

    begin = time.monotonic()
    copy = SwitchableCopy(candidate, reference, threads=0)
    found = diagnose(copy, compare, slice_, budget=_BUDGET)
    seconds = time.monotonic() - begin
    names = [site.name for site in copy.sites]
    expected = copy.expected(others)

    def damage(restored: Sequence[int]) -> float:
        return float(compare(copy.run(others, restored), expected).divergence.mean())

    served = damage(())
    best = [names.index(name) for name in found.order[:_SITES]]
    few = {name: array[:_CALIBRATION] for name, array in slice_.items()}
    signal = {kind: ratios(copy, few, kind) for kind in SiteKind}
    loud = sorted({**signal[SiteKind.ACTIVATION], **signal[SiteKind.WEIGHT]}.items(), key=lambda one: one[1])
    return {
        "transformer_sites": float(len(names)),
        "transformer_damage": served,
        "transformer_named": float(len(found.blamed)),
        "transformer_restored": 1.0 - damage(best) / served,
        "transformer_ort_restored": 1.0 - damage([names.index(name) for name, _ in loud[:_SITES]]) / served,
        "transformer_s": seconds,
    }


def _sentences(weights: Path) -> list[dict[str, Array]]:
    """Return sentences to calibrate with, to diagnose on, and to judge on : (items, tokens) ids and masks."""
    words = Tokenizer.from_file(str(weights / "tokenizer.json"))
    words.enable_truncation(_TOKENS)
    words.enable_padding(length=_TOKENS)
    n_texts = _CALIBRATION + _SLICE + _OTHERS
    (passages,) = gather({Form.SENTENCE: 2 * n_texts}, seed=_SEED, n_parts=1)
    texts = list(dict.fromkeys(passage.text for passage in passages))[:n_texts]
    encoded = words.encode_batch(texts)
    every = {
        "input_ids": np.array([one.ids for one in encoded], np.int64),
        "attention_mask": np.array([one.attention_mask for one in encoded], np.int64),
    }
    ends = itertools.accumulate((_CALIBRATION, _SLICE, _OTHERS))
    begins = (0, _CALIBRATION, _CALIBRATION + _SLICE)
    return [
        {name: array[begin:end] for name, array in every.items()}
        for begin, end in zip(begins, ends, strict=True)
    ]


def _write(weights: Path, path: Path) -> None:
    network = network_of(weights)

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.network.embed(input_ids, attention_mask)

    export(Embedding().eval(), Words(weights).of(["a passage", "and another one"]), path, output=_OUTPUT)


def _quantise(reference: Path, candidate: Path, inputs: Mapping[str, Array]) -> None:
    batches = (
        {name: array[begin : begin + _BATCH] for name, array in inputs.items()}
        for begin in range(0, _CALIBRATION, _BATCH)
    )
    quantize_static(
        str(reference),
        str(candidate),
        reader_of(batches),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gemm"],
    )
