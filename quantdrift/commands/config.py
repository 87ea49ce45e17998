"""`quantdrift config`."""

from pathlib import Path

import click
import msgspec

from quantdrift.commands.options import CONFIG, JSON, emit
from quantdrift.core.config.load import load
from quantdrift.terminal import explained


@click.group("config")
def config_() -> None:
    """Check, explain and document the configuration."""


@config_.command("check")
@CONFIG
@click.option("--requests-per-s", type=float, help="Inference traffic of one pod, to expect a replay rate.")
@click.option(
    "--references", is_flag=True, help="Open each reference and check that it is FP32, as the shadow will."
)
@JSON
def config_check(config_path: Path, requests_per_s: float | None, references: bool, as_json: bool) -> None:
    """Say whether the configuration is sound and what it would do.

    Exit code 2 if it is not: every contradiction is listed at once.

    \b
    Example:
      quantdrift config check --requests-per-s 300 --references
    """
    from quantdrift.core.config.explain import explain

    config = load(config_path)
    explanation = explain(config, requests_per_s)
    missing = [
        f"reference file {path} of model `{model.name}` does not exist here (the shadow needs it)"
        for model in explanation.models
        for path in model.references.values()
        if not Path(path).is_file()
    ]
    explanation = msgspec.structs.replace(explanation, notes=explanation.notes + missing)
    if references:
        from shadow.onnx_runtime import inspect

        found = [
            inspect(Path(reference.path), reference.allow_reduced_precision)
            for model in config.models
            for reference in model.references
        ]
        checked = {one.path: f"{one.precision}, opset {one.opset}, sha256 {one.digest}" for one in found}
        explanation = msgspec.structs.replace(explanation, checked=checked)
    if as_json:
        emit(explanation)
    else:
        click.echo(explained(explanation, config_path))


@config_.command("show")
@CONFIG
@click.option("--defaults", is_flag=True, help="The annotated defaults instead of what is in force.")
def config_show(config_path: Path, defaults: bool) -> None:
    """Print the configuration in force as JSON, or the annotated defaults as TOML."""
    from quantdrift.core.config.render import default_toml

    if defaults:
        click.echo(default_toml(), nl=False)
    else:
        config = load(config_path)
        stream = msgspec.structs.replace(config.stream, url=config.stream.address)
        emit(msgspec.structs.replace(config, stream=stream))
