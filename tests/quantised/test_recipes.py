"""Recipes: the files that ONNX Runtime's quantisers make of a network, and what the recipe leaves in FP32."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.repair.network import INPUT, OUTPUT, Images, drawn, pages, quantise, write
from benchmarks.repair.shapes import Shape, write_shape
from quantdrift.core.errors import OperatorError
from quantdrift.facts.quantised import Family, Ranges, Recipe
from quantdrift.release.quantise.recipes import Quantiser, without
from quantdrift.release.sites import outputs_of, session_of

pytestmark = pytest.mark.integration

KINDS = (
    Recipe(family=Family.FP16, bits=16),
    Recipe(family=Family.STATIC, per_channel=True),
    Recipe(family=Family.STATIC, symmetric=True, ranges=Ranges.MANY, operators=("Conv", "Gemm", "MatMul")),
    Recipe(family=Family.STATIC, bits=7, ranges=Ranges.ENTROPY),
    Recipe(family=Family.DYNAMIC, operators=("Gemm", "MatMul")),
    Recipe(family=Family.BLOCKS, bits=4, block=32),
)


def _feeds() -> Iterator[dict[str, Images]]:
    for image in pages().learnable[:32]:
        yield {INPUT: image[np.newaxis]}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a convolutional network and a Transformer in FP32."""
    folder = tmp_path_factory.mktemp("recipes")
    files = {name: folder / f"{name}.onnx" for name in ("convolutional", "transformer")}
    write(files["convolutional"], pages(), 1)
    write_shape(Shape.TRANSFORMER, files["transformer"], pages(), 1)
    return files


def _answers(path: Path, images: Images) -> Images:
    session = session_of(str(path), str(path), 1)
    return outputs_of(session, [OUTPUT], {INPUT: images})[OUTPUT]


@pytest.mark.parametrize("name", ["convolutional", "transformer"])
def test_each_kind_of_recipe_gives_a_smaller_model_that_answers_alike(
    name: str, references: dict[str, Path], tmp_path: Path
) -> None:
    """Of a convolutional network and of a Transformer, at least 80 % of 300 decisions stay, and the quantiser says nothing of its own."""
    reference = references[name]
    quantiser = Quantiser(reference, _feeds, tmp_path)
    images = drawn(pages().held_out, 300, np.random.default_rng(4))
    truth = _answers(reference, images).argmax(axis=1)
    for recipe in KINDS:
        path = tmp_path / "recipe.onnx"
        quantiser.build(recipe, path)
        same = (_answers(path, images).argmax(axis=1) == truth).mean()
        assert same >= 0.8, recipe
        assert path.stat().st_size < reference.stat().st_size, recipe


@pytest.mark.parametrize("recipe", [KINDS[1], *KINDS[4:]], ids=lambda recipe: str(recipe.family.value))
def test_a_layer_that_is_left_out_keeps_its_weight(
    recipe: Recipe, references: dict[str, Path], tmp_path: Path
) -> None:
    """The weight of one layer stays in FP32 to the bit, and is not there where the layer is quantised."""
    quantiser = Quantiser(references["convolutional"], _feeds, tmp_path)
    prepared = {
        node.name: node.input[1]
        for node in onnx.load(tmp_path / "prepared.onnx").graph.node
        if len(node.input) > 1
    }
    chosen = next(
        name for name in reversed(quantiser.nodes) if recipe.family is not Family.STATIC or "conv" in name
    )
    floats = []
    for each in (recipe, without(recipe, [chosen])):
        path = tmp_path / "recipe.onnx"
        quantiser.build(each, path)
        model = onnx.load(path)
        floats.append(
            {
                tensor.name
                for tensor in model.graph.initializer
                if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1
            }
        )
    weight = prepared[chosen]
    assert {name for name in floats[1] - floats[0] if name.startswith(weight)}, (weight, floats)


@pytest.mark.parametrize("recipe", [KINDS[1], *KINDS[4:]], ids=lambda recipe: str(recipe.family.value))
@pytest.mark.parametrize("name", ["convolutional", "transformer"])
def test_a_layer_that_is_left_out_can_be_in_fp16(
    recipe: Recipe, name: str, references: dict[str, Path], tmp_path: Path
) -> None:
    """Its weight, alone, has 16 bits: the file is smaller than with FP32 there, and answers nearly the same."""
    quantiser = Quantiser(references[name], _feeds, tmp_path)
    images = drawn(pages().held_out, 300, np.random.default_rng(4))
    chosen, files = quantiser.nodes[-2:], []
    for bits in (32, 16):
        path = tmp_path / f"{bits}.onnx"
        quantiser.build(without(recipe, chosen, bits=bits), path)
        files.append(path)
    halves = [
        tensor
        for tensor in onnx.load(files[1]).graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT16 and len(tensor.dims) > 1
    ]
    assert len(halves) == 2
    assert files[1].stat().st_size < files[0].stat().st_size
    whole, half = (_answers(path, images) for path in files)
    assert np.abs(half - whole).max() < 0.05 * np.abs(whole).max()
    assert (half.argmax(axis=1) == whole.argmax(axis=1)).mean() > 0.98


def test_recipes_fit_the_graph(references: dict[str, Path], tmp_path: Path) -> None:
    """A Transformer without a convolution has blocks, and no recipe twice; the usual ones come first."""
    recipes, left_out = Quantiser(references["transformer"], _feeds, tmp_path).recipes()
    assert len(set(map(repr, recipes))) == len(recipes)
    assert {recipe.family for recipe in recipes} == {
        Family.FP16,
        Family.STATIC,
        Family.DYNAMIC,
        Family.BLOCKS,
    }
    assert recipes[0] == Recipe(family=Family.STATIC, per_channel=True)
    assert not left_out


def test_a_quantised_model_is_refused(references: dict[str, Path], tmp_path: Path) -> None:
    """It says what it has found in it."""
    quantise(references["convolutional"], tmp_path / "int8.onnx", pages().learnable)
    with pytest.raises(OperatorError, match="is quantised already"):
        Quantiser(tmp_path / "int8.onnx", _feeds, tmp_path)
