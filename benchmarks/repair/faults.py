"""Faults that are injected into a QDQ candidate at one site, raised until they change decisions."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from numpy.random import Generator
from onnx import numpy_helper

from benchmarks.repair.network import INPUT, OUTPUT, Images
from quantdrift.release.diagnose.probes import use_of
from quantdrift.release.sites import (
    Graph,
    ReferenceWeights,
    Site,
    SiteKind,
    SwitchableCopy,
    placed,
    session_of,
)

FIRES: Final = 0.05
"""Share of flips from which a fault counts."""
HARMLESS: Final = 0.005
"""A decoy adds fewer flips."""
_STRENGTHS: Final = 9
_DECOYS: Final = (3, 6, 9)  # strengths that are tried


class Kind(StrEnum):
    """What is wrong at a site."""

    WIDE = "scale too wide"
    NARROW = "scale too narrow"
    ZERO = "zero point"
    CHANNEL = "channel"
    ROUNDING = "rounding"


KINDS: Final = {
    SiteKind.ACTIVATION: (Kind.WIDE, Kind.NARROW, Kind.ZERO),
    SiteKind.WEIGHT: (Kind.CHANNEL, Kind.ROUNDING),
}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault at a site.

    Parameters
    ----------
    site
        Name of the site.
    kind
        What is wrong.
    strength
        From 1; what it means depends on the kind.
    channel
        The number of the channel, for `Kind.CHANNEL`.
    """

    site: str
    kind: Kind
    strength: int
    channel: int = 0


class Patient:
    """A healthy candidate, into which faults are injected.

    Parameters
    ----------
    reference, candidate
        ONNX files.
    images
        The pages on which flips are counted.
    folder
        Faulty candidates are written there, one over the other.
    """

    def __init__(self, reference: Path, candidate: Path, images: Images, folder: Path) -> None:
        self.reference = reference
        self.images = images
        self.copy = SwitchableCopy(candidate, reference)
        self.sites = {site.name: site for site in self.copy.sites}
        self.candidate = candidate
        self._model = onnx.load(candidate)
        self._truth = self.copy.expected({INPUT: images})[OUTPUT].argmax(axis=1)
        self._weights = ReferenceWeights(onnx.load(reference), reference)
        self._raw = self.copy.raw({INPUT: images[:64]}, self.copy.everywhere)
        self._faulty = folder / "faulty.onnx"
        self.healthy = self.flips(())

    def write(self, faults: Iterable[Fault]) -> Path:
        """Write the candidate with some faults, and return its file."""
        onnx.save(self._with(faults), self._faulty)
        return self._faulty

    def flips(self, faults: Iterable[Fault]) -> float:
        """Return the share of pages on which the candidate with some faults decides otherwise than the reference."""
        session = session_of(self._with(faults).SerializeToString(), "the faulty candidate", 1)
        (logits,) = session.run([OUTPUT], {INPUT: self.images})
        return float((logits.argmax(axis=1) != self._truth).mean())

    def draw(self, rng: Generator, *, besides: Sequence[str] = ()) -> Fault:
        """Draw a fault, and raise it until it fires."""
        names = [name for name in self.sites if name not in besides]
        while True:
            fault = self._any(rng, names)
            for strength in range(1, _STRENGTHS + 1):
                raised = msgspec.structs.replace(fault, strength=strength)
                if self.flips([raised]) >= FIRES:
                    return raised

    def decoy(self, culprit: Fault, rng: Generator) -> Fault | None:
        """Return a fault elsewhere with a larger local error that alone changes nearly nothing; None: there is none."""
        loud = self.error(culprit)
        choices = [
            msgspec.structs.replace(self._any(rng, [name]), kind=kind)
            for name, site in self.sites.items()
            if name != culprit.site
            for kind in KINDS[site.kind]
        ]
        for number in map(int, rng.permutation(len(choices))):
            for strength in _DECOYS:
                fault = msgspec.structs.replace(choices[number], strength=strength)
                if self.error(fault) > loud:
                    if self.flips([fault]) - self.healthy < HARMLESS:
                        return fault
                    break
        return None

    def error(self, fault: Fault) -> float:
        """Return the mean square error at the faulty site, relative to the mean square of its values."""
        found = placed(Graph(self._with([fault]), self.candidate), self._weights)
        for number, (site, _) in enumerate(found.activations):
            if site.name == fault.site:
                raw = self._raw[number]
                return float(use_of(site, raw).error.mean() / np.square(raw).mean())
        matched = next(matched for site, matched in found.weights if site.name == fault.site)
        return max(
            float(np.square(weight.served - weight.raw).sum() / np.square(weight.raw).sum())
            for _, weight in matched
        )

    def _any(self, rng: Generator, names: Sequence[str]) -> Fault:
        site = self.sites[names[int(rng.integers(len(names)))]]
        kinds = KINDS[site.kind]
        return Fault(
            site=site.name,
            kind=kinds[int(rng.integers(len(kinds)))],
            strength=1,
            channel=int(rng.integers(max(site.scale.size, 1))),
        )

    def _with(self, faults: Iterable[Fault]) -> Any:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        for fault in faults:
            site = self.sites[fault.site]
            if site.kind is SiteKind.ACTIVATION:
                _at_range(model, stored, site, fault)
            else:
                _at_weight(model, stored, site, fault)
        _settle_biases(model, stored)
        return model


