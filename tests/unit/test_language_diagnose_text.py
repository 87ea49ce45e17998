"""The sentences of `quantdrift diagnose` for a language model, whole, for each case: files in `language_diagnoses/`.

Write them again with `QUANTDRIFT_WRITE=1 pytest tests/unit/test_language_diagnose_text.py`, and read what changed.
"""

import os
from pathlib import Path

import msgspec
import pytest

from quantdrift.facts.diagnosis import DiagnosisVerdict, NamedTensor, OffTensor, WeightFault, WeightsOrigin
from quantdrift.facts.language_diagnosis import (
    BlamedLayer,
    DifferingMatrix,
    LanguageDiagnosis,
    NamedMatrix,
    OffRows,
)
from quantdrift.facts.words.language_diagnosis import language_diagnosed, language_sentence

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parent / "language_diagnoses"
UP, DOWN = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
FOUND = LanguageDiagnosis(
    verdict=DiagnosisVerdict.NAMED,
    divergence=0.31,
    budget=0.1,
    copied=0.3098,
    elsewhere=0.02,
    n_items=240,
    n_tokens=6_100,
    n_examined=120,
    n_fresh=120,
    fresh=0.308,
    n_layers=34,
    n_weights=226,
    one_off={"model.layers.1": 0.9},
)
MATRIX = DifferingMatrix(name=UP, error=0.47, usual=0.094, levels=4, usual_levels=12)
USUAL = DifferingMatrix(name=DOWN, error=0.095, usual=0.094, levels=12, usual_levels=12)
LAYER = BlamedLayer(
    layer="model.layers.1",
    restores=0.93,
    placebo=0.01,
    heals=0.92,
    left=0.025,
    elsewhere_left=0.012,
    share=0.029,
    matrices=(NamedMatrix(name=UP, restores=0.9, placebo=0.01, heals=0.9),),
    differing=(MATRIX, USUAL),
)
TABLE = BlamedLayer(
    layer="model.embed_tokens",
    restores=0.94,
    placebo=0.002,
    heals=0.95,
    left=0.016,
    elsewhere_left=0.019,
    share=0.1,
    matrices=(),
    differing=(
        DifferingMatrix(
            name="model.embed_tokens.weight",
            error=0.2,
            usual=0.094,
            levels=12,
            usual_levels=12,
            rows=OffRows(n=3_300, n_rows=32_000, error=0.585, usual=0.092, of_slice=0.27, elsewhere=0.001),
        ),
    ),
)
OFF = OffTensor(site=7, fault=WeightFault.VALUES, share=0.97)


def _with(matrix: DifferingMatrix) -> tuple[BlamedLayer, ...]:
    return (msgspec.structs.replace(LAYER, differing=(matrix, USUAL)),)


def _healing(heals: float, *, left: float, elsewhere_left: float | None) -> BlamedLayer:
    """Return the layer as if it and its matrix healed so much."""
    matrix = msgspec.structs.replace(LAYER.matrices[0], heals=heals - 0.01)
    return msgspec.structs.replace(
        LAYER, heals=heals, left=left, elsewhere_left=elsewhere_left, matrices=(matrix,)
    )


CASES: dict[str, LanguageDiagnosis] = {
    "two-bits": msgspec.structs.replace(FOUND, blamed=(LAYER,)),
    "rows-of-tokens": msgspec.structs.replace(FOUND, blamed=(TABLE,)),
    "other-values": msgspec.structs.replace(
        FOUND,
        blamed=_with(msgspec.structs.replace(MATRIX, levels=12, off=OFF)),
        origin=WeightsOrigin.FAULTS,
        off=(NamedTensor(site=UP, tensor=OFF),),
        n_moved=1,
        n_tensors=226,
    ),
    "larger-error": msgspec.structs.replace(
        FOUND, blamed=_with(msgspec.structs.replace(MATRIX, levels=12, error=0.3))
    ),
    "rounding": msgspec.structs.replace(
        FOUND, blamed=_with(msgspec.structs.replace(MATRIX, levels=12, error=0.1))
    ),
    "layer-as-a-whole": msgspec.structs.replace(FOUND, blamed=(msgspec.structs.replace(LAYER, matrices=()),)),
    "two-layers": msgspec.structs.replace(
        FOUND,
        elsewhere=None,
        blamed=(
            msgspec.structs.replace(TABLE, heals=0.6, left=0.12, elsewhere_left=None),
            _healing(0.3, left=0.03, elsewhere_left=None),
        ),
    ),
    "another-cause-is-left": msgspec.structs.replace(
        FOUND, blamed=(_healing(0.5, left=0.155, elsewhere_left=0.012),)
    ),
    "other-slices-are-damaged": msgspec.structs.replace(FOUND, elsewhere=0.25, blamed=(LAYER,)),
    "no-layer": msgspec.structs.replace(FOUND, verdict=DiagnosisVerdict.NOBODY),
    "moved-on-purpose": msgspec.structs.replace(
        FOUND,
        verdict=DiagnosisVerdict.NOBODY,
        origin=WeightsOrigin.MOVED,
        n_moved=224,
        n_tensors=226,
        unmatched=("lm_head.bias",),
    ),
    "within-budget": msgspec.structs.replace(
        FOUND,
        verdict=DiagnosisVerdict.NOBODY,
        is_within_budget=True,
        divergence=0.02,
        copied=0.02,
        one_off={},
    ),
    "too-few": msgspec.structs.replace(
        FOUND, verdict=DiagnosisVerdict.TOO_FEW, n_items=20, n_tokens=512, one_off={}
    ),
}


def _written(diagnosis: LanguageDiagnosis) -> str:
    lines = language_diagnosed(diagnosis, model="polyglot", slice_name="language=de")
    if diagnosis.verdict is not DiagnosisVerdict.TOO_FEW:  # an alert gets no note of it
        lines += ["", language_sentence(diagnosis)]
    return "\n".join([*map(str, lines), ""])


@pytest.mark.parametrize("case", CASES)
def test_the_sentences_are_those_of_the_file(case: str) -> None:
    """Each was read as a user would, and is true of the figures of its case."""
    path = FOLDER / f"{case}.txt"
    text = _written(CASES[case])
    if os.environ.get("QUANTDRIFT_WRITE"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_file_is_left_over() -> None:
    """Each file belongs to a case."""
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
