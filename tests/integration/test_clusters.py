"""Learned slices and novelty with a real reference and a real database, from the first vector to a refit."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from sqlalchemy import text

from quantdrift.cli.main import main
from quantdrift.core.clock import SystemClock
from quantdrift.core.clusters import CLUSTER_KEY, MOST_IDS
from quantdrift.core.codec import encode
from quantdrift.core.config.load import Secrets
from quantdrift.core.config.schema import (
    Config,
    Model,
    Monitor,
    Provider,
    Reference,
    Shadow,
    Slice,
    Stream,
)
from quantdrift.core.errors import OperatorError, RetryError
from quantdrift.core.process.run import Stop
from quantdrift.core.records import Exchange
from quantdrift.core.stream.connection import Queue
from quantdrift.facts.words.cluster import mostly, sets_apart
from quantdrift.models.runtimes.onnx.runtime import OnnxRuntime
from quantdrift.models.runtimes.protocol import ReferenceRuntime
from quantdrift.models.tensors import features
from quantdrift.monitor.discovery.clusters import ClusterFits, configured, refit
from quantdrift.shadow.pipeline.assess import Assessor
from quantdrift.shadow.pipeline.classify import classify
from quantdrift.shadow.replay.references import References
from quantdrift.shadow.slices.refresh import LearnedSlices
from quantdrift.shadow.worker import serve
from quantdrift.storage.comparisons.rows import StoreBatch
from quantdrift.storage.comparisons.writer import Writer
from quantdrift.storage.database import Database
from quantdrift.storage.described_clusters import described as described_clusters
from quantdrift.storage.slices.clusters import keep_vectors, newest_clusterings, prune, spaces
from quantdrift.storage.slices.slice_list import list_slices
from tests.support.shadow.onnx_models import N_FEATURES, WEIGHT, exchange_of, linear_model, saved

pytestmark = pytest.mark.integration

# Kinds lie well apart in the embedding, x @ WEIGHT.
KINDS = np.linalg.pinv(WEIGHT.T @ WEIGHT) @ WEIGHT.T
PLACES = 12 * np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, 0, 0], [0, -3, 0]]) @ KINDS
FAR = 4
N_ITEMS = 30
SCANNERS = "abcd"
DEADLINE_S = 30.0


class Worker:
    """What a shadow worker does with exchanges, without the stream."""

    def __init__(self, config: Config, database: Database) -> None:
        def load(model: Model, reference: Reference) -> ReferenceRuntime:
            return OnnxRuntime(
                Path(reference.path), provider=Provider.CPU, threads=1, embedding=model.embedding
            )

        self._references = References(config.models, load)
        self._database = database
        self._writer = Writer(database, SystemClock())
        self.assessor = Assessor(config, "worker")
        self.assessor.learned.sample_share = 1.0
        self.in_force = LearnedSlices(database, self.assessor.learned, Stop())

    def assess(self, exchanges: Sequence[Exchange]) -> StoreBatch:
        """Replay and compare exchanges."""
        cases = [
            classify(
                encode(exchange), sequence=place, n_delivered=1, max_deliveries=5, references=self._references
            )
            for place, exchange in enumerate(exchanges)
        ]
        return self.assessor.assess(cases, datetime.now(UTC))

    async def store(self, kind: int, seed: int, *, n_exchanges: int = 10, scanner: str = "") -> list[str]:
        """Replay and store exchanges of a kind, with their vectors; return their ids."""
        generator = np.random.default_rng((kind, seed))
        shape = (n_exchanges, N_ITEMS, N_FEATURES)
        inputs = (PLACES[kind] + generator.normal(size=shape)).astype(np.float32)
        attributes = {"header.x-scanner": scanner or SCANNERS[kind % len(SCANNERS)]}
        exchanges = [exchange_of(x, attributes=attributes) for x in inputs]
        batch = self.assess(exchanges)
        await self._writer.store(batch)
        await keep_vectors(self._database, batch.vectors)
        await keep_vectors(self._database, batch.vectors)  # what comes again is there once
        return [exchange.id for exchange in exchanges]

    async def slices_of(self, exchanges: list[str]) -> Mapping[str, float]:
        """Return the share of the items of `exchanges` in each slice."""
        async with self._database.begin() as connection:
            rows = await connection.execute(
                text("""
                    select s.name, count(*)::float / :n from comparison c
                    join slice s on s.id = any(c.slice_ids)
                    where c.exchange_id = any(cast(:ids as uuid[])) group by 1
                """),
                {"ids": exchanges, "n": len(exchanges) * N_ITEMS},
            )
            return {name: share for name, share in rows if name.startswith(("cluster", "novel"))}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return one model with an inner layer as its embedding; every vector is kept."""
    path = str(saved(linear_model(), tmp_path / "linear.onnx"))
    return Config(
        monitor=Monitor(n_clusters=4),
        models=(Model(name="digits", top_k=2, embedding="product", references=(Reference(path=path),)),),
        slices=(Slice(name="scanner", header="x-scanner"),),
    )


