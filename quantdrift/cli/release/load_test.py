"""The command `quantdrift load`, which drives an endpoint in the shape of production."""

import sys
from pathlib import Path
from typing import Any, Final

import click

import quantdrift
from quantdrift.cli.options import CONFIG, JSON, data_option, emit, span_of
from quantdrift.cli.output import ProgressLine
from quantdrift.core.text import plain_lines

_STOPPED: Final = 1
_SPANS: Final = ("window", "most_time")
_SECONDS: Final = click.FloatRange(0, 3600, min_open=True)


@click.command("load")
@click.argument("url")
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(),
    metavar="RECORDING|live",
    help="The requests: `live`, those that are captured from now on; a .jsonl file of requests or prompts; or recorded inputs, a .npz or"
    " .safetensors file or a folder of them, as for quantdrift gate.",
)
@click.option(
    "--allow",
    multiple=True,
    metavar="URL",
    help="An endpoint that may be driven, beside those of load.targets. Repeatable.",
)
@CONFIG
@data_option("NATS")
@click.option("--model", default="", help="The model.  [default: the only one of the configuration]")
@click.option(
    "--window", default="1m", show_default=True, help="With --from live: how long to watch: 30s, 5m."
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --from live: write the requests to this .jsonl file, for another run. It has what clients sent.",
)
@click.option(
    "--step",
    "step_s",
    type=_SECONDS,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time of each load.",
)
@click.option(
    "--sustain",
    "sustain_s",
    type=_SECONDS,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time of the sustained load.",
)
@click.option(
    "--sustain-at",
    type=click.FloatRange(0, min_open=True),
    metavar="PER_S",
    help="The sustained load, in requests per second.  [default: 1.1 times models.budget.throughput_per_s, or 0.8 times the knee]",
)
@click.option(
    "--most-requests",
    type=click.IntRange(min=1),
    default=200_000,
    show_default=True,
    help="End before a load with which there would be more.",
)
@click.option("--most-time", default="15m", show_default=True, help="End before a load that would end later.")
@click.option(
    "--most-errors",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="End where a larger share of a load's requests has no answer.",
)
@click.option(
    "--most-in-flight",
    type=click.IntRange(1, 10_000),
    default=1000,
    show_default=True,
    help="A request that is due while so many are under way is not sent, and is an error.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=_SECONDS,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="A request without an answer after so long has none.",
)
@click.option(
    "--metrics",
    default="",
    metavar="URL",
    help="Triton's metrics, for its queue time, such as http://127.0.0.1:8002/metrics.  [default: its statistics at URL, if it has them]",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a bearer token for the endpoint.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures as JSON, for quantdrift gate --load.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a picture of latency and errors over the load, with the knee: a .svg or .png file.",
)
@JSON
def load(url: str, config_path: Path, *, as_json: bool, **options: Any) -> None:
    """Drive the endpoint URL in the shape of production, past the load at which requests begin to queue.

    URL is http://HOST:PORT with or without a path, https://, or grpc://HOST:PORT or grpcs:// for the Open Inference Protocol over gRPC.

    It sends recorded requests, each when it is due, whether or not those before were answered: single ones first, then rising loads with the gaps
    of the recording, then a sustained load, then a burst. It says how long a request takes alone, p50, p95, p99 and errors of each load, the
    knee (the load at which requests wait as long as a single one takes) with a 95 % interval, and what the endpoint keeps up for a minute.

    A load test takes an endpoint beyond what it can do. It drives only what load.targets of the configuration or --allow names.

    Exit code 0 at its end, 1 if errors or a bound ended it before or nothing answers, 2 if you must change something, 130 Ctrl-C, 143 SIGTERM.
    What was measured until then is printed and written.

    \b
    Examples:
      quantdrift load http://127.0.0.1:8000 --from recorded.npz --allow http://127.0.0.1:8000
      quantdrift load http://127.0.0.1:8000/predict --from requests.jsonl --out load.json --picture load.svg
      quantdrift load http+plaintext://candidate:8000 --from live --window 5m --record requests.jsonl
      quantdrift load grpc://127.0.0.1:8001 --from recorded.npz --allow grpc://127.0.0.1:8001
      quantdrift gate digits-int8.onnx --load load.json --latency-p99 0.02 --throughput 300
    """
    from quantdrift.core.process.run import SignalStop
    from quantdrift.release.load_test.load import UnwrittenError

    stops: list[SignalStop] = []

    def stop() -> SignalStop:
        stops.append(SignalStop())
        return stops[-1]

    for name in _SPANS:
        options[name] = span_of(f"--{name.replace('_', '-')}", options[name])
    unwritten: UnwrittenError | None = None
    with ProgressLine(quiet=as_json, name="quantdrift: ") as progress:
        try:
            result = quantdrift.load(url, config=config_path, stop=stop, progress=progress, **options)
        except UnwrittenError as error:
            result, unwritten = error.result, error
    if as_json:
        emit(result.to_dict())
    else:
        click.echo(plain_lines(str(result)))
    if unwritten is not None:
        raise unwritten
    if result.interrupted:
        sys.exit(stops[0].exit_code)
    if not result.finished:
        sys.exit(_STOPPED)
