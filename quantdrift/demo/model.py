"""Train the FP32 reader, export it, and quantise it with a calibration set that lacks the archive's scans.

Nothing else is done to the candidate: its weights are the reference's, rounded, and its activation ranges are
what four of the five scanners showed. The archive's faint pages then fall between a few quantisation steps.

Calibrating with the archive's scans as well does not help: one range per tensor must hold the other scanners' pages
too, so the steps stay as wide, and some 5 % of the archive's answers still differ. What is lost is resolution. The second
candidate has the same weights and the same calibration scans, but its activations have 16 bits: 256 times finer steps.
ONNX Runtime has no integer kernels for these on a CPU and computes them in floating point: the answers are better, and slower.
"""

import argparse
import contextlib
import io
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from quantdrift.demo.scans import SIDE, Images, Scanner, Scans

NAME = "digits"
INPUT, OUTPUT = "image", "logits"
CANDIDATE = "digits-int8.onnx"
SECOND_CANDIDATE = "digits-int8-2.onnx"
REFERENCE = "digits-fp32.onnx"
CALIBRATED_ON = tuple(scanner for scanner in Scanner if scanner is not Scanner.ARCHIVE)

_STEPS = 2_000
_BLOCK = 50  # steps whose scans are drawn at once
_PER_SCANNER = 20  # scans of each scanner in a training step
_LEARNING_RATE = 4e-3
_CALIBRATION_SCANS = 200  # of each calibrated scanner
_CHECKED_SCANS = 8_000  # of each scanner
# The logits stay in floating point, as in models that are served. In 8 bits two classes are equal at the top of every hundredth answer, and
# which of them is first is a matter of their order: half a per cent of a sound slice's answers would change, of a budget of one.
_OF_THE_LOGITS = "Gemm"


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How candidate and reference did on one scanner's pages, by the true labels and against each other.

    Parameters
    ----------
    scanner
        Whose pages.
    n
        How many pages.
    reference_accuracy, candidate_accuracy
        Share that each read right.
    flip
        Share on which their answers differ.
    divergence
        Mean Kullback-Leibler divergence of the candidate from the reference, each page capped at 2, in nats.
    """

    scanner: Scanner
    n: int
    reference_accuracy: float
    candidate_accuracy: float
    flip: float
    divergence: float


class DemoStep(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One line of progress.

    Parameters
    ----------
    what
        What is being done.
    done
        Share of the whole, in [0, 1].
    """

    what: str
    done: float