@pytest.fixture
async def database(postgres_dsn: str) -> AsyncIterator[Database]:
    """Return the record."""
    async with Database(postgres_dsn) as opened:
        yield opened


async def _refit(
    config: Config,
    database: Database,
    *,
    anew: bool = False,
    most_ids: int = MOST_IDS,
) -> int:
    """Fit the one space there is; return the version."""
    async with database.begin() as connection:
        (space,) = configured(config, await spaces(connection))
    fitted = await refit(
        config,
        database,
        space,
        by_person=True,
        anew=anew,
        most_ids=most_ids,
        quantile=0.98,
    )
    return fitted.clustering.version


async def test_a_slice_by_time_follows_the_time_of_capture(config: Config, database: Database) -> None:
    """Not the time at which it is replayed: Friday, 20:00 UTC, is a Saturday in Tokyo."""
    tokyo = msgspec.structs.replace(
        config,
        capture=msgspec.structs.replace(config.capture, time_zone="Asia/Tokyo"),
        slices=(Slice(name="week", time="week"), Slice(name="day", time="day")),
    )
    exchange = exchange_of(PLACES[:1].astype(np.float32), attributes={})
    friday = msgspec.structs.replace(exchange, captured_at=datetime(2026, 11, 20, 20, 0, tzinfo=UTC))
    worker = Worker(tokyo, database)
    batch = worker.assess([friday])
    (compared,) = batch.compared
    assert [key.name for key in compared.items[0].slices] == ["all", "week=weekend", "day=saturday"]


async def _scalar(database: Database, query: str) -> object:
    async with database.begin() as connection:
        return (await connection.execute(text(query))).scalar()


