"""Faults in other forms of quantisation: weights in blocks, INT8 whose ranges are found while it runs, FP16.

- `culprit_first_kinds`: share of single faults that are named first, over all forms; `culprit_first_FORM` of each.
- `accused_kinds`: share of sound candidates, the worst of 20 random slices with no budget, of which a site is named that does not heal more than it breaks on 20,000 fresh pages (the sign test, 5 %), beside all
  others that are named. One that does is no false accusation: rounding to 4 bits changes some 2 to 4 % of the answers of these networks, and more of them at one weight than at another. `named_kinds` is the share of which
  any site is named.
- `refused_kinds`: share of all of them that are refused.
"""

import contextlib
import functools
import io
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from numpy.random import Generator
from onnx import helper, numpy_helper

from benchmarks.repair.cases import Cases
from benchmarks.repair.network import INPUT, OUTPUT, Images, drawn, pages, write
from benchmarks.repair.shapes import Shape, write_shape
from quantdrift.core.config.schema import OutputKind
from quantdrift.core.errors import OperatorError
from quantdrift.facts.diagnosis import DiagnosisVerdict
from quantdrift.models.comparators.classes.classification import ClassificationComparator
from quantdrift.models.comparators.protocol import Divergences
from quantdrift.models.tensors.arrays import Array, Outputs
from quantdrift.release.diagnose.blame import diagnose
from quantdrift.release.diagnose.copies import changed
from quantdrift.release.diagnose.steps import sign_test
from quantdrift.release.forms import name_of
from quantdrift.release.trees import copy_of_onnx

FIRES: Final = 0.05
_PAGES: Final = 800
_SLICES: Final = 20
_FRESH: Final = 20_000
_ALPHA: Final = 0.05
_STRENGTHS: Final = 9
_BUDGET: Final = 0.02
_COMPARATOR: Final = ClassificationComparator(OutputKind.LOGITS, 3)
Form = Callable[[Path, Path], None]
"""Writes a candidate of a reference."""


