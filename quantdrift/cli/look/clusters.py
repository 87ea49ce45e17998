"""The commands `quantdrift slices fit` and `quantdrift slices clusters`, for learned slices."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quantdrift.cli.options import CONFIG, DATA, JSON, emit, prepare
from quantdrift.cli.output import Steps
from quantdrift.core.clusters import LEAST_VECTORS, MOST_IDS, OTHER_ID, SAMPLE_SHARE, Clustering
from quantdrift.core.config.load import Role, Secrets
from quantdrift.core.config.schema import Config
from quantdrift.core.config.wrong_values import nearest
from quantdrift.core.errors import OperatorError
from quantdrift.core.text import columns
from quantdrift.facts.words.cluster import feature_words

if TYPE_CHECKING:
    from quantdrift.storage.slices.clusters import Space

_ESTIMATE = "share: estimated share of the traffic. Sampling cannot boost learned slices, because capture does not know them."


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a clustering.

    Parameters
    ----------
    made
        Who made it from which vectors, in words.
    expected_novel
        Upper bound of the share of ordinary traffic that is expected beyond every radius.
    known_values
        Number of known values by attribute; any other value is novel.
    ids_left
        Cluster ids that are still unused.
    clusters
        Per cluster: id, number of vectors, estimated share, radius, traits, features apart, and medoids.
    """

    model: str
    version: int
    space: str
    reference_digest: str
    made: str
    expected_novel: float
    known_values: dict[str, int]
    ids_left: int
    clusters: list[dict[str, Any]]


@click.command("fit")
@CONFIG
@DATA
@click.option("--model", default="", help="Only this model.  [default: all]")
@click.option("--anew", is_flag=True, help="Ignore the existing clusters and give every cluster a new id.")
@click.option("--dry-run", is_flag=True, help="Show the result and store nothing.")
@JSON
def fit(config_path: Path, data: Path | None, model: str, anew: bool, dry_run: bool, as_json: bool) -> None:
    """Fit learned slices to the stored vectors now, even to few.

    The monitor does this once a week. A cluster that is found again keeps its id.

    \b
    Example:
      quantdrift slices fit --model digits --dry-run
    """
    import asyncio

    config, secrets = prepare(config_path, Role.MONITOR, data)
    _known(config, model)
    if unfit := _unfit(config, model):
        raise OperatorError(unfit)
    with Steps(quiet=as_json) as step:
        step("reading vectors")
        overviews = asyncio.run(_fit(config, secrets, model, anew=anew, dry_run=dry_run, progress=step))
    _show(overviews, as_json=as_json)


@click.command("clusters")
@CONFIG
@DATA
@click.option("--model", default="", help="Only this model.  [default: all]")
@JSON
def clusters(config_path: Path, data: Path | None, model: str, as_json: bool) -> None:
    """Show the current learned slices: size, what sets each apart, and typical exchanges.

    \b
    Example:
      quantdrift slices clusters --model digits
    """
    import asyncio

    config, secrets = prepare(config_path, Role.REPORT, data)
    overviews, spaces_known = asyncio.run(_in_force(config, secrets, model))
    if overviews:
        _show(overviews, as_json=as_json)
    elif as_json:
        emit({"note": _ESTIMATE, "clusterings": [], "reason": _reason(config, model, spaces_known)})
    else:
        click.echo(f"No clusters are fitted yet: {_reason(config, model, spaces_known)}")


async def _fit(
    config: Config,
    secrets: Secrets,
    model: str,
    *,
    anew: bool,
    dry_run: bool,
    progress: Callable[[str], None],
) -> list[Overview]:
    from quantdrift.monitor.discovery.clusters import configured, refit
    from quantdrift.storage.database import Database
    from quantdrift.storage.slices.clusters import spaces

    async with Database(secrets.dsn) as database:
        async with database.begin() as connection:
            known_spaces = await spaces(connection)
        spaces_to_fit = [space for space in configured(config, known_spaces) if model in {"", space.model}]
        if not spaces_to_fit:
            raise OperatorError(_reason(config, model, spaces_to_fit))
        fitted = []
        for space in spaces_to_fit:
            progress(f"fitting {space.n_vectors:,} vectors of {space.model} in `{space.space}`")
            fitted.append(await refit(config, database, space, by_person=True, anew=anew, dry_run=dry_run))
    stored = "not stored" if dry_run else "stored"
    return [
        _overview(
            clustering.clustering,
            msgspec.to_builtins(clustering.clusters),
            f"{stored}, from {clustering.n_vectors:,} vectors",
        )
        for clustering in fitted
    ]


