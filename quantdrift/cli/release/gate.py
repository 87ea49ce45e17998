"""The command `quantdrift gate`, which judges a candidate on every slice."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

import quantdrift
from quantdrift.cli.look.alerts import NO_NOTE
from quantdrift.cli.options import CONFIG, DATA, JSON, emit, set_up_logs, span_of
from quantdrift.cli.output import ProgressLine
from quantdrift.cli.release.reference import REFERENCE
from quantdrift.core.config.load import load
from quantdrift.core.errors import OperatorError
from quantdrift.core.slices import ALL
from quantdrift.core.text import plain_lines

_EXIT: Final = {"pass": 0, "fail": 3, "insufficient": 4}
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Candidate(click.Path):
    """A file, a folder, or the address of a server."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if "://" in str(value) else super().convert(value, param, ctx)


@click.command()
@click.argument("candidate", type=_Candidate(exists=True))
@CONFIG
@click.option("--model", default="", help="The model.  [default: the only one of the configuration]")
@click.option(
    "--inputs",
    type=click.Path(exists=True, path_type=Path),
    help="Recorded inputs: a .npz or .safetensors file, of a language model .jsonl, or a folder of them.",
)
@click.option("--live", is_flag=True, help="Judge on the live traffic from now on, in place of --inputs.")
@click.option("--wait", default="1d", show_default=True, help="With --live: longest time: 30m, 2h, 1d.")
@click.option(
    "--any-hour",
    is_flag=True,
    help="With --live: pass without having seen every hour of the day, of which the traffic may differ.",
)
@click.option(
    "--route",
    "routes",
    multiple=True,
    metavar="SLICE=FILE",
    help="FILE serves this slice, and CANDIDATE the rest. Repeatable.",
)
@DATA
@click.option(
    "--against",
    type=_FILE,
    help="The model that is serving: the candidate must not be worse. With --route it may be CANDIDATE itself, with --live it must be: then the"
    " routes alone change answers, and of the slices that they do not serve only harm is asked.",
)
@click.option(
    "--calibration",
    "calibration",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE",
    help="What the candidate was calibrated on: recorded inputs, repairs.json or quantised.json. Such rows do not count. Repeatable. The"
    " record beside a file is read without it.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="With --against or --live: largest share of regressions minus fixes.  [default: half of the budget]",
)
@click.option(
    "--mlperf",
    type=click.Choice(["99", "99.9"]),
    help="Require this percentage of the reference's accuracy, over all inputs or all traffic.",
)
@click.option("--labels", default="", metavar="NAME", help="With --mlperf: the array with the true classes.")
@click.option(
    "--reference-accuracy",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --mlperf, without labels: a lower bound of the reference's accuracy, as a share.",
)
@click.option(
    "--slice",
    "slices",
    multiple=True,
    metavar="RULE",
    help="Judge only the slices of this rule, and all inputs together; `all`: only these; `cluster`, `novel`, `discovered`: learned and"
    " discovered ones. Repeatable.  [default: every rule, and what the database knows without `novel`, which is rare by design]",
)
@click.option(
    "--divergence",
    is_flag=True,
    help="Ask for the divergence, too: its mean must be below models.budget.divergence.",
)
@click.option(
    "--latency-p99",
    "latency_p99_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="The p99 of the candidate's latency must be below it: measured on the inputs, or from --load.",
)
@click.option(
    "--latency-p95",
    "latency_p95_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="The same of the p95.",
)
@click.option(
    "--throughput",
    "throughput_per_s",
    type=click.FloatRange(0, min_open=True),
    metavar="PER_S",
    help="The candidate must answer at least so many requests per second: measured on the inputs, or from --load.",
)
@click.option(
    "--error-share",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="With --load: the share of requests without an answer must be below it.",
)
@click.option(
    "--load",
    "loads",
    multiple=True,
    metavar="FILE",
    help="A finished load run: JSON of quantdrift load, perf_analyzer's CSV, MLPerf's mlperf_log_summary.txt, or other JSON. Without a budget here it is"
    " judged by those of models.budget; without --inputs and --live nothing else is. With --route also SLICE=FILE for each route.",
)
@click.option(
    "--alert",
    type=click.IntRange(min=1),
    metavar="ALERT",
    help="Judge only the slice of this alert, and all inputs together: in place of --model and --slice.",
)
@click.option(
    "--note",
    type=click.IntRange(min=1),
    metavar="ALERT",
    help="Write the verdict on every slice to this alert as a note. --alert does it itself.",
)
@REFERENCE
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="Probability of a wrong pass, at most, and of a wrong failure. For one of K candidates: 0.05 / K.",
)
@click.option(
    "--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write the answers as JUnit XML, too."
)
@click.option(
    "--other-weights",
    is_flag=True,
    help="The weights are not those of the reference, rounded, on purpose: of a model that was trained further. Its answers judge it.",
)
@click.option(
    "--generate",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Of a language model, with --inputs: it also answers N of the prompts by itself, and is asked for broken answers and unlikely tokens.",
)
@NO_NOTE
@JSON
def gate(
    candidate: str,
    config_path: Path,
    wait: str,
    routes: tuple[str, ...],
    loads: tuple[str, ...],
    number: int | None,
    junit: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Judge whether CANDIDATE, an ONNX file, is good enough on every slice, before it is deployed.

    Of a language model it is a folder, a .gguf file or the address of an OpenAI-compatible server, and --inputs are recorded prompts (.jsonl):
    both models score the answers token by token. With --live they score what was served.

    It runs the reference and the candidate on recorded inputs, compares their outputs like the shadow, and asks whether each slice
    is within the budget of the model. Inputs that the candidate was calibrated with do not count as evidence: leave them out. Learned and
    discovered slices are judged, too, where the command can read the database; else it says that they are not.

    With --live it records the candidate in the database, and judges it on samples that are captured from then on. If its outputs are arrays, it
    is compared with what was served, too. `/gate/ID` at the monitor's admin port has the verdict, for a day.

    Exit code 0 if every slice passes, 3 if one fails, 4 if there is not enough evidence, with how many inputs are missing; 1 and 2 are
    errors, 130 Ctrl-C and 143 SIGTERM: no verdict.

    \b
    Examples:
      quantdrift gate digits-int8.onnx --inputs recorded.npz
      quantdrift gate repaired.onnx --inputs recorded/ --against digits-int8.onnx --junit gate.xml
      quantdrift gate digits-int8.onnx --inputs recorded.npz --mlperf 99.9 --labels class
      quantdrift gate repaired.onnx --inputs recorded.npz --alert 7
      quantdrift gate repaired.onnx --live --route scanner=archive=archive-int8.onnx
      quantdrift gate small-q4_0.gguf --live
      quantdrift gate http+plaintext://candidate:8000 --load load.json --latency-p99 0.02 --throughput 300
    """
    from quantdrift.core.process.run import SignalStop

    stops: list[SignalStop] = []

    def stop() -> SignalStop:
        stops.append(SignalStop())
        return stops[-1]

    _check_writable(junit)
    if options["live"] or options["alert"] or options["note"]:
        set_up_logs(load(config_path))
    files = _routes(routes)
    with ProgressLine(quiet=as_json, name="quantdrift: ") as progress:
        result = quantdrift.gate(
            candidate,
            config=config_path,
            wait=span_of("--wait", wait),
            routes=files,
            loads=_loads(loads, {ALL: Path(candidate), **files}),
            reference=number,
            stop=stop,
            progress=progress,
            **options,
        )
    if as_json:
        emit(result.to_dict())
    else:
        click.echo(plain_lines(str(result)))
    if result.live and result.live.interrupted:
        sys.exit(stops[0].exit_code)
    if junit is not None:
        try:
            junit.write_bytes(result.junit())
        except OSError as error:
            raise OperatorError(f"--junit {junit} cannot be written: {error.strerror}") from error
    sys.exit(_EXIT[result.decision.verdict.value])


def _routes(routes: Sequence[str]) -> dict[str, Path]:
    """Return the slice and the file of each `--route`; names of slices have equals signs, too."""
    files: dict[str, Path] = {}
    for route in routes:
        name, _, file = route.rpartition("=")
        if not name or not Path(file).is_file():
            raise OperatorError(
                f"--route {route}: write SLICE=FILE, such as scanner=archive=archive.onnx, with a file that is there"
            )
        if name in files:
            raise OperatorError(
                f"--route {route}: {files[name]} serves this slice already: give one --route for each slice"
            )
        files[name] = Path(file)
    return files


def _loads(loads: Sequence[str], models: dict[str, Path]) -> dict[str, Path]:
    """Return the load run of each model that `--load` names, by its slice."""
    files: dict[str, Path] = {}
    for load_run in loads:
        named, _, file = ("", "", load_run) if Path(load_run).is_file() else load_run.rpartition("=")
        of = named or ALL
        if not Path(file).is_file():
            raise OperatorError(f"--load {load_run}: there is no file {file}")
        if of in files:
            raise OperatorError(f"--load {load_run}: {models[of]} has two load runs: give one")
        files[of] = Path(file)
    return files


def _check_writable(path: Path | None) -> None:
    """Check that the JUnit file can be written, before what may take hours; a file that is there stays as it is."""
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise OperatorError(f"--junit {path} cannot be written: {error.strerror}") from error