class Kinds(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each are tried, for each form of each network."""

    faults: int = 10
    sound: int = 8


QUICK: Final = Kinds(faults=2, sound=1)


def in_blocks(reference: Path, candidate: Path, *, bits: int = 4, **options: Any) -> None:
    """Quantise products by ONNX Runtime's weight-only quantiser, in blocks of 32."""
    from onnxruntime.quantization.matmul_nbits_quantizer import (  # noqa: PLC0415 - a second of imports
        MatMulNBitsQuantizer,
    )

    with _quiet():
        quantiser = MatMulNBitsQuantizer(
            onnx.load(reference), bits=bits, block_size=32, is_symmetric=False, **options
        )
        quantiser.process()
        quantiser.model.save_model_to_file(str(candidate))


def in_8_bits(reference: Path, candidate: Path) -> None:
    """Do the same with 8 bits."""
    in_blocks(reference, candidate, bits=8)


def in_blocks_and_int8(reference: Path, candidate: Path) -> None:
    """Do the same with 8 bits, and round what goes into a product to INT8."""
    in_blocks(reference, candidate, bits=8, accuracy_level=4)


def dynamic(reference: Path, candidate: Path) -> None:
    """Quantise by `quantize_dynamic`."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415 - as above

    with _quiet():
        quantize_dynamic(str(reference), str(candidate), weight_type=QuantType.QUInt8, reduce_range=True)


def half(reference: Path, candidate: Path) -> None:
    """Convert to FP16, with inputs and outputs in FP32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415 - as above

    with _quiet():
        onnx.save(convert_float_to_float16(onnx.load(reference), keep_io_types=True), candidate)


FORMS: Final[dict[str, tuple[Form, tuple[str, ...]]]] = {
    "blocks": (in_8_bits, tuple(Shape)),
    "blocks_of_4_bits": (in_blocks, tuple(Shape)),
    "blocks_int8": (in_blocks_and_int8, tuple(Shape)),
    "dynamic": (dynamic, ("residual", *Shape)),
    "fp16": (half, ("residual", *Shape)),
}


def kind_figures(scale: Kinds, cases: Cases) -> dict[str, float]:
    """Return the figures."""
    numbers = [
        (form, network, is_faulty, seed)
        for form, (_, networks) in FORMS.items()
        for network in networks
        for is_faulty, n in ((False, scale.sound), (True, scale.faults))
        for seed in range(n)
    ]
    results = cases.each("other forms", _kind, numbers)
    judged = list(zip(numbers, results, strict=True))
    first: dict[str, list[bool]] = {form: [] for form in FORMS}
    for (form, _, is_faulty, _), (site, named) in judged:
        if is_faulty:
            first[form].append(bool(named) and named is not None and named[0] == site)
    return {
        **{f"culprit_first_{form}": float(np.mean(each)) for form, each in first.items()},
        "culprit_first_kinds": float(np.mean([*itertools.chain(*first.values())])),
        "accused_kinds": float(
            np.mean([bool(site) for (*_, is_faulty, _), (site, _) in judged if not is_faulty])
        ),
        "named_kinds": float(
            np.mean([bool(named) for (*_, is_faulty, _), (_, named) in judged if not is_faulty])
        ),
        "refused_kinds": float(np.mean([named is None for _, (_, named) in judged])),
    }


def _kind(folder: Path, case: tuple[str, str, bool, int]) -> tuple[str, list[str] | None]:
    """Return the faulty site, of a sound candidate the first that is named and heals nothing, and the sites that are named; None: it is refused."""
    form, network, is_faulty, seed = case
    reference, candidate = _quantised(folder, form, network)
    if not is_faulty:
        named = _sound(candidate, reference, seed)
        site = _idle(candidate, reference, named or [], seed)
        if site:
            print(f"accused, {form} of the {network}, seed {seed}: {site} of {named}", file=sys.stderr)
        return site, named
    rng = np.random.default_rng(seed)
    images = drawn(pages().held_out, _PAGES, rng)
    site, fault = inject(candidate, reference, images, rng, folder / "faulty.onnx")
    named = _named(folder / "faulty.onnx", folder / "faulty-reference.onnx", images, seed)
    if not named or named[0] != site:
        print(f"missed, {form} of the {network}, seed {seed}: {fault}, named {named}", file=sys.stderr)
    return site, named


@functools.cache
def _quantised(folder: Path, form: str, network: str) -> tuple[Path, Path]:
    """Write a network and its candidate, once in each process."""
    reference, candidate = folder / f"{network}.onnx", folder / f"{network}-{form}.onnx"
    _write(network, reference)
    FORMS[form][0](reference, candidate)
    return reference, candidate


def inject(candidate: Path, reference: Path, images: Images, rng: Generator, faulty: Path) -> tuple[str, str]:
    """Write a candidate with one fault that fires, and its reference beside it; return the site and what is wrong."""
    parent = faulty.with_name(f"{faulty.stem}-reference.onnx")
    copy = copy_of_onnx(candidate, reference)
    expected = copy.expected({INPUT: images})
    onnx.save(onnx.load(reference), parent)
    healthy = _changed(copy.served({INPUT: images}), expected)
    if any(site.kind.value == "L" for site in copy.sites) and rng.random() < 0.5:
        return _overflowing(reference, images, rng, faulty, parent)
    names = sorted({weight.site for weight in copy.weights if weight.raw.ndim > 1})
    while True:
        site = copy.sites[names[int(rng.integers(len(names)))]]
        fault = _FAULTS[int(rng.integers(len(_FAULTS)))]
        channel = int(rng.integers(1 << 16))
        for strength in range(1, _STRENGTHS + 1):
            model = onnx.load(candidate)
            node = next(node for node in model.graph.node if name_of(node) == site.place)
            fault(model, node, strength, channel)
            onnx.save(model, faulty)
            answers = copy_of_onnx(faulty, reference).served({INPUT: images})
            if _changed(answers, expected) >= healthy + FIRES:
                return site.name, f"{fault.__name__} {strength} at {site.name}"


def compare(candidate: Outputs, reference: Outputs) -> Divergences:
    """Compare logits."""
    return _COMPARATOR.compare(candidate[OUTPUT], reference[OUTPUT])


def _changed(answers: Outputs, expected: Outputs) -> float:
    return float(changed(compare(answers, expected)).mean())


def _louder_channel(model: Any, node: Any, strength: int, channel: int) -> None:
    """Give one channel of a weight a larger scale."""
    scale = _stored(model, node, ("_scale", "_scales"))
    if scale is not None and numpy_helper.to_array(scale).size > 1:
        array = numpy_helper.to_array(scale).copy()
        array[channel % len(array)] *= 1.8**strength
        _set(scale, array)
        return
    tensor = _weight(model, node)
    values = numpy_helper.to_array(tensor)
    zero = _zero(model, node)
    axis = 0 if node.op_type.startswith("Conv") else values.ndim - 1
    moved = np.moveaxis(values.astype(np.float64), axis, 0).copy()
    moved[channel % len(moved)] = (moved[channel % len(moved)] - zero) * 1.3**strength + zero
    _set(tensor, _fitting(np.moveaxis(moved, 0, axis), values.dtype))


def _coarser(model: Any, node: Any, strength: int, channel: int) -> None:
    """Take the lowest bits of a weight away."""
    del channel
    tensor = _weight(model, node)
    values = numpy_helper.to_array(tensor)
    if values.dtype == np.float16:
        step = float(np.abs(values).max()) / 2 ** (9 - strength)
        _set(tensor, (np.floor(values.astype(np.float64) / step) * step).astype(np.float16))
    elif node.op_type == "MatMulNBits":
        bits = next(attribute.i for attribute in node.attribute if attribute.name == "bits")
        lost = (1 << min(strength, bits - 1)) - 1
        kept = np.uint8(0xFF & ~(lost if bits == 8 else lost * 0x11))
        _set(tensor, values & kept)
    else:
        step = 2.0**strength
        _set(tensor, _fitting(np.floor(values.astype(np.float64) / step) * step, values.dtype))


def _wider(model: Any, node: Any, strength: int, channel: int) -> None:
    """Give a weight a larger scale."""
    del channel
    scale = _stored(model, node, ("_scale", "_scales"))
    tensor = _weight(model, node) if scale is None else scale
    array = numpy_helper.to_array(tensor)
    _set(tensor, (array * 1.15**strength).astype(array.dtype))


_FAULTS: Final = (_louder_channel, _coarser, _wider)


def _overflowing(
    reference: Path, images: Images, rng: Generator, faulty: Path, parent: Path
) -> tuple[str, str]:
    """Let the reference compute a tensor times a large number, and divide by it again: in FP16 some values become infinite."""
    original = onnx.load(reference)
    tensors = [
        (node.output[0], position)
        for position, node in enumerate(original.graph.node)
        if node.op_type in {"Add", "Conv", "Gemm", "MatMul"} and node.output[0] != OUTPUT
    ]
    while True:
        name, position = tensors[int(rng.integers(len(tensors)))]
        for strength in range(10, 30):
            model = onnx.load(reference)
            for node in model.graph.node:
                for place, source in enumerate(node.input):
                    if source == name:
                        node.input[place] = f"{name}.back"
            factors = {"up": 2.0**strength, "down": 2.0**-strength}
            model.graph.initializer.extend(
                numpy_helper.from_array(np.array(value, np.float32), f"{name}.{key}")
                for key, value in factors.items()
            )
            added = [
                helper.make_node("Mul", [name, f"{name}.up"], [f"{name}.large"], name=f"{name}.large"),
                helper.make_node(
                    "Mul", [f"{name}.large", f"{name}.down"], [f"{name}.back"], name=f"{name}.back"
                ),
            ]
            nodes = [*model.graph.node]
            copies = [
                type(node).FromString(node.SerializeToString())
                for node in (*nodes[: position + 1], *added, *nodes[position + 1 :])
            ]
            del model.graph.node[:]
            model.graph.node.extend(copies)
            onnx.save(model, parent)
            half(parent, faulty)
            copy = copy_of_onnx(faulty, parent)
            share = _changed(copy.served({INPUT: images}), copy.expected({INPUT: images}))
            if share >= FIRES:
                return f"L:{name}.large", f"overflow at {name}, {share:.3f}"


def _sound(candidate: Path, reference: Path, seed: int) -> list[str] | None:
    """Return the sites that are named in the worst of some random slices of a sound candidate."""
    rng = np.random.default_rng(1_000 + seed)
    pool = drawn(pages().held_out, 8_000, rng)
    copy = copy_of_onnx(candidate, reference)
    flips = compare(copy.served({INPUT: pool}), copy.expected({INPUT: pool})).flip
    slices = np.array_split(rng.permutation(len(pool)), _SLICES)
    worst = max(slices, key=lambda rows: float(np.nansum(flips[rows])))
    return _named(candidate, reference, pool[worst], seed, budget=0.0)


def _idle(candidate: Path, reference: Path, named: list[str], seed: int) -> str:
    """Return the first named site that does not heal more than it breaks on fresh pages, beside all others that are named; empty: each does."""
    copy = copy_of_onnx(candidate, reference)
    numbers = {site.name: number for number, site in enumerate(copy.sites)}
    inputs = {INPUT: drawn(pages().held_out, _FRESH, np.random.default_rng(5_000 + seed))}
    expected = copy.expected(inputs)
    after = changed(compare(copy.run(inputs, [numbers[name] for name in named]), expected))
    for name in named:
        others = [numbers[other] for other in named if other != name]
        before = changed(compare(copy.run(inputs, others), expected))
        if sign_test(before & ~after, after & ~before) > _ALPHA:
            return name
    return ""


def _named(
    candidate: Path, reference: Path, images: Images, seed: int, *, budget: float = _BUDGET
) -> list[str] | None:
    """Return the sites that are named; None: the candidate is refused."""
    try:
        found = diagnose(
            copy_of_onnx(candidate, reference), compare, {INPUT: images}, budget=budget, seed=seed
        )
    except OperatorError as error:
        print(f"refused: {error}", file=sys.stderr)
        return None
    return [blamed.site for blamed in found.blamed] if found.verdict is DiagnosisVerdict.NAMED else []


def _write(network: str, path: Path) -> None:
    if network == "residual":
        write(path, pages(), 1)
    else:
        write_shape(Shape(network), path, pages())


def _weight(model: Any, node: Any) -> Any:
    return next(tensor for tensor in model.graph.initializer if tensor.name == node.input[1])


def _stored(model: Any, node: Any, ends: tuple[str, ...]) -> Any:
    """Return the tensor that belongs to the weight of a node, by the end of its name."""
    base = node.input[1].removesuffix("_quantized").removesuffix("_Q4").removesuffix("_Q8")
    names = {f"{base}{end}" for end in ends}
    return next((tensor for tensor in model.graph.initializer if tensor.name in names), None)


def _zero(model: Any, node: Any) -> float:
    tensor = _stored(model, node, ("_zero_point",))
    return 0.0 if tensor is None else float(numpy_helper.to_array(tensor))


def _fitting(values: Array, kind: Any) -> Array:
    if kind.kind == "f":
        return np.asarray(values.astype(kind))
    limits = np.iinfo(kind)
    return np.asarray(np.clip(np.rint(values), limits.min, limits.max).astype(kind))


def _set(tensor: Any, array: Array) -> None:
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), tensor.name))


@contextlib.contextmanager
def _quiet() -> Any:
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