async def _in_force(config: Config, secrets: Secrets, model: str) -> "tuple[list[Overview], list[Space]]":
    """Return the current clusterings, and the configured spaces that have vectors."""
    from quantdrift.monitor.discovery.clusters import configured
    from quantdrift.storage.database import Database
    from quantdrift.storage.slices.clusters import newest_clusterings, spaces

    n_left_out = 0

    def left_out(description: str, error: OperatorError) -> None:
        nonlocal n_left_out
        n_left_out += 1
        click.echo(f"warning: skipped {description}: {error}", err=True)

    async with Database(secrets.dsn) as database:
        clusterings = await newest_clusterings(database, model, unreadable=left_out)
        async with database.begin() as connection:
            known_spaces = [
                space for space in configured(config, await spaces(connection)) if model in {"", space.model}
            ]
    if not clusterings and n_left_out:
        raise OperatorError("no clustering can be read: fit new ones with `quantdrift slices fit --anew`")
    if not clusterings:
        _known(config, model)
    overviews = [
        _overview(
            clustering.clustering,
            clustering.clusters,
            f"by {clustering.made_by} on {clustering.made_at:%Y-%m-%d %H:%M} from {clustering.n_vectors:,} vectors captured"
            f" {clustering.from_at:%Y-%m-%d} to {clustering.to_at:%Y-%m-%d}",
        )
        for clustering in clusterings
    ]
    return overviews, known_spaces


def _known(config: Config, model: str) -> None:
    if model and config.model(model) is None:
        names = [configured.name for configured in config.models]
        raise OperatorError(f"there is no model `{model}` in the configuration: {nearest(model, names)}")


def _unfit(config: Config, model: str) -> str:
    """Return why the configuration allows no fit; empty if it does."""
    if not any(configured.embedding for configured in config.models if model in {"", configured.name}):
        return f"{f'model `{model}`' if model else 'no model'} has {'no' if model else 'an'} `embedding`"
    return ""


def _reason(config: Config, model: str, known_spaces: "Sequence[Space]") -> str:
    """Return why there is no fit yet, and what is missing for the first one."""
    if unfit := _unfit(config, model):
        return unfit
    if not known_spaces:
        return (
            f"no vectors {f'of `{model}` ' if model else ''}are stored yet for the configured `embedding`; the shadow "
            f"stores a share of {SAMPLE_SHARE:g} of the items that it compares"
        )
    stored = ", ".join(
        f"{space.n_vectors:,} vectors of {space.model} in `{space.space}`" for space in known_spaces
    )
    return f"{stored} are stored; the monitor fits once there are {LEAST_VECTORS:,}, `quantdrift slices fit` fits now"


def _overview(clustering: Clustering, described: Sequence[dict[str, Any]], origin: str) -> Overview:
    return Overview(
        model=clustering.model,
        version=clustering.version,
        space=clustering.space,
        reference_digest=clustering.reference_digest,
        made=origin,
        expected_novel=float(f"{clustering.expected_novel:.6g}"),
        known_values={key: len(values) for key, values in sorted(clustering.vocabulary.items())},
        ids_left=max(MOST_IDS - clustering.next_id + 1, 0),
        clusters=list(described),
    )


def _show(overviews: Sequence[Overview], *, as_json: bool) -> None:
    if as_json:
        emit({"note": _ESTIMATE, "clusterings": overviews})
        return
    for overview in overviews:
        click.echo("\n".join(_lines(overview)))
    click.echo(_ESTIMATE)


def _lines(overview: Overview) -> list[str]:
    lines = [
        f"{overview.model}: version {overview.version} in `{overview.space}`, {overview.made}",
        f"reference {overview.reference_digest[:12]}, {overview.ids_left} ids left",
        "",
    ]
    rows = []
    for cluster in overview.clusters:
        name = "cluster=(other)" if cluster["id"] == OTHER_ID else f"cluster={cluster['id']}"
        traits = ", ".join(
            [
                *(
                    f"{trait['label']} x{trait['lift']:.1f} ({trait['count']})"
                    for trait in cluster["traits"]
                    if trait.get("p_adjusted") is not None  # before, no test was made
                ),
                *(
                    f"{feature_words(mean['feature'])} {mean['inside']:.3g} (elsewhere {mean['elsewhere']:.3g})"
                    for mean in cluster.get("apart", [])
                ),
            ]
        )
        medoid = next(iter(cluster["medoids"]), "")
        rows.append((name, f"{cluster['share']:.2%}", f"{cluster['n']:,}", traits or "-", medoid))
    values = ", ".join(f"{key} ({count} values)" for key, count in overview.known_values.items())
    far = (
        f"at most {overview.expected_novel:.2%} of ordinary traffic is expected there"
        if all(cluster["radius"] is not None for cluster in overview.clusters)
        else "not in use yet, because there are too few vectors to say which inputs are far"
    )
    return [
        *lines,
        columns(("slice", "share", "vectors", "what sets it apart", "typical exchange"), rows),
        "",
        f"  novel=input: {far}",
        f"  novel values: of {values}" if values else "  novel values: no attribute has enough known values",
        "",
    ]
