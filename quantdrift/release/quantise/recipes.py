"""Recipes: which ways to quantise fit a graph, and the file that each gives, by ONNX Runtime's own quantisers.

| recipe | made by |
|---|---|
| FP16 | `convert_float_to_float16`; inputs and outputs keep their type |
| static INT8 | `quantize_static`, as pairs of QuantizeLinear and DequantizeLinear. Asymmetric activations are unsigned, symmetric ones signed |
| dynamic INT8 | `quantize_dynamic` |
| weights in blocks, INT8 or INT4 | `MatMulNBitsQuantizer`, for matrix products with a constant; a Gemm becomes one |

Layers that a recipe leaves out stay in FP32, or compute in FP16 with casts around them.

The graph is prepared once (`quant_pre_process`: shapes, and folded batch norms). Ranges are found once for each way to find them, and
kept in a file that `quantize_static` reads again.
"""

import contextlib
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from quantdrift.core.errors import OperatorError
from quantdrift.facts.quantised import Family, Ranges, Recipe
from quantdrift.models.tensors.arrays import Array
from quantdrift.release.sites import loaded

Feeds = Callable[[], Iterator[Mapping[str, Array]]]
PRODUCTS: Final = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators with most of the weights and of the multiplications."""
_MATRIX_PRODUCTS: Final = frozenset({"Gemm", "MatMul"})
_BLOCKS: Final = ((4, 32), (4, 128), (8, 32), (8, 128))  # bits, weights that share a scale
_STRIDE: Final = 16  # runs of which all activations are in memory together
_MOST_BYTES: Final = 2**31 - 1  # of an ONNX file
_PERCENTILES: Final = {Ranges.MOST: 99.99, Ranges.MANY: 99.9}
_DOMAINS: Final = ("", "ai.onnx")


class Quantiser:
    """Makes quantised copies of one model.

    Parameters
    ----------
    reference
        An ONNX file in FP32.
    feeds
        Returns the calibration inputs, in runs of some items.
    folder
        Where files are written; nothing else is in it.

    Raises
    ------
    OperatorError
        The file cannot be read, is quantised already, has no weights that could be quantised, or is too large for one ONNX file.
    """

    def __init__(self, reference: Path, feeds: Feeds, folder: Path) -> None:
        model = loaded(reference, "reference")
        if model.ByteSize() > _MOST_BYTES:
            raise OperatorError(
                f"{reference} has more than 2 GiB with its weights, which no single ONNX file can have: quantise it with another tool, and judge"
                " the result with `quantdrift gate`"
            )
        kinds = {node.op_type for node in model.graph.node}
        if quantised := sorted(
            kinds & {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulNBits"}
        ):
            raise OperatorError(
                f"{reference} is quantised already (it has {quantised[0]}): give the model in FP32"
            )
        self._feeds, self._folder = feeds, folder
        self._prepared = folder / "prepared.onnx"
        self._prepare(model, reference)
        prepared = onnx.load(self._prepared)
        stored = {tensor.name for tensor in prepared.graph.initializer}
        self._nodes = [
            (node.name, node.op_type)
            for node in prepared.graph.node
            if node.op_type in PRODUCTS and node.domain in _DOMAINS and stored & {*node.input[1:2]}
        ]
        self._kinds = {node.op_type for node in prepared.graph.node}
        if not self._nodes:
            raise OperatorError(
                f"{reference} has no convolution and no matrix product with a stored weight: there is nothing to quantise"
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes with a weight that can be quantised, in the order of the graph."""
        return tuple(name for name, _ in self._nodes)

    def recipes(self) -> tuple[list[Recipe], list[str]]:
        """Return the recipes that fit the graph, those first that differ least from the usual ones; and what was left out, in words."""
        present = {kind for _, kind in self._nodes}
        products = tuple(kind for kind in PRODUCTS if kind in present)
        static = [
            Recipe(
                family=Family.STATIC,
                bits=bits,
                per_channel=per_channel,
                symmetric=symmetric,
                ranges=ranges,
                operators=operators,
            )
            for bits, per_channel, symmetric, ranges, operators in itertools.product(
                (8, 7), (True, False), (False, True), Ranges, ((), products)
            )
            if bits == 8 or not symmetric
        ]
        static.sort(key=_departures)
        matrices = tuple(kind for kind in products if kind in _MATRIX_PRODUCTS)
        with_convolutions = len(matrices) < len(products)
        # A Gemm becomes a MatMul first.
        of_dynamic = [("Gemm", "MatMul"), ()] if matrices and with_convolutions else [()]
        others = [
            Recipe(family=Family.DYNAMIC, per_channel=per_channel, operators=operators)
            for operators in of_dynamic
            for per_channel in (True, False)
        ]
        left_out = []
        if not matrices:
            left_out.append("weights in blocks: the model has no matrix product with a stored weight")
        elif problem := _blocks_problem():
            left_out.append(f"weights in blocks: {problem}")
        else:
            others += [
                Recipe(family=Family.BLOCKS, bits=bits, block=block, symmetric=symmetric)
                for symmetric in (False, True)
                for bits, block in _BLOCKS
            ]
        others.append(Recipe(family=Family.FP16, bits=16))
        first, rest = static[:2], static[2:]
        mixed = [each for pair in itertools.zip_longest(others, rest) for each in pair if each is not None]
        return [*first, *mixed], left_out

    def build(self, recipe: Recipe, path: Path) -> None:
        """Write the file of a recipe.

        Raises
        ------
        OperatorError
            The quantiser fails on this graph.
        """
        makers = {
            Family.FP16: self._fp16,
            Family.STATIC: self._static,
            Family.DYNAMIC: self._dynamic,
            Family.BLOCKS: self._blocks,
        }
        try:
            with _quiet():
                makers[recipe.family](recipe, path)
                if recipe.left_out and recipe.left_bits == 16:
                    _halve(path, recipe)
        except OperatorError:
            raise
        except Exception as error:  # the quantisers raise whatever their parts raise
            text = str(error).strip().splitlines()
            raise OperatorError(
                f"ONNX Runtime's quantiser fails: {text[0] if text else type(error).__name__}"
            ) from error

    def _prepare(self, model: Any, reference: Path) -> None:
        """Write the graph with inferred shapes, folded constants, and a name for each node."""
        from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415 - a second, for this command alone

        source = self._folder / "reference.onnx"
        onnx.save(model, source)
        for is_simple in (False, True):  # some graphs have shapes that no rule infers: they stay as they are
            try:
                with _quiet():
                    quant_pre_process(str(source), str(self._prepared), skip_symbolic_shape=is_simple)
                break
            except Exception as error:
                if is_simple:
                    raise OperatorError(
                        f"ONNX Runtime cannot prepare {reference} to be quantised: {error}"
                    ) from error
        prepared = onnx.load(self._prepared)
        names: set[str] = set()
        for number, node in enumerate(prepared.graph.node):
            if not node.name or node.name in names:
                node.name = f"{node.op_type}.{number}"
            names.add(node.name)
        onnx.save(prepared, self._prepared)
        source.unlink()

    def _fp16(self, recipe: Recipe, path: Path) -> None:
        from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415 - as above

        model = convert_float_to_float16(
            onnx.load(self._prepared), keep_io_types=True, node_block_list=list(recipe.left_out)
        )
        onnx.save(model, path)

    def _static(self, recipe: Recipe, path: Path) -> None:
        from onnxruntime.quantization import (  # noqa: PLC0415 - as above
            CalibrationDataReader,
            CalibrationMethod,
            QuantFormat,
            QuantType,
            quantize_static,
        )

        class Reader(CalibrationDataReader):  # type: ignore[misc] # the base has no types
            """Runs in a row, some at a time: what they compute is in memory together."""

            def __init__(self, feeds: Iterable[Mapping[str, Array]]) -> None:
                self._feeds = list(feeds)
                self.stride = min(_STRIDE, len(self._feeds))
                del self._feeds[len(self._feeds) // self.stride * self.stride :]
                self.set_range(0, len(self._feeds))

            def __len__(self) -> int:
                return len(self._feeds)

            def set_range(self, start_index: int, end_index: int) -> None:
                self._left = iter(self._feeds[start_index:end_index])

            def get_next(self) -> Mapping[str, Array] | None:
                return next(self._left, None)

        percentile = _PERCENTILES.get(recipe.ranges)
        methods = {Ranges.ALL: CalibrationMethod.MinMax, Ranges.ENTROPY: CalibrationMethod.Entropy}
        options: dict[str, Any] = {"ActivationSymmetric": recipe.symmetric}
        if percentile is not None:
            options |= {"CalibPercentile": percentile, "CalibTensorRangeSymmetric": False}
        cache = self._folder / f"ranges-{recipe.ranges.name}.json"
        if not cache.exists():  # the ranges of all tensors, of which a recipe for few operators needs some
            reader = Reader(self._feeds())
            quantize_static(
                self._prepared,
                path,
                reader,
                calibrate_method=methods.get(recipe.ranges, CalibrationMethod.Percentile),
                extra_options=options | {"CalibStridedMinMax": reader.stride},
                calibration_cache_path=cache,
            )
        quantize_static(
            self._prepared,
            path,
            quant_format=QuantFormat.QDQ,
            per_channel=recipe.per_channel,
            reduce_range=recipe.bits == 7,
            activation_type=QuantType.QInt8 if recipe.symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=list(recipe.operators),
            nodes_to_exclude=list(recipe.left_out),
            calibrate_method=methods.get(recipe.ranges, CalibrationMethod.Percentile),
            extra_options=options,
            calibration_cache_path=cache,
        )

    def _dynamic(self, recipe: Recipe, path: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic  # noqa: PLC0415 - as above

        quantize_dynamic(
            self._prepared,
            path,
            op_types_to_quantize=list(recipe.operators),
            per_channel=recipe.per_channel,
            nodes_to_exclude=_left_out(recipe),
        )

    def _blocks(self, recipe: Recipe, path: Path) -> None:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer  # noqa: PLC0415 - as above
        from onnxruntime.quantization.onnx_model import ONNXModel  # noqa: PLC0415 - as above

        wrapped = ONNXModel(onnx.load(self._prepared))
        wrapped.replace_gemm_with_matmul()
        quantiser = MatMulNBitsQuantizer(
            wrapped.model,
            bits=recipe.bits,
            block_size=recipe.block,
            is_symmetric=recipe.symmetric,
            nodes_to_exclude=_left_out(recipe),
        )
        quantiser.process()
        quantiser.model.save_model_to_file(str(path))


def without(recipe: Recipe, nodes: Sequence[str], *, bits: int = 32) -> Recipe:
    """Return a recipe that leaves these nodes in FP32, or with 16 bits in FP16."""
    return msgspec.structs.replace(recipe, left_out=tuple(nodes), left_bits=bits)


def _halve(path: Path, recipe: Recipe) -> None:
    """Compute the nodes of a file that are not quantised in FP16, with their stored tensors, and casts around each.

    ONNX Runtime's converter does this for whole graphs: with most nodes blocked it casts around each of these, and gives two casts one name.
    """
    model = onnx.load(path)
    graph, chosen = model.graph, set(_left_out(recipe))
    stored = {tensor.name: tensor for tensor in graph.initializer}
    halves: dict[str, Any] = {}
    nodes = []
    for node in graph.node:
        if node.name not in chosen:
            nodes.append(node)
            continue
        for place, source in enumerate(node.input):
            name = f"{source}.fp16"
            if source in stored and stored[source].data_type == onnx.TensorProto.FLOAT:
                values = numpy_helper.to_array(stored[source])
                halves[name] = numpy_helper.from_array(values.astype(np.float16), name)
            elif source:
                name = f"{source}.{node.name}.fp16"
                nodes.append(
                    helper.make_node("Cast", [source], [name], name=name, to=onnx.TensorProto.FLOAT16)
                )
            node.input[place] = name if source else source
        (output,) = node.output
        node.output[0] = f"{output}.fp16"
        nodes += [
            node,
            helper.make_node(
                "Cast", [node.output[0]], [output], name=f"{output}.fp32", to=onnx.TensorProto.FLOAT
            ),
        ]
    copied = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copied)
    used = {source for node in graph.node for source in node.input}
    kept = [tensor for name, tensor in stored.items() if name in used]
    tensors = [type(tensor).FromString(tensor.SerializeToString()) for tensor in (*kept, *halves.values())]
    del graph.initializer[:]
    graph.initializer.extend(tensors)
    onnx.save(model, path)


def _left_out(recipe: Recipe) -> list[str]:
    """Return the names of nodes to leave in FP32 where each Gemm `a` becomes the product `a_MatMul` and a sum."""
    return [name for left in recipe.left_out for name in (left, f"{left}_MatMul")]


def _departures(recipe: Recipe) -> int:
    """Return in how many ways a static recipe differs from 8 bits, per channel, asymmetric, with all values in the ranges."""
    return sum(
        (
            recipe.bits != 8,
            not recipe.per_channel,
            recipe.symmetric,
            recipe.ranges is not Ranges.ALL,
            bool(recipe.operators),
        )
    )


def _blocks_problem() -> str:
    """Return why weights cannot be quantised in blocks here; empty: they can."""
    try:
        with _quiet():
            import onnxruntime.quantization.matmul_nbits_quantizer  # noqa: F401, PLC0415 - as above
    except ModuleNotFoundError as error:
        return f"they need {error.name}: pip install 'quantdrift[quantise]'"
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the quantisers from printing, warning, and setting up the logs of the whole process."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
