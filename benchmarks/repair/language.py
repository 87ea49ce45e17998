"""Faults in the weights of a small language model with 4 bits in blocks, and whether its layers and matrices are named.

- `culprit_first_language`: share of single faults that are named first, the matrix where one has the fault: 2 bits, other values, a whole
  block at 2 bits, rows of the tokens of one language.
- `both_of_two_language`: share of pairs of matrices with other values that are the two that are named.
- `accused_language`: share of sound candidates with 3 to 5 bits, with a budget below their rounding, of which a layer is named that heals less than half more than its share of the weights, on
  answers that nothing was chosen by. One that heals more is no false accusation: its rounding does more than that of others. `named_language` is the share of which any layer is named.
- `stale_language`: share of candidates of other checkpoints, at 8 bits or in FP32, that are not refused.

A fault is raised until the slice diverges by five times what rounding does; one that never does is drawn again.
"""

import copy
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.random import Generator

from benchmarks.repair.cases import Cases
from quantdrift.core.errors import OperatorError
from quantdrift.facts.language_diagnosis import LanguageDiagnosis

_N: Final = 160  # answers of each language
_FIRES: Final = 5.0
_MORE: Final = 1.5  # times its share of the weights
_STRENGTHS: Final = 12
_NO_BUDGET: Final = 1.9  # just below the cap of an answer
_CONFIG: Final = """
[shadow]
provider = "cpu"
threads = 1
[capture]
protocols = ["openai-chat"]
headers = ["x-language"]
[[models]]
name = "polyglot"
task = "generation"
[models.budget]
divergence = {budget}
[[models.references]]
runtime = "transformers"
path = "{reference}"
[[slices]]
name = "language"
header = "x-language"
values = ["en", "de", "es", "fr"]
"""
_EMBEDDING: Final = "model.embed_tokens.weight"


