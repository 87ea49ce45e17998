"""The command `quantdrift policy`."""

from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from quantdrift.cli.options import CONFIG, JSON, embedded_address, emit
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config
from quantdrift.core.errors import RetryError
from quantdrift.core.notation import number
from quantdrift.core.sampling.policy_message import (
    ACCOUNT,
    DIRECTIVE,
    PolicyMessage,
    PolicySummary,
    decode_policy_message,
    decode_policy_summary,
)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the policy bucket.

    Parameters
    ----------
    directive
        The policy that the sidecars read, if any.
    age_s
        Time since the policy was made or confirmed.
    holds
        Whether sidecars still follow it.
    account
        The explanation of the policy, if any.
    """

    bucket: str
    directive: PolicyMessage | None
    age_s: float | None
    holds: bool
    account: PolicySummary | None


@click.group("policy")
def policy() -> None:
    """Show the sampling policy that the monitor publishes."""


@policy.command("show")
@CONFIG
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="QUANTDRIFT_DATA",
    help="Data directory of a running `quantdrift up`; the command uses its NATS.",
)
@JSON
def policy_show(config_path: Path, data: Path | None, as_json: bool) -> None:
    """Show the current sampling policy, its age, and the figures it was computed from.

    The command reads only NATS. Sidecars follow the policy if sampling.central is true and their configuration does
    not contradict it; the metric `quantdrift_sidecar_policy_refused_total` shows which ones do not.

    \b
    Example:
      quantdrift policy show -c config.toml --json
    """
    import asyncio

    from quantdrift.cli.output import columns

    config = at_data(load(config_path), data)
    try:
        shown = asyncio.run(_read(config))
    except RetryError as error:
        if data is not None:
            raise
        raise RetryError(f"{error}. To use the NATS of a running `quantdrift up`, give --data") from error
    if as_json:
        emit(shown)
        return
    if shown.directive is None:
        click.echo(f"There is no policy in {shown.bucket}: the configured rates are in effect.")
        if not config.sampling.replays_per_s:
            click.echo("sampling.replays_per_s is 0, so the monitor publishes none.")
        return
    click.echo(_headline(shown, shown.directive))
    if shown.account is not None:
        click.echo(_why(shown.account, shown.directive.lag_factor))
        rows = [
            (
                f"{one.model}: {one.name}",
                number(one.traffic_per_s, 3),
                number(one.replays_per_s * shown.directive.lag_factor, 3),
                f"{one.evidence_share:.1%}",
            )
            for one in shown.account.slices
        ]
        click.echo("\n" + columns(("slice", "items/s", "replayed/s", "share of evidence"), rows))
        if shown.account.n_slices > len(rows):
            click.echo(f"and {shown.account.n_slices - len(rows)} more")
    rates = [(one.name, f"{100 * one.rate:.4g}%") for one in shown.directive.policy.header_strata]
    click.echo("\n" + columns(("header stratum", "taken"), rows=rates))
    totals = [(one.name, f"{100 * one.rate:.4g}%") for one in shown.directive.policy.body_strata]
    click.echo("\n" + columns(("body stratum", "replayed (at most the taken rate)"), rows=totals))


def at_data(config: Config, data: Path | None) -> Config:
    """Return the configuration with the address of the embedded NATS server of `quantdrift up`, if it has one.

    Parameters
    ----------
    data
        Data directory of `quantdrift up`; None: leave the configuration as it is.

    Raises
    ------
    OperatorError
        It is not the data directory of a running `quantdrift up`.
    """
    if data is None:
        return config
    if not (data / "nats.url").exists() and (data / "dsn").exists():
        return config
    stream = msgspec.structs.replace(config.stream, url=embedded_address(data, "nats.url"))
    return msgspec.structs.replace(config, stream=stream)


async def _read(config: Config) -> Shown:
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.keyvalue import KeyValue

    queue = await Queue.connect(config.stream, client_name="quantdrift-policy")
    try:
        bucket = KeyValue(queue, config.stream)
        entry, summary = await bucket.get(DIRECTIVE), await bucket.get(ACCOUNT)
    finally:
        await queue.close()
    now = datetime.now(UTC)
    directive = decode_policy_message(entry.value) if entry else None
    account = decode_policy_summary(summary.value) if summary else None
    if directive is None or (account is not None and account.epoch != directive.policy.epoch):
        account = None  # of another leader, or half written
    return Shown(
        bucket=bucket.name,
        directive=directive,
        age_s=None if directive is None else (now - directive.issued_at).total_seconds(),
        holds=directive is not None and directive.holds(now.timestamp()),
        account=account,
    )


def _headline(shown: Shown, directive: PolicyMessage) -> str:
    state = "is in effect" if shown.holds else "has expired: the configured rates are in effect"
    return f"Policy {directive.policy.epoch} {state}; confirmed {shown.age_s:.0f} s ago, valid for {directive.valid_s:g} s."


def _why(account: PolicySummary, lag_factor: float) -> str:
    text = (
        f"Planned: {number(account.replays_per_s * lag_factor, 3)} of {account.budget_per_s:g} items/s replayed, "
        f"{number(account.taken_per_s * lag_factor, 3)} exchanges/s taken; computed {account.made_at:%Y-%m-%d %H:%M:%S} UTC "
        f"from {account.n_items} recent items."
    )
    if lag_factor < 1:
        text += f"\nThe shadow lags: every rate is multiplied by {lag_factor:g}."
    if account.n_unboosted:
        text += f"\n{account.n_unboosted} slices are not boosted: a policy has no room for more strata."
    return text
