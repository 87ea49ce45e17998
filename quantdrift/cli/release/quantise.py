"""The command `quantdrift quantise`, which builds the cheapest quantised model that passes on every slice."""

import sys
from pathlib import Path
from typing import Any, Final

import click

import quantdrift
from quantdrift.cli.options import CONFIG, JSON, emit
from quantdrift.cli.output import ProgressLine
from quantdrift.cli.release.diagnose import FILE
from quantdrift.cli.release.reference import REFERENCE
from quantdrift.core.text import plain_lines
from quantdrift.facts.quantised import CostKind

_EXIT: Final = {"pass": 0, "fail": 3, "insufficient": 4}


@click.command()
@click.argument("file", metavar="[REFERENCE]", type=FILE, required=False)
@click.option(
    "--inputs",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Recorded inputs of all traffic: a .npz or .safetensors file, or a folder of them, as for quantdrift gate.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="A new folder for the model and the record; nothing in it is ever overwritten.",
)
@CONFIG
@click.option("--model", default="", help="The model.  [default: the only one of the configuration]")
@click.option(
    "--slice",
    "slices",
    multiple=True,
    metavar="RULE",
    help="Judge only the slices of this rule, and all inputs together; `all`: only these. Repeatable.  [default: every rule]",
)
@click.option(
    "--prefer",
    type=click.Choice([kind.value for kind in CostKind]),
    default=CostKind.SIZE.value,
    show_default=True,
    help="What makes one model cheaper: the size of its file, or the processor time of an answer.",
)
@click.option(
    "--max-recipes",
    type=click.IntRange(min=1),
    default=80,
    show_default=True,
    help="Try at most so many recipes.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Begin no recipe after so many minutes.",
)
@REFERENCE
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a picture of size, time and changed answers: a .svg or .png file.",
)
@JSON
def quantise(config_path: Path, number: int | None, *, as_json: bool, **options: Any) -> None:
    """Build the cheapest quantised model of REFERENCE, an ONNX file in FP32, that passes on every slice.

    It tries recipes: FP16; INT8 static per tensor or channel, symmetric or not, with ranges by min-max, percentiles or entropy, of all
    operators or some; INT8 dynamic; weights alone in INT8 or INT4 blocks; and the best ones with layers in FP32. The quantisers are those of
    ONNX Runtime. Without REFERENCE it takes the file of the configuration.

    One half of the recorded inputs calibrates and chooses. The other half judges what was chosen, slice by slice, as quantdrift gate does: the
    model that is written is not good enough on some slice with a probability of at most 5 %, however many recipes were tried.

    Exit code 0 if one passes, 3 if none is good enough, 4 if there are too few inputs to tell, with how many are missing; 1 and 2 are errors.

    \b
    Examples:
      quantdrift quantise digits-fp32.onnx --inputs recorded.npz --out quantised/
      quantdrift quantise --inputs recorded/ --out quantised/ --prefer time --picture curve.svg
    """
    with ProgressLine(quiet=as_json) as progress:
        result = quantdrift.quantise(config=config_path, reference=number, progress=progress, **options)
    if as_json:
        emit(result.to_dict())
    else:
        click.echo(plain_lines(str(result)))
    sys.exit(_EXIT[result.quantised.verdict.value])
