"""Make one small reference in every form that quantdrift takes, with a configuration for each.

    python -m examples.references.make --out out/references

Weights are drawn, with a seed: nothing is trained, and nothing is written anywhere else. What PyTorch saves holds paths,
versions and random numbers beside the weights, so digests are known only now: each is written into the configuration
that pins it.
"""

import argparse
import contextlib
import hashlib
import io
import logging
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from examples.references.digits_reference import SIDE, fp32

HERE: Final = Path(__file__).resolve().parent
NAME: Final = "digits-fp32"
_SEED: Final = 1
_UNKNOWN: Final = f"sha256:{64 * '0'}"


def make(directory: Path) -> None:
    """Write models and configurations to a directory, which is made where it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(_SEED)
    model = fp32().eval()
    example = {
        "pixels": torch.zeros(2, 1, SIDE, SIDE),
        "scanner": torch.zeros(2, dtype=torch.int32),
    }
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # deprecations inside the exporters, and of TorchScript
        _export(model, example, directory)
        torch.jit.save(torch.jit.script(model), directory / f"{NAME}.pt")
    save_file(model.state_dict(), directory / f"{NAME}.safetensors")
    shutil.copy(HERE / "digits_reference.py", directory)
    _lay_out(directory)
    for template in sorted(HERE.glob("*.toml")):
        (directory / template.name).write_text(_pinned(template.read_text(encoding="utf-8"), directory))


def _export(model: torch.nn.Module, example: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the exported program and the ONNX file; both take any number of items."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists the packages that it could do without
    items = torch.export.Dim("items")
    shapes = {name: {0: items} for name in example}
    program = torch.export.export(model, args=(), kwargs=dict(example), dynamic_shapes=shapes)
    torch.export.save(program, directory / f"{NAME}.pt2")
    torch.onnx.export(
        model,
        (),
        str(directory / f"{NAME}.onnx"),
        kwargs=dict(example),
        output_names=["logits"],
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _lay_out(directory: Path) -> None:
    """Write the ONNX file as Triton's model repository has it."""
    model = directory / "model-repository" / "digits"
    (model / "1").mkdir(parents=True, exist_ok=True)
    shutil.copy(directory / f"{NAME}.onnx", model / "1" / "model.onnx")
    shutil.copy(HERE / "config.pbtxt", model)


def _pinned(text: str, directory: Path) -> str:
    """Return a configuration with the digest of the file that its `path` names, where it pins one."""
    path = re.search(r'^path = "(.+?)"', text, re.MULTILINE)
    if path is None or _UNKNOWN not in text:
        return text
    return text.replace(_UNKNOWN, f"sha256:{hashlib.sha256((directory / path[1]).read_bytes()).hexdigest()}")


def main() -> None:
    """Make everything."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.references.make", description="Make one small reference in every form."
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    directory: Path = parser.parse_args().out
    make(directory)
    for file in sorted(one for one in directory.rglob("*") if one.is_file()):
        print(f"{file}  {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