def _at_range(model: Any, stored: dict[str, Any], site: Site, fault: Fault) -> None:
    node = next(
        node
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == site.tensors[0]
    )
    if fault.kind is Kind.ZERO:
        width = site.highest - site.lowest
        shifted = int(site.zero_point) + fault.strength * width // 12
        if shifted > site.highest:
            shifted = int(site.zero_point) - fault.strength * width // 12
        _change(stored[node.input[2]], lambda array: np.full_like(array, max(shifted, site.lowest)))
        return
    factor = 1.7**fault.strength if fault.kind is Kind.WIDE else 1 / 1.3**fault.strength
    _change(stored[node.input[1]], lambda array: (array * factor).astype(array.dtype))


def _at_weight(model: Any, stored: dict[str, Any], site: Site, fault: Fault) -> None:
    """Change the weight of the site, not its bias: the one with the most values."""
    integers = max(
        (tensor for name, tensor in stored.items() if name.removesuffix("_quantized") in site.tensors),
        key=lambda tensor: int(np.prod(tensor.dims)),
    )
    if fault.kind is Kind.ROUNDING:
        step = 2.0**fault.strength
        _change(
            integers,
            lambda array: np.clip(np.floor(array / step) * step, site.lowest, site.highest).astype(
                array.dtype
            ),
        )
        return
    node = next(node for node in model.graph.node if node.input and node.input[0] == integers.name)

    def louder(array: Any) -> Any:
        made = array.copy()
        made.reshape(-1)[min(fault.channel, array.size - 1)] *= 1.8**fault.strength
        return made

    _change(stored[node.input[1]], louder)


def _settle_biases(model: Any, stored: dict[str, Any]) -> None:
    """Give each bias the scale of input times weight, as a quantiser does; integer kernels take it for granted."""
    producer = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        sources = [producer.get(name) for name in node.input]
        if (
            node.op_type not in {"Conv", "Gemm"}
            or len(sources) < 3
            or any(one is None or one.op_type != "DequantizeLinear" for one in sources)
        ):
            continue
        of_input, of_weight, of_bias = (stored[one.input[1]] for one in sources if one is not None)
        product = numpy_helper.to_array(of_input) * numpy_helper.to_array(of_weight)
        before = numpy_helper.to_array(of_bias)
        integers = stored[sources[2].input[0]] if sources[2] is not None else None
        assert integers is not None
        values = numpy_helper.to_array(integers) * before.astype(np.float64)
        made = np.rint(values / product).clip(-(2**31), 2**31 - 1).astype(np.int32)
        integers.CopyFrom(numpy_helper.from_array(made, integers.name))
        of_bias.CopyFrom(
            numpy_helper.from_array(np.broadcast_to(product, before.shape).astype(np.float32), of_bias.name)
        )


def _change(tensor: Any, change: Callable[[Any], Any]) -> None:
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