async def test_learned_slices_from_the_first_vector_through_a_refit(
    config: Config, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds of traffic become slices with ids that stay; what was never seen is a slice of its own; all is bounded."""
    monkeypatch.setattr(features, "LEAST_DESCRIBED", N_FEATURES)
    worker = Worker(config, database)
    await worker.in_force.refresh()
    before = [await worker.store(kind, 1) for kind in range(4)]
    assert [await worker.slices_of(ids) for ids in before] == [{}] * 4
    assert await _scalar(database, "select count(*) from embedding") == 4 * 10 * N_ITEMS
    assert await _scalar(database, "select distinct pi from embedding") == 0.5

    assert await _refit(config, database) == 1
    await worker.in_force.refresh()
    ids = [max(shares, key=lambda name: shares[name]) for shares in await _shares(worker, 2)]
    assert sorted(ids) == ["cluster=1", "cluster=2", "cluster=3", "cluster=4"]
    for name, shares in zip(ids, await _shares(worker, 3), strict=True):
        assert shares[name] > 0.9
        assert shares.get("novel=input", 0) < 0.1
    assert await _scalar(database, "select max((detail ->> 'clustering')::int) from comparison") == 1

    described = await _scalar(database, "select clusters from clustering")
    assert isinstance(described, list)
    assert {one["traits"][0]["label"] for one in described} == {f"scanner={value}" for value in SCANNERS}
    of_slices = "select array_agg(id order by id) from slice where predicate ~ '^cluster'"
    version_id, slice_ids = (
        await _scalar(database, "select id from model_version"),
        await _scalar(database, of_slices),
    )
    assert isinstance(version_id, int)
    assert isinstance(slice_ids, list)
    async with database.begin() as connection:
        of_alerts = await described_clusters(connection, version_id, slice_ids)
    assert {mostly(cluster) for cluster in of_alerts.values()} == {f"scanner={value}" for value in SCANNERS}
    assert all(sets_apart(cluster).startswith(mostly(cluster)) for cluster in of_alerts.values())
    # Nobody named a feature of the input `x`: what a test finds apart is told beside the slices.
    apart = [one["apart"][0] for one in described if one["apart"]]
    assert len(apart) >= 2
    assert all(mean["feature"] in {"input.mean(x)", "input.contrast(x)"} for mean in apart)
    assert any(" of x " in sets_apart(cluster) for cluster in of_alerts.values())
    known = await _scalar(database, "select array_agg(distinct exchange_id::text) from embedding")
    assert isinstance(known, list)
    assert all(set(one["medoids"]) <= set(known) and one["medoids"] for one in described)

    assert await _refit(config, database) == 2
    await worker.in_force.refresh()
    again = [max(shares, key=lambda name: shares[name]) for shares in await _shares(worker, 4)]
    assert again == ids

    injected = await worker.slices_of(await worker.store(FAR, 5, scanner="a"))
    assert injected == {"novel=input": 1.0}
    unseen = await worker.slices_of(await worker.store(0, 5, scanner="of another make"))
    assert unseen["novel=scanner"] == 1.0
    assert unseen[ids[0]] > 0.9


async def _shares(worker: Worker, seed: int) -> list[Mapping[str, float]]:
    return [await worker.slices_of(await worker.store(kind, seed)) for kind in range(4)]


async def test_what_comes_after_the_last_id_shares_a_slice_and_vectors_stay_few(
    config: Config, database: Database
) -> None:
    """A cluster beyond `most_ids` is counted as overflow; the oldest vectors go, by number and by age."""
    first = Worker(config, database)
    for kind in range(4):
        await first.store(kind, 1)
    await _refit(config, database)
    limited = msgspec.structs.replace(config, monitor=Monitor(n_clusters=5))
    for kind in range(5):
        await first.store(kind, 2)
    await _refit(limited, database, most_ids=4)
    worker = Worker(limited, database)
    await worker.in_force.refresh()
    found = await worker.slices_of(await worker.store(FAR, 3))
    assert found["cluster=(other)"] > 0.9
    assert worker.assessor.overflow()["digits"] > 0.9 * 10 * N_ITEMS
    assert await _scalar(database, "select max(next_id) from clustering") == 5

    everything = datetime.now(UTC) - timedelta(days=1)
    assert await prune(database, before=everything, most=1_000) >= 2_000
    n_left = await _scalar(database, "select count(*) from embedding")
    assert isinstance(n_left, int)
    assert 1_000 - N_ITEMS <= n_left <= 1_000  # an exchange goes whole
    assert await prune(database, before=datetime.now(UTC) + timedelta(days=1), most=1_000) == n_left
    assert await _scalar(database, "select count(*) from clustering") == 1


async def test_a_clustering_that_cannot_be_read_stops_nothing(config: Config, database: Database) -> None:
    """Workers go on with the one they have; a person is told, and begins anew with ids that were never used."""
    worker = Worker(config, database)
    for kind in range(4):
        await worker.store(kind, 1)
    await _refit(config, database)
    await worker.in_force.refresh()
    await _refit(config, database)
    await _scalar(database, "update clustering set content = '\\x00' where version = 2 returning 1")
    await worker.in_force.refresh()
    assert sum((await _shares(worker, 2))[0].values()) == 1.0
    assert await _scalar(database, "select max((detail ->> 'clustering')::int) from comparison") == 1
    with pytest.raises(OperatorError, match="--anew"):
        await _refit(config, database)
    assert await _refit(config, database, anew=True) == 3
    (stored,) = await newest_clusterings(database)
    assert sorted(stored.clustering.ids) == [5, 6, 7, 8]
    assert stored.made_by == "quantdrift"


async def test_what_cannot_be_read_of_another_reference_is_in_nobodys_way(
    config: Config, database: Database
) -> None:
    """A former reference has no vectors any more, so nothing ever replaces its clustering: the rest goes on."""
    worker = Worker(config, database)
    for kind in range(4):
        await worker.store(kind, 1)
    await _refit(config, database)
    await _scalar(
        database,
        "update clustering set content = '\\x00', reference_digest = 'former' where version = 1 returning 1",
    )
    await _refit(config, database)
    await worker.in_force.refresh()
    assert sum((await _shares(worker, 2))[0].values()) == 1.0
    assert await _scalar(database, "select max((detail ->> 'clustering')::int) from comparison") == 2
    assert await _refit(config, database) == 3


async def test_a_worker_reads_the_newest_clustering_at_its_start_and_keeps_vectors(
    config: Config, database: Database, postgres_dsn: str, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the stream: the first comparison is in a learned slice already, and its vectors are stored."""
    monkeypatch.setattr("quantdrift.shadow.slices.clusters.SAMPLE_SHARE", 1.0)
    before = Worker(config, database)
    for kind in range(4):
        await before.store(kind, 1)
    await _refit(config, database)
    config = msgspec.structs.replace(
        config,
        stream=Stream(url=nats_url, name=f"t{uuid.uuid4().hex[:8]}"),
        shadow=Shadow(provider=Provider.CPU, threads=1, batch_delay_s=0.05, admin="127.0.0.1:0"),
    )
    x = (PLACES[0] + np.random.default_rng(9).normal(size=(N_ITEMS, N_FEATURES))).astype(np.float32)
    exchange = exchange_of(x, attributes={"header.x-scanner": "a"})
    queue = await Queue.connect(config.stream, client_name="test")
    await queue.ensure()
    await queue.publish_exchange(exchange.model, exchange.id, encode(exchange))
    stop = Stop()
    serving = asyncio.create_task(serve(config, Secrets(dsn=postgres_dsn), stop))
    deadline_s = time.monotonic() + DEADLINE_S
    query = f"select count(*) from embedding where exchange_id = '{exchange.id}'"
    while await _scalar(database, query) != N_ITEMS:
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.02)
    stop.set()
    await queue.close()
    assert await asyncio.wait_for(serving, DEADLINE_S) == 0
    found = await before.slices_of([exchange.id])
    assert sum(found.values()) == pytest.approx(1)
    assert max(found.values()) > 0.9
    assert max(found, key=lambda name: found[name]).startswith("cluster=")


