"""The command `quantdrift policy`."""

from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from quantdrift.cli.options import CONFIG, JSON, data_option, emit
from quantdrift.core.config.load import load
from quantdrift.core.config.schema import Config
from quantdrift.core.data_directory import at_data
from quantdrift.core.errors import RetryError
from quantdrift.core.notation import number
from quantdrift.core.sampling.policy_message import (
    POLICY_KEY,
    SUMMARY_KEY,
    PolicyMessage,
    PolicySummary,
    decode_policy_message,
    decode_policy_summary,
)


class BucketContents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the policy bucket.

    Parameters
    ----------
    message
        The policy that the sidecars read, if any.
    age_s
        Time since the policy was made or confirmed.
    holds
        Whether sidecars still follow it.
    explanation
        The explanation of the policy, if any.
    """

    bucket: str
    message: PolicyMessage | None = msgspec.field(name="directive")
    age_s: float | None
    holds: bool
    explanation: PolicySummary | None = msgspec.field(name="account")


@click.group("policy")
def policy() -> None:
    """Show the sampling policy that the monitor publishes."""


@policy.command("show")
@CONFIG
@data_option("NATS")
@JSON
def policy_show(config_path: Path, data: Path | None, as_json: bool) -> None:
    """Show the current sampling policy, its age, and the figures it was computed from.

    The command reads only NATS. Sidecars follow the policy if sampling.replays_per_s is above 0 in their configuration, and its
    strata are those of the policy; the metric `quantdrift_sidecar_policy_refused_total` shows which ones do not.

    \b
    Example:
      quantdrift policy show -c config.toml --json
    """
    import asyncio

    from quantdrift.core.text import columns

    config = at_data(load(config_path), data)
    try:
        contents = asyncio.run(_read(config))
    except RetryError as error:
        if data is not None:
            raise
        raise RetryError(f"{error}. To use the NATS of a running `quantdrift up`, give --data") from error
    if as_json:
        emit(contents)
        return
    if contents.message is None:
        click.echo(f"There is no policy in {contents.bucket}: the configured rates are in effect.")
        if not config.sampling.replays_per_s:
            click.echo("sampling.replays_per_s is 0, so the monitor publishes none.")
        return
    click.echo(_headline(contents, contents.message))
    if contents.explanation is not None:
        click.echo(_why(contents.explanation, contents.message.lag_factor))
        rows = [
            (
                f"{slice_.model}: {slice_.name}",
                number(slice_.traffic_per_s, 3),
                number(slice_.replays_per_s * contents.message.lag_factor, 3),
                f"{slice_.evidence_share:.1%}",
            )
            for slice_ in contents.explanation.slices
        ]
        click.echo("\n" + columns(("slice", "items/s", "replayed/s", "share of evidence"), rows))
        if contents.explanation.n_slices > len(rows):
            click.echo(f"and {contents.explanation.n_slices - len(rows)} more")
    rates = [
        (stratum.name, f"{number(100 * stratum.rate, 4)}%")
        for stratum in contents.message.policy.header_strata
    ]
    click.echo("\n" + columns(("header stratum", "taken"), rows=rates))
    totals = [
        (stratum.name, f"{number(100 * stratum.rate, 4)}%") for stratum in contents.message.policy.body_strata
    ]
    click.echo("\n" + columns(("body stratum", "replayed (at most the taken rate)"), rows=totals))


async def _read(config: Config) -> BucketContents:
    from quantdrift.core.stream.connection import Queue
    from quantdrift.core.stream.keyvalue import KeyValue
    from quantdrift.core.stream.rights import NatsRole

    queue = await Queue.connect(config.stream, client_name="quantdrift-policy", role=NatsRole.OPERATOR)
    try:
        bucket = KeyValue(queue, config.stream)
        entry, summary = await bucket.get(POLICY_KEY), await bucket.get(SUMMARY_KEY)
    finally:
        await queue.close()
    now = datetime.now(UTC)
    message = decode_policy_message(entry.value) if entry else None
    explanation = decode_policy_summary(summary.value) if summary else None
    if message is None or (explanation is not None and explanation.epoch != message.policy.epoch):
        explanation = None  # of another leader, or half written
    return BucketContents(
        bucket=bucket.name,
        message=message,
        age_s=None if message is None else (now - message.issued_at).total_seconds(),
        holds=message is not None and message.holds(now.timestamp()),
        explanation=explanation,
    )


def _headline(contents: BucketContents, message: PolicyMessage) -> str:
    state = "is in effect" if contents.holds else "has expired: the configured rates are in effect"
    return f"Policy {message.policy.epoch} {state}; confirmed {contents.age_s:.0f} s ago, valid for {message.valid_s:g} s."


def _why(explanation: PolicySummary, lag_factor: float) -> str:
    text = (
        f"Planned: {number(explanation.replays_per_s * lag_factor, 3)} of {explanation.budget_per_s:g} items/s replayed, "
        f"{number(explanation.taken_per_s * lag_factor, 3)} exchanges/s taken; computed {explanation.made_at:%Y-%m-%d %H:%M:%S} UTC "
        f"from {explanation.n_items} recent items."
    )
    if lag_factor < 1:
        text += f"\nThe shadow lags: every rate is multiplied by {lag_factor:g}."
    if explanation.n_unboosted:
        text += f"\n{explanation.n_unboosted} slices are not boosted: a policy has no room for more strata."
    return text
