"""The sentences of `quantdrift diagnose`, whole, for each case: files in `diagnoses/`.

Write them again with `QUANTDRIFT_WRITE=1 pytest tests/unit/test_diagnose_text.py`, and read what changed.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quantdrift.core.notation import part
from quantdrift.facts.diagnosis import (
    Blamed,
    Cause,
    Clipped,
    Clipping,
    Diagnosis,
    DiagnosisVerdict,
    HalfUse,
    NamedTensor,
    OffTensor,
    WeightFault,
    WeightsOrigin,
)
from quantdrift.facts.words.diagnosis import diagnosed, sentence_of

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).parent / "diagnoses"
TOLD = Diagnosis(
    verdict=DiagnosisVerdict.NAMED,
    causes=(Cause.WEIGHTS,),
    flips=0.12,
    budget=0.01,
    elsewhere=0.002,
    n_items=800,
    n_damaged=32,
    n_random=32,
    n_sites=40,
    one_off={"A:image": 0.1, "W:conv1": 0.9},
    fresh_flips=0.12,
    reproduced=0.99996,
    n_tensors=20,
    difference=0.0,
    unmatched=(),
)
WEIGHT = Blamed(
    site="W:conv1",
    cause=Cause.WEIGHTS,
    restores=0.8,
    placebo=0.2,
    heals=0.96,
    flips_left=0.004,
    elsewhere_left=0.001,
    weight_error=0.11,
    is_by_channel=True,
    cost=0.03,
)
RANGE = Blamed(
    site="A:relu1",
    cause=Cause.SATURATION,
    restores=0.9,
    placebo=0.2,
    heals=0.97,
    flips_left=0.004,
    elsewhere_left=0.002,
    outside=0.08,
    used=0.9,
    levels=200.0,
    low=0.0,
    high=1.5,
    step=0.006,
    cost=0.1,
)
FOUND = msgspec.structs.replace(
    RANGE,
    cause=Cause.RESOLUTION,
    outside=0.0,
    used=1.0,
    levels=3.2,
    low=None,
    high=None,
    step=None,
    elsewhere_used=1.0,
    elsewhere_levels=90.4,
    is_dynamic=True,
)
HALF = Blamed(
    site="L:norm1",
    cause=Cause.PRECISION,
    restores=0.9,
    placebo=0.1,
    heals=0.98,
    flips_left=0.001,
    elsewhere_left=0.0,
    cost=0.02,
    half=HalfUse(kind="FP16", bits=11, largest=812_000.0, most=65_504.0, above=0.03, below=0.0),
)
CLIPPING = Clipping(
    ranges=(Clipped(site="A:relu2", outside=0.31, elsewhere=0.02, low=0.0, high=2.0),),
    n_ranges=9,
    restores=0.8,
    placebo=0.1,
    heals=0.91,
    flips_left=0.006,
)


def _told(**changes: Any) -> Diagnosis:
    return msgspec.structs.replace(TOLD, **changes)


def _weight(**changes: Any) -> Blamed:
    return msgspec.structs.replace(WEIGHT, **changes)


def _half(**changes: Any) -> Diagnosis:
    assert HALF.half is not None
    half = msgspec.structs.replace(HALF.half, **changes)
    return _told(
        causes=(Cause.PRECISION,),
        blamed=(msgspec.structs.replace(HALF, half=half),),
        one_off={"L:norm1": 0.9, "L:out": 0.1},
        emulated=half.kind,
        reproduced=1.0,
    )


def _faulty(fault: WeightFault, share: float, *channels: int) -> Diagnosis:
    off = OffTensor(site=0, fault=fault, share=share, channels=channels)
    return _told(
        blamed=(_weight(off=(off,)),),
        origin=WeightsOrigin.FAULTS,
        off=(NamedTensor(site="W:conv1", tensor=off),),
        n_moved=1,
    )


MOVED = OffTensor(site=0, fault=WeightFault.VALUES, share=0.2)
CASES = {
    "rounding-by-channel": _told(blamed=(WEIGHT,)),
    "rounding-by-tensor": _told(blamed=(_weight(is_by_channel=False),)),
    "weights-of-unknown-steps": _told(blamed=(WEIGHT,), n_tensors=0),
    "channel": _faulty(WeightFault.CHANNELS, 0.0625, 3),
    "channels": _faulty(WeightFault.CHANNELS, 0.25, 0, 3, 5, 7),
    "bias": _faulty(WeightFault.BIAS, 1.0),
    "zero-point": _faulty(WeightFault.SHIFT, 0.98),
    "values": _faulty(WeightFault.VALUES, 0.9999),
    "moved-on-purpose": _told(
        blamed=(_weight(off=(MOVED,)),), origin=WeightsOrigin.MOVED, n_moved=18, n_tensors=20
    ),
    "saturation": _told(causes=(Cause.SATURATION,), blamed=(RANGE,)),
    "range-of-every-slice": _told(
        causes=(Cause.SATURATION, Cause.NOT_THIS_SLICE), blamed=(RANGE,), elsewhere=0.1
    ),
    "weight-of-every-slice": _told(
        causes=(Cause.WEIGHTS, Cause.NOT_THIS_SLICE), blamed=(WEIGHT,), elsewhere=0.1
    ),
    "others-stay-damaged": _told(
        causes=(Cause.WEIGHTS, Cause.NOT_THIS_SLICE),
        blamed=(_weight(heals=0.7, flips_left=0.03, elsewhere_left=0.06),),
        elsewhere=0.1,
    ),
    "another-cause-is-left": _told(
        causes=(Cause.SATURATION,),
        blamed=(msgspec.structs.replace(RANGE, heals=0.6, flips_left=0.05),),
    ),
    "rounding-in-blocks": _told(blamed=(_weight(block_size=32),), one_off={"W:conv1": 0.9, "W:conv2": 0.1}),
    "range-found-while-it-runs": _told(causes=(Cause.RESOLUTION,), blamed=(FOUND,)),
    "fp16-overflow": _half(),
    "fp16-too-small": _half(above=0.0, below=0.4, largest=0.01),
    "fp16-rounding": _half(above=0.0, largest=12.0),
    "bf16-rounding": _half(kind="BF16", bits=8, above=0.0, largest=12.0, most=3.39e38),
    "spread": _told(
        causes=(Cause.WEIGHTS, Cause.SPREAD),
        blamed=(_weight(heals=0.4, flips_left=0.07), msgspec.structs.replace(RANGE, heals=0.5)),
    ),
    "clipping-together": _told(causes=(Cause.SATURATION,), clipping=CLIPPING, together={"A": 0.93, "W": 0.1}),
    "no-cause": _told(verdict=DiagnosisVerdict.NOBODY, causes=(Cause.INPUT,), together={"A": 0.4, "W": 0.35}),
    "within-budget": _told(
        verdict=DiagnosisVerdict.NOBODY,
        causes=(Cause.WITHIN_BUDGET,),
        flips=0.004,
        one_off={},
        fresh_flips=None,
    ),
    "too-few": _told(verdict=DiagnosisVerdict.TOO_FEW, causes=(), n_damaged=5, flips=0.01, one_off={}),
    "exemplars-alone": _told(
        blamed=(_weight(flips_left=None),), fresh_flips=None, rounding=0.011, reproduced=0.985
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_what_the_file_says(name: str) -> None:
    """Each sentence follows from the record; a change of one is seen as a change of a file."""
    found = CASES[name]
    blocks = diagnosed(found, model="digits", slice_name="scanner=archive")
    text = "\n".join(map(str, blocks)) + "\n"
    if found.verdict is not DiagnosisVerdict.TOO_FEW:  # an alert gets no note of it
        text += f"\n{sentence_of(found)}\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("QUANTDRIFT_WRITE"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_each_file_has_its_case() -> None:
    """No file is left behind."""
    assert {path.stem for path in FOLDER.glob("*.txt")} == CASES.keys()


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.0, "0 %"),
        (0.00001, "below 0.01 %"),
        (0.0123, "1.23 %"),
        (0.99951, "99.95 %"),
        (0.9999, "99.99 %"),
        (0.9999999, "99.99 %"),
        (1.0, "100 %"),
    ],
)
def test_a_part_is_not_the_whole(ratio: float, text: str) -> None:
    """100 % and 0 % are printed of these numbers alone."""
    assert part(ratio) == text