async def test_a_version_is_stored_once(config: Config, database: Database) -> None:
    """Of two fits at once, one is told to try again."""
    worker = Worker(config, database)
    for kind in range(4):
        await worker.store(kind, 1)
    outcomes = await asyncio.gather(*(_refit(config, database) for _ in range(3)), return_exceptions=True)
    assert 1 in outcomes
    versions = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(set(versions)) == len(versions)
    assert all(isinstance(outcome, int | RetryError) for outcome in outcomes)


async def test_the_leader_refits_when_it_is_time_and_others_do_not(
    config: Config, database: Database, postgres_dsn: str
) -> None:
    """With enough vectors, once; and again only after a week."""
    stop = Stop()
    stop.set()  # a turn does not wait then

    def refits(*, leads: bool) -> ClusterFits:
        return ClusterFits(
            config=config,
            dsn=postgres_dsn,
            clock=SystemClock(),
            stop=stop,
            leads=lambda: leads,
            least_vectors=500,
        )

    worker = Worker(config, database)
    await worker.store(0, 1)
    await refits(leads=True).turn()
    assert await _scalar(database, "select count(*) from clustering") == 0
    await worker.store(1, 1)
    await refits(leads=False).turn()
    assert await _scalar(database, "select count(*) from clustering") == 0
    await refits(leads=True).turn()
    await refits(leads=True).turn()
    assert await _scalar(database, "select array_agg(made_by) from clustering") == ["monitor"]


async def test_the_share_of_a_fitted_slice_is_of_the_hours_since_it_was_made(database: Database) -> None:
    """Nobody looked for it before; a declared one that came late had no traffic before."""
    made = datetime(2026, 11, 3, 9, 20, tzinfo=UTC)
    last_at = datetime(2026, 11, 3, 11, 40, tzinfo=UTC)
    keys = {
        "all": [],
        "cluster=1": [{"key": CLUSTER_KEY, "equals": "1"}],
        "late": [{"key": "header.x", "equals": "y"}],
    }
    async with database.begin() as connection:
        await connection.execute(
            text(
                "insert into model_version (model, candidate_version, reference_digest) values ('digits', '1', 'd')"
            )
        )
        for number, (name, where) in enumerate(keys.items(), start=1):
            await connection.execute(
                text(
                    "insert into slice (model, name, predicate, definition, created_at)"
                    " values ('digits', :name, :predicate, cast(:definition as jsonb), :at)"
                ),
                {
                    "name": name,
                    "predicate": name if where else "true",
                    "definition": json.dumps({"where": where}),
                    "at": made,
                },
            )
            await connection.execute(
                text(
                    "insert into verdict (model_version_id, slice_id, verdict, reason, since, n_groups, evidence,"
                    " threshold, estimate, last_at, updated_at, fold_seq)"
                    " values (1, :slice, 'ok', '', :at, 9, 0.001, 8, '{}', :at, :at, 1)"
                ),
                {"slice": number, "at": last_at},
            )
        for hour, weights in {8: (100,), 9: (100, 10, 10), 10: (100, 40, 40), 11: (60, 24, 24)}.items():
            for number, weight in enumerate(weights, start=1):
                await connection.execute(
                    text(
                        "insert into rollup_hour (model_version_id, slice_id, hour, n_items, n_groups, weight,"
                        " weight_sq, flip, topk, js, divergence, margin, flip_weight, topk_weight, js_weight, divergence_weight,"
                        " margin_weight, n_infinite, divergence_bins)"
                        " values (1, :slice, :hour, 1, 1, :weight, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, '{}')"
                    ),
                    {"slice": number, "hour": made.replace(hour=hour, minute=0), "weight": float(weight)},
                )
        for model in ("", "digits"):
            shares = {
                one.name: one.share for one in await list_slices(connection, model=model, as_of=last_at)
            }
            assert shares == pytest.approx({"all": 1.0, "cluster=1": 64 / 160, "late": 74 / 360})
        await connection.execute(text("update verdict set last_at = :at"), {"at": last_at.replace(hour=9)})
        shares = {one.name: one.share for one in await list_slices(connection, model="", as_of=last_at)}
        assert shares["cluster=1"] is None, "there is no whole hour since it was made"