class Built(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """The result of a build.

    Parameters
    ----------
    quality
        The offline check on held-out pages, one entry per scanner.
    """

    quality: tuple[Quality, ...]


def build(directory: Path, seed: int, tell: Callable[[DemoStep], None]) -> Built:
    """Write the FP32 model and both INT8 models to `directory`; some ten seconds on two cores.

    Parameters
    ----------
    directory
        Is made where it is missing.
    seed
        Of the weights, the training scans and the calibration scans.
    tell
        Is told of every step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    learnable, held_out = Scans.bundled()
    rng = default_rng(seed)
    network = _train(learnable, seed, rng, tell)
    tell(DemoStep(what="export to ONNX", done=0.8))
    _export(network, directory / REFERENCE)
    tell(DemoStep(what="quantise to INT8", done=0.95))
    calibration = [learnable.draw(scanner, _CALIBRATION_SCANS, rng)[0] for scanner in CALIBRATED_ON]
    quantise(directory / REFERENCE, directory / CANDIDATE, calibration)
    tell(DemoStep(what="check both", done=0.98))
    quality = tuple(
        compare(
            directory / REFERENCE,
            directory / CANDIDATE,
            scanner,
            *held_out.draw(scanner, _CHECKED_SCANS, rng),
        )
        for scanner in Scanner
    )
    quantise(directory / REFERENCE, directory / SECOND_CANDIDATE, calibration, activation_bits=16)
    return Built(quality=quality)


def compare(
    reference: Path, candidate: Path, scanner: Scanner, images: Images, labels: NDArray[np.int64]
) -> Quality:
    """Run candidate and reference side by side on the same scans.

    Parameters
    ----------
    reference, candidate
        ONNX files.
    scanner
        Whose pages they are.
    images
        (n, 1, 8, 8), float32.
    labels
        (n,), int64: the truth.
    """
    logits = [_logits(path, images) for path in (reference, candidate)]
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in logits)
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)
    expected, served = (x.argmax(axis=1) for x in logits)
    return Quality(
        scanner=scanner,
        n=len(labels),
        reference_accuracy=float((expected == labels).mean()),
        candidate_accuracy=float((served == labels).mean()),
        flip=float((expected != served).mean()),
        divergence=float(np.minimum(divergence, 2.0).mean()),
    )


def _logits(path: Path, images: Images) -> NDArray[np.float64]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (logits,) = session.run([OUTPUT], {INPUT: images})
    return np.asarray(logits, dtype=np.float64)


def _train(scans: Scans, seed: int, rng: Generator, tell: Callable[[DemoStep], None]) -> Any:
    import torch  # noqa: PLC0415 - two seconds and 200 MB, for this function alone
    from torch import nn  # noqa: PLC0415

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # as fast as two for so small a network, and much faster on busy cores
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 2) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    optimiser = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _LEARNING_RATE, total_steps=_STEPS)
    for step in range(_STEPS):
        if step % _BLOCK == 0:
            images, labels = _block(scans, rng)
            tell(DemoStep(what="train the FP32 network", done=0.8 * step / _STEPS))
        batch = slice(step % _BLOCK, None, _BLOCK)  # every scanner has its share in every batch
        loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch has no types for it
        optimiser.step()
        schedule.step()
    if not math.isfinite(loss.item()):
        raise ArithmeticError("the training did not converge: try another --seed")
    return network.eval()


def _block(scans: Scans, rng: Generator) -> tuple[Any, Any]:
    """Draw the scans of `_BLOCK` steps at once, one scanner after the other."""
    import torch  # noqa: PLC0415 - as in _train

    drawn = [scans.draw(scanner, _PER_SCANNER * _BLOCK, rng) for scanner in Scanner]
    images = np.concatenate([images for images, _ in drawn])
    labels = np.concatenate([labels for _, labels in drawn])
    return torch.from_numpy(images), torch.from_numpy(labels)


def _export(network: Any, path: Path) -> None:
    import torch  # noqa: PLC0415 - as in _train

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists the packages that it could do without
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        torch.onnx.export(
            network,
            (torch.zeros(2, 1, SIDE, SIDE),),
            str(path),
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("scans")},),
            opset_version=21,  # the first with 16-bit activations
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def quantise(
    reference: Path, candidate: Path, calibration: Iterable[Images], *, activation_bits: int = 8
) -> None:
    """Quantise a model: INT8 weights by channel, activations by tensor, in the ranges that calibration shows.

    Parameters
    ----------
    reference
        The ONNX model that is read.
    candidate
        The ONNX model that is written.
    calibration
        Batches of scans, each (n, 1, 8, 8), float32.
    activation_bits
        8 or 16; weights always have 8.
    """
    from onnxruntime.quantization import (  # noqa: PLC0415 - imports onnx
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    class Reader(CalibrationDataReader):  # type: ignore[misc] # the base has no types
        def __init__(self) -> None:
            self._batches = iter(calibration)

        def get_next(self) -> dict[str, Images] | None:
            images = next(self._batches, None)
            return None if images is None else {INPUT: images}

    prepared = candidate.with_suffix(".prepared.onnx")
    quant_pre_process(str(reference), str(prepared))
    quantize_static(
        str(prepared),
        str(candidate),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QInt8 if activation_bits == 8 else QuantType.QInt16,
        extra_options={"OpTypesToExcludeOutputQuantization": [_OF_THE_LOGITS]},
    )
    prepared.unlink()


def main() -> None:
    """Build in a process of its own and tell of it in lines of JSON on stdout."""
    parser = argparse.ArgumentParser(prog="python -m quantdrift.demo.model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory the three models are written to")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    out = sys.stdout

    def tell(line: DemoStep | Built) -> None:
        print(msgspec.json.encode(line).decode(), file=out, flush=True)

    tell(build(arguments.out, arguments.seed, tell))


if __name__ == "__main__":
    main()
