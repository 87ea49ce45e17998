"""The digits reader of the demo in a world of its own: five scanners, an INT8 build for them, and what goes wrong.

Builds are static INT8, made by the demo's own quantiser from the same FP32 reference, and differ in their calibration
scans alone:

- `int8-1`, which serves: everything that is sent before the onset, so before it nothing is wrong;
- `int8-2`: an older set of scans with less contrast, so that its activation ranges are stale;
- `int8-office`: clean pages alone.

The labels are those of scikit-learn's bundled digits; pages are held out from training and calibration.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.pools import Pool, balance, compare
from benchmarks.shifts import Case, Source, Stage, World
from quantdrift.core.config import Config
from quantdrift.core.config.schema import Budget, Model, Provider, Slice
from quantdrift.demo.model import INPUT, OUTPUT, REFERENCE, quantise
from quantdrift.demo.scans import Images, Labels, Scanner, Scans
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.tensors.arrays import Array
from quantdrift.models.tensors.features import features_of

NAME = "digits"
MODELS = Path("out/digits")
CURRENT, STALE, OFFICE = "int8-1", "int8-2", "int8-office"
_SLICES = (
    Slice(name="scanner", header="x-scanner", values=tuple(scanner.value for scanner in Scanner)),
    Slice(name="contrast", feature="contrast", edges=(0.1, 0.5)),
)
_BUDGET = Budget(flip=0.01, divergence=0.04)  # the demo's
_PER_POOL = 6_000
_CALIBRATION = 200
_SEED = 3
_SHARES = {
    Scanner.OFFICE: 0.28,
    Scanner.LAB: 0.18,
    Scanner.MICROFILM: 0.18,
    Scanner.MOBILE: 0.18,
    Scanner.ARCHIVE: 0.18,
}
_MIXED = {
    Scanner.OFFICE: 0.03,
    Scanner.LAB: 0.02,
    Scanner.MICROFILM: 0.63,
    Scanner.MOBILE: 0.02,
    Scanner.ARCHIVE: 0.3,
}
_STALE_CONTRAST = 0.7


class _Press:
    """Draws pages as they are acquired, by the condition's name.

    Before the onset the scanners differ less than in the demo: `lab` amplifies by 0.8 to 1.2, `mobile` has no stray
    light, and the pages of `archive` have 30 to 60 % of the usual contrast.
    """

    def __init__(self, scans: Scans) -> None:
        self._scans = scans

    def draw(self, condition: str, n: int, seed: int) -> tuple[Images, Labels]:
        rng = np.random.default_rng(seed)
        if condition in {"stray light", "negative", "faded"}:
            scanner = {
                "stray light": Scanner.MOBILE,
                "negative": Scanner.MICROFILM,
                "faded": Scanner.ARCHIVE,
            }[condition]
            return self._scans.draw(scanner, n, rng)
        low, high = _GAINS[condition]
        images, labels = self._scans.draw(Scanner.OFFICE, n, rng)
        return (images * rng.uniform(low, high, (n, 1, 1, 1))).astype(np.float32), labels


_GAINS = {
    "clean": (1.0, 1.0),
    "tuned": (0.8, 1.2),
    "pale": (0.3, 0.6),
    "amplified": (1.5, 2.5),
    "stale": (_STALE_CONTRAST, _STALE_CONTRAST),
}
_CONDITIONS = {
    Scanner.OFFICE: "clean",
    Scanner.LAB: "tuned",
    Scanner.MICROFILM: "negative",
    Scanner.MOBILE: "clean",
    Scanner.ARCHIVE: "pale",
}
_CALIBRATED_ON = {
    CURRENT: tuple(_CONDITIONS.values()),
    STALE: ("stale",),
    OFFICE: ("clean",),
}


class _Answers:
    """Pools, each made when it is asked for first."""

    def __init__(self, directory: Path) -> None:
        self._press = _Press(Scans.bundled()[1])
        self._reference = OnnxRuntime(directory / REFERENCE, provider=Provider.CPU, threads=1)
        self._candidates = {version: _Candidate(directory / f"{version}.onnx") for version in _CALIBRATED_ON}
        self._pools: dict[tuple[str, str], Pool] = {}

    def pool(self, condition: str, version: str = CURRENT) -> Pool:
        if (condition, version) not in self._pools:
            images, labels = self._press.draw(condition, _PER_POOL, _SEED)
            (logits,) = self._candidates[version].run([OUTPUT], {INPUT: images})
            self._pools[condition, version] = compare(
                f"{condition}, {version}",
                logits,
                self._reference.run({INPUT: images})[OUTPUT],
                labels,
                features_of(_SLICES, {INPUT: images}),
            )
        return self._pools[condition, version]


def build(directory: Path) -> None:
    """Train the reference and quantise it in each way, where that is missing; some twenty seconds."""
    if not (directory / REFERENCE).exists():
        command = [sys.executable, "-m", "quantdrift.demo.model", "--out", str(directory)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    learnable = _Press(Scans.bundled()[0])
    for version, conditions in _CALIBRATED_ON.items():
        path = directory / f"{version}.onnx"
        if not path.exists():
            scans = [learnable.draw(one, _CALIBRATION, _SEED)[0] for one in conditions]
            quantise(directory / REFERENCE, path, scans)


def world(directory: Path = MODELS) -> World:
    """Return the world; models are built where they are missing."""
    build(directory)
    answers = _Answers(directory)

    def stage(
        instead: dict[Scanner, tuple[tuple[Pool, float], ...]] | None = None,
        version: str = CURRENT,
        shares: dict[Scanner, float] | None = None,
    ) -> Stage:
        return Stage(
            version=version,
            sources=tuple(
                Source(
                    attributes={"header.x-scanner": scanner.value},
                    share=share,
                    pools=(instead or {}).get(scanner)
                    or ((answers.pool(_CONDITIONS[scanner], version), 1.0),),
                )
                for scanner, share in (shares or _SHARES).items()
            ),
        )

    clean, office = answers.pool("clean"), answers.pool("clean", OFFICE)
    bad = answers.pool("clean", STALE)
    few = balance(clean, office, bad)
    cases = (
        Case(
            name="stray light",
            told="mobile pages get stray light, which the calibration scans lacked",
            after=stage({Scanner.MOBILE: ((answers.pool("stray light"), 1.0),)}),
            shifted=("scanner=mobile",),
        ),
        Case(
            name="amplified",
            told="the lab's sensor gain rises from 0.8..1.2 to 1.5..2.5",
            after=stage({Scanner.LAB: ((answers.pool("amplified"), 1.0),)}),
            shifted=("scanner=lab", "contrast>=0.5"),
        ),
        Case(
            name="faded",
            told="the archive's ink fades from 30..60 % of the usual contrast to 1.3..4 %",
            after=stage({Scanner.ARCHIVE: ((answers.pool("faded"), 1.0),)}),
            shifted=("scanner=archive", "contrast<0.1"),
        ),
        Case(
            name="stale ranges",
            told="version int8-2 comes with the activation ranges of older scans, 0.7 of today's contrast",
            after=stage(version=STALE),
            shifted=(
                "all",
                "scanner=office",
                "scanner=lab",
                "scanner=microfilm",
                "scanner=mobile",
                "contrast[0.1,0.5)",
            ),
        ),
        Case(
            name="mixed builds",
            told=f"of the replicas behind office one answer in {1 / few:.0f} is a stale build's, the others' is better: same mean KL",
            after=stage({Scanner.OFFICE: ((office, 1 - few), (bad, few))}),
            shifted=("scanner=office",),
        ),
        Case(
            name="mix only",
            told="microfilm sends 63 % of the pages and archive 30 % (18 % each before); every scanner's pages are as before",
            after=stage(shares=_MIXED),
            shifted=(),
        ),
    )
    model = Model(name=NAME, output=OUTPUT, top_k=3, budget=_BUDGET)
    return World(model=NAME, config=Config(models=(model,), slices=_SLICES), before=stage(), cases=cases)


class _Candidate:
    """An INT8 build as it is served."""

    def __init__(self, path: Path) -> None:
        import onnxruntime  # noqa: PLC0415 - after the checks that cost nothing

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(self, outputs: list[str], inputs: dict[str, Array]) -> list[Array]:
        return [np.asarray(array) for array in self._session.run(outputs, inputs)]
