"""The command `quantdrift diagnose`, which names the quantised sites that damage a slice."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

import quantdrift
from quantdrift.cli.look.alerts import NO_NOTE
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, set_up_logs
from quantdrift.cli.output import ProgressLine
from quantdrift.cli.release.reference import REFERENCE
from quantdrift.core.config.load import load

if TYPE_CHECKING:
    from quantdrift.release.result import Result

_EXIT: Final = {"named": 0, "no cause found": 3, "too few exemplars": 4}
FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
MODEL = click.option("--model", default="", help="Without ALERT: the model.  [default: the only one]")
SLICE = click.option("--slice", default="", help="Without ALERT: the slice, such as scanner=archive.")
_CANDIDATE: Final = click.Path(exists=True, path_type=Path)
_Answer = TypeVar("_Answer", bound="Result")


def answer(
    call: Callable[..., _Answer], config_path: Path, number: int | None, *, as_json: bool, **options: Any
) -> _Answer:
    """Print what a function of the Python API answers, its progress meanwhile, and return it."""
    if options["alert"]:
        set_up_logs(load(config_path))
    with ProgressLine(quiet=as_json) as progress:
        result = call(config=config_path, reference=number, progress=progress, **options)
    if as_json:
        emit(result.to_dict())
    else:
        click.echo(str(result))
    return result


@click.command()
@click.argument("alert", metavar="[ALERT]", type=click.IntRange(min=1), required=False)
@click.option(
    "--candidate",
    type=_CANDIDATE,
    required=True,
    help="The quantised model that serves: an ONNX file (QDQ, weights in blocks, dynamic INT8, FP16, BF16, decision trees), an exported program (.pt2), with --factory a file of weights, or"
    " the folder of a language model.",
)
@click.option(
    "--factory",
    metavar="MODULE:FUNCTION",
    default="",
    help="In PyTorch: the function that makes the candidate. It gets the path of CANDIDATE if it takes an argument; else its module is"
    " filled with the safetensors there.",
)
@click.option(
    "--digest",
    metavar="sha256:HEX",
    default="",
    help="Of a candidate that is an exported program, which is code: without it the digest is printed, and nothing is loaded.",
)
@click.option(
    "--inputs",
    type=click.Path(exists=True, path_type=Path),
    help="Recorded inputs: a .npz or .safetensors file, of a language model prompts in a .jsonl file, or a folder of them, as for quantdrift gate.  [default: the exemplars of the slice, or what waits in the stream]",
)
@CONFIG
@DATA
@MODEL
@SLICE
@REFERENCE
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a picture of the sites and ranges: a .svg or .png file.",
)
@NO_NOTE
@JSON
def diagnose(**options: Any) -> None:
    """Name the quantised sites of the candidate that damage a slice: that of ALERT, or the one of --slice.

    A site is an activation range, the weight of a layer, or a layer as a whole where these cannot be told apart; of decision trees,
    the thresholds at a column of the input, or the leaves. Each is put into FP32 alone and with others, on inputs of the slice; a site
    is named only if it restores more than 39 placebos do, on inputs on which it was not chosen. Where several activation ranges are too narrow
    together, the ranges that cut values off are named as a group, by the same rules. Of a language model the layers and then their matrices get the
    reference's weights, and what counts is the divergence per token. A healthy candidate is accused in at
    most 5 % of diagnoses. Without --inputs it works on the exemplars of the slice, or, if none of them was drawn at random, on what
    waits in the stream of samples. With ALERT the result becomes a note of the alert.

    Exit code 0 if a site is named, or ranges that clip together, 3 if none is to blame, 4 if there are too few inputs of the slice, or too few that are damaged; 1
    and 2 are errors, 2 also where this candidate cannot be diagnosed.

    \b
    Examples:
      quantdrift diagnose 12 --candidate models/digits-int8.onnx
      quantdrift diagnose 12 --candidate models/digits-int8.onnx --inputs recorded/
      quantdrift diagnose --slice scanner=archive --candidate digits-int8.onnx --inputs recorded.npz --picture cause.svg
      quantdrift diagnose 12 --candidate digits.safetensors --factory digits_models:int8
      quantdrift diagnose 12 --candidate models/int4 --inputs prompts.jsonl
    """
    result = answer(quantdrift.diagnose, **options)
    sys.exit(_EXIT[result.diagnosis.verdict.value])