class LanguageScale(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each are tried."""

    faults: int = 24
    pairs: int = 10
    sound: int = 10
    stale: int = 6


QUICK: Final = LanguageScale(faults=4, pairs=1, sound=1, stale=2)


def language_figures(scale: LanguageScale, cases: Cases) -> dict[str, float]:
    """Return the figures."""
    first = cases.each("faults in a language model", _is_first, range(scale.faults))
    both = cases.each("pairs of them", _are_both, range(scale.pairs))
    sound = cases.each("sound ones", _sound, range(scale.sound))
    stale = cases.each("other checkpoints", _is_taken, range(scale.stale))
    return {
        "culprit_first_language": float(np.mean(first)),
        "both_of_two_language": float(np.mean(both)),
        "accused_language": float(np.mean([accused for _, accused in sound])),
        "named_language": float(np.mean([named for named, _ in sound])),
        "stale_language": float(np.mean(stale)),
    }


class _Polyglot:
    """The model, and a recording of it."""

    def __init__(self, folder: Path) -> None:
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - as above

        from quantdrift.demo.text.model import TextSize, trained  # noqa: PLC0415 - torch and transformers
        from quantdrift.demo.text.sentences import Language, draw  # noqa: PLC0415 - as above

        disable_progress_bar()

        self.folder = folder / "polyglot"
        self.folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(3)
        size = TextSize(vocabulary=512, width=64, layers=4, steps=200, rows=16)
        self.model, self.tokenizer = trained(3, rng, lambda _: None, size)
        self.save("reference", self.model)
        lines, ids = [], dict[str, set[int]]()
        for language in Language:
            for _ in range(_N):
                said = draw(language, rng)
                asked = [{"role": "user", "content": said.question}]
                lines.append({"language": language.value, "messages": asked, "answer": said.answer})
                tokens = self.tokenizer(said.question + said.answer)["input_ids"]
                ids.setdefault(language.value, set()).update(tokens)
        (self.folder / "recorded.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        self.rows = sorted(ids["de"].difference(*(of for name, of in ids.items() if name != "de")))

    def save(self, name: str, model: Any) -> Path:
        for each in (model, self.tokenizer):
            each.save_pretrained(self.folder / name)
        return self.folder / name

    def quantised(self, bits: int = 4) -> Any:
        """Return a sound candidate."""
        import torch  # noqa: PLC0415 - seconds

        made = copy.deepcopy(self.model)
        with torch.no_grad():
            for weight in made.parameters():
                if weight.dim() == 2:
                    weight.copy_(in_bits(weight, bits))
        return made

    def diagnosed(self, candidate: Any, *, budget: float) -> LanguageDiagnosis:
        """Return the diagnosis of one language."""
        from quantdrift import diagnose  # noqa: PLC0415 - as a user

        path = self.save("candidate", candidate)
        config = self.folder / "config.toml"
        config.write_text(_CONFIG.format(budget=budget, reference=self.folder / "reference"))
        inputs = self.folder / "recorded.jsonl"
        found = diagnose(candidate=path, inputs=inputs, config=config, slice="language=de").diagnosis
        assert isinstance(found, LanguageDiagnosis)
        return found


def _places(found: LanguageDiagnosis) -> list[str]:
    """Return the matrices that are named, and the layers of which none is."""
    return [
        name
        for layer in found.blamed
        for name in ([matrix.name for matrix in layer.matrices] or [layer.layer])
    ]


@functools.cache
def _polyglot(folder: Path) -> _Polyglot:
    return _Polyglot(folder)


@functools.cache
def _rounding(folder: Path) -> float:
    """Return how far a sound candidate diverges."""
    polyglot = _polyglot(folder)
    return polyglot.diagnosed(polyglot.quantised(), budget=_NO_BUDGET).divergence


def in_bits(weight: Any, bits: float) -> Any:
    """Return a weight with so many bits, 32 neighbours with one scale."""
    most = round(2 ** (bits - 1))
    blocks = weight.detach().reshape(-1, 32)
    step = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / (most - 0.5)
    return ((blocks / step).round().clamp(-most, most - 1) * step).reshape(weight.shape)


def _is_first(folder: Path, seed: int) -> bool:
    kind = (_noisy, _coarse, _block, _rows)[seed % 4]
    fault = _firing(folder, kind, np.random.default_rng(seed))
    named = _named(folder, [fault])
    found = bool(named) and named[0] == fault.place
    if not found:
        print(f"missed, seed {seed}: {fault.what} at {fault.place}, named {named}", file=sys.stderr)
    return found


def _are_both(folder: Path, seed: int) -> bool:
    rng = np.random.default_rng(100 + seed)
    one = _firing(folder, _noisy, rng)
    other = one
    while layer_name(other.place) == layer_name(one.place):  # in another block
        other = _firing(folder, _noisy, rng)
    named = _named(folder, [one, other])
    found = set(named) == {one.place, other.place}
    if not found:
        print(f"missed, seed {seed}: {one.place} and {other.place}, named {named}", file=sys.stderr)
    return found


def layer_name(matrix: str) -> str:
    """Return the block of a matrix: `model.layers.3`."""
    return ".".join(matrix.split(".")[:3])


def _sound(folder: Path, seed: int) -> tuple[bool, bool]:
    """Return whether a layer is named in a candidate of some bits, and whether one that does not do more than others."""
    polyglot, bits = _polyglot(folder), 3 + seed % 3
    found = polyglot.diagnosed(polyglot.quantised(bits), budget=1e-5)
    idle = [layer.layer for layer in found.blamed if layer.heals <= _MORE * layer.share]
    if idle:
        print(f"accused in {bits} bits: {idle}", file=sys.stderr)
    return bool(found.blamed), bool(idle)


def _is_taken(folder: Path, seed: int) -> bool:
    import torch  # noqa: PLC0415 - seconds

    polyglot, rng = _polyglot(folder), np.random.default_rng(200 + seed)
    generator = torch.Generator().manual_seed(seed)
    made, spread = copy.deepcopy(polyglot.model), rng.uniform(0.1, 0.4)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() == 2:
                moved = weight + spread * weight.std() * torch.randn(weight.shape, generator=generator)
                weight.copy_(in_bits(moved, 8) if seed % 2 else moved)
    try:
        polyglot.diagnosed(made, budget=1e-5)
    except OperatorError:
        return False
    return True


class _Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: where it is, what it is, and what changes the candidate's weights by the reference's, with a strength from 1."""

    place: str
    what: str
    change: Callable[[dict[str, Any], dict[str, Any], int], None]
    strength: int = 1


def _matrix(polyglot: _Polyglot, rng: Generator) -> str:
    names = [
        name for name, _ in polyglot.model.named_parameters() if ".layers." in name and "norm" not in name
    ]
    chosen: str = names[int(rng.integers(len(names)))]
    return chosen


def _noisy(polyglot: _Polyglot, rng: Generator) -> _Fault:
    import torch  # noqa: PLC0415 - seconds

    name, seed = _matrix(polyglot, rng), int(rng.integers(1 << 30))

    def change(weights: dict[str, Any], raw: dict[str, Any], strength: int) -> None:
        noise = torch.randn(raw[name].shape, generator=torch.Generator().manual_seed(seed))
        weights[name].add_(0.15 * strength * raw[name].std() * noise)

    return _Fault(place=name, what="other values", change=change)


def _coarse(polyglot: _Polyglot, rng: Generator) -> _Fault:
    name = _matrix(polyglot, rng)

    def change(weights: dict[str, Any], raw: dict[str, Any], strength: int) -> None:
        weights[name].copy_((1 + 0.2 * (strength - 1)) * in_bits(raw[name], 2))

    return _Fault(place=name, what="2 bits", change=change)


def _block(polyglot: _Polyglot, rng: Generator) -> _Fault:
    place = f"model.layers.{int(rng.integers(polyglot.model.config.num_hidden_layers))}"

    def change(weights: dict[str, Any], raw: dict[str, Any], strength: int) -> None:
        for name, weight in weights.items():
            if name.startswith(f"{place}.") and weight.dim() == 2:
                weight.copy_((1 + 0.1 * (strength - 1)) * in_bits(raw[name], 2))

    return _Fault(place=place, what="a block at 2 bits", change=change)


def _rows(polyglot: _Polyglot, rng: Generator) -> _Fault:
    rows = [row for row in polyglot.rows if rng.random() < 0.8]

    def change(weights: dict[str, Any], raw: dict[str, Any], strength: int) -> None:
        row = raw[_EMBEDDING][rows]
        signs = row.sign() * row.abs().mean(dim=1, keepdim=True)
        weights[_EMBEDDING][rows] = row + min(0.3 * strength, 2.0) * (signs - row)

    return _Fault(place="model.embed_tokens", what="rows of one language", change=change)


def _firing(folder: Path, kind: Callable[[_Polyglot, Generator], _Fault], rng: Generator) -> _Fault:
    """Draw a fault of a kind, and raise it until the slice diverges by it."""
    polyglot, rounding = _polyglot(folder), _rounding(folder)
    while True:
        drawn = kind(polyglot, rng)
        for strength in range(1, _STRENGTHS + 1):
            fault = msgspec.structs.replace(drawn, strength=strength)
            found = polyglot.diagnosed(_with(polyglot, [fault]), budget=_NO_BUDGET)
            if found.divergence >= _FIRES * rounding:
                return fault


def _with(polyglot: _Polyglot, faults: list[_Fault]) -> Any:
    """Return a candidate with some faults."""
    import torch  # noqa: PLC0415 - seconds

    candidate, raw = polyglot.quantised(), dict(polyglot.model.named_parameters())
    with torch.no_grad():
        for fault in faults:
            fault.change(dict(candidate.named_parameters()), raw, fault.strength)
    return candidate


def _named(folder: Path, faults: list[_Fault]) -> list[str]:
    """Return what is named of a candidate with some faults."""
    polyglot, rounding = _polyglot(folder), _rounding(folder)
    return _places(polyglot.diagnosed(_with(polyglot, faults), budget=1.5 * rounding))