def _toml(config: Config, directory: Path) -> Path:
    path = directory / "config.toml"
    path.write_text(f"""
        [monitor]
        n_clusters = 4
        [capture]
        headers = ["x-scanner"]
        [[models]]
        name = "digits"
        embedding = "product"
        [[models.references]]
        path = "{config.models[0].references[0].path}"
        [[slices]]
        name = "scanner"
        header = "x-scanner"
    """)
    return path


async def test_the_command_line_fits_and_shows(
    config: Config, database: Database, postgres_dsn: str, tmp_path: Path
) -> None:
    """Nothing yet, a dry run, a fit by somebody, and the table with what clusters hold."""
    path = _toml(config, tmp_path)

    async def said(*words: str) -> tuple[int, str]:
        result = await asyncio.to_thread(
            CliRunner().invoke,
            main,
            ["slices", *words, "-c", str(path)],
            env={"QUANTDRIFT_DSN": postgres_dsn},
        )
        return result.exit_code, result.output

    code, shown = await said("clusters")
    assert (code, "No clusters are fitted yet: no vectors are stored yet" in shown) == (0, True)
    code, shown = await said("fit", "--model", "letters")
    assert (code, "no model `letters`" in shown, "reading" in shown) == (2, True, False)
    worker = Worker(config, database)
    for kind in range(4):
        await worker.store(kind, 1)
    code, shown = await said("clusters")
    assert (
        code,
        "1,200 vectors of digits in `product` are stored; the monitor fits once there are" in shown,
    ) == (
        0,
        True,
    )
    code, shown = await said("clusters", "--json")
    assert (code, json.loads(shown)["clusterings"]) == (0, [])
    assert "1,200 vectors of digits" in json.loads(shown)["reason"]
    code, shown = await said("fit", "--dry-run")
    # Some lie beyond every radius, and were fitted to all the same.
    assert (code, "not stored, from 1,200 vectors" in shown) == (0, True), shown
    assert await _scalar(database, "select count(*) from clustering") == 0
    code, shown = await said("fit", "--json")
    assert (code, "0.005," in shown, " slices fit INFO" in shown) == (0, True, True), shown
    code, shown = await said("clusters")
    assert code == 0, shown
    for part in (
        "version 1 in `product`, by quantdrift",
        "cluster=4",
        "scanner=b x4.0",
        "novel=input: at most 0.50 %",
    ):
        assert part.replace("0.50 %", "0.50%") in shown, shown
    assert "header.x-scanner (4 values)" in shown
    assert "estimated share" in shown
    # One that nobody can read, of another reference: it is named and left out, and the rest is shown.
    await _scalar(
        database,
        "insert into clustering (model, version, reference_digest, space, made_by, from_at, to_at, n_vectors, next_id,"
        " clusters, content) select model, 99, repeat('e', 64), space, made_by, from_at, to_at, n_vectors, next_id,"
        " clusters, '\\x00' from clustering returning 1",
    )
    code, shown = await said("clusters")
    assert code == 0, shown
    assert "warning: skipped digits, version 99 in `product` of reference eeeeeeeeeeee: " in shown
    assert "version 1 in `product`, by quantdrift" in shown
    await _scalar(database, "update clustering set content = '\\x00' returning 1")
    code, shown = await said("clusters")
    assert (code, "no clustering can be read: fit new ones" in shown) == (2, True)
