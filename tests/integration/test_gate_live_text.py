"""`quantdrift gate --live` of a language model, as typed: captured chats, a real stream and database, and candidates in folders."""

import json
import uuid
from pathlib import Path
from random import Random

import asyncpg
import msgspec
import pytest

from quantdrift.core.config.schema import Stream
from quantdrift.core.records import Exchange
from tests.integration.test_gate_live import SLICE, SUMS, Site, answers_of
from tests.support.shadow.openai_exchanges import chat, exchange

pytestmark = pytest.mark.integration

CONFIG = """
[shadow]
provider = "cpu"
threads = 1
[capture]
protocols = ["openai-chat"]
headers = ["x-topic"]
[stream]
url = "{url}"
name = "{name}"
[[models]]
name = "digits"
task = "generation"
[models.generation]
tie = 0.05
own_share = 1.0
[models.budget]
cap = 0.5
[[models.references]]
runtime = "transformers"
path = "reference"
[models.references.copy]
path = "int2"
versions = ["int8"]
[[slices]]
name = "topic"
header = "x-topic"
"""
WORDS = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8").split()


def _served(number: int) -> Exchange:
    """Return a sampled chat whose answer goes on as the text did that the model learned; one in 50 is empty."""
    rng = Random(number)
    at = rng.randrange(len(WORDS) - 20)
    said = "" if number % 50 == 7 else " ".join(WORDS[at + 4 : at + 10])
    asked = {
        "model": "digits",
        "temperature": 0.7,
        "messages": [{"role": "user", "content": " ".join(WORDS[at : at + 4])}],
    }
    topic = "law" if number % 2 else "rare"
    found = exchange("/v1/chat/completions", asked, chat(said))
    return msgspec.structs.replace(found, attributes={"header.x-topic": topic})


@pytest.fixture
async def site(language_folder: Path, tmp_path: Path, nats_url: str, postgres_dsn: str) -> Site:
    """Return a site with a reference, a candidate in BF16 and one of two bits, both of whose slices had traffic today."""
    from transformers import AutoTokenizer

    from examples.generation.make import save
    from tests.support.shadow.language_models import loaded, rounded

    stream = Stream(url=nats_url, name=f"t{uuid.uuid4().hex[:8]}")
    (tmp_path / "reference").symlink_to(language_folder)
    model, _ = loaded(language_folder)
    tokenizer = AutoTokenizer.from_pretrained(language_folder)
    save(tmp_path / "int2", rounded(model, levels=1), tokenizer)
    save(tmp_path / "bf16", model.bfloat16(), tokenizer)
    (tmp_path / "config.toml").write_text(CONFIG.format(url=stream.url, name=stream.name), encoding="utf-8")
    connection = await asyncpg.connect(postgres_dsn)
    version = await connection.fetchval(
        "insert into model_version (model, candidate_version, reference_digest) values ('digits', 'int8', 'r') returning id"
    )
    named: dict[str, tuple[str, list[dict[str, str]]]] = {"all": ("true", [])} | {
        f"topic={value}": (f'header.x-topic = "{value}"', [{"key": "header.x-topic", "equals": value}])
        for value in ("law", "rare")
    }
    for name, (predicate, where) in named.items():
        number = await connection.fetchval(SLICE, name, predicate, json.dumps({"where": where}))
        await connection.execute(SUMS, version, number)
    await connection.close()
    return Site(tmp_path, postgres_dsn, stream)


def test_a_language_model_is_judged_by_the_tokens_of_what_was_served(site: Site) -> None:
    """BF16 passes by changed tokens and divergence; two bits fail. The copy that is configured is of what serves, and is not asked."""
    with site.traffic(_served):
        passed = site.gate("bf16", "--wait", "2m", "--json")
        failed = site.gate("int2", "--wait", "2m")
    assert passed.returncode == 0, passed.stderr
    printed = json.loads(passed.stdout)
    assert (printed["refused"], printed["unusable"]) == (0, 0), printed["problem"]
    answers = answers_of(site.rows()[0])
    assert {name for name, _ in answers} == {"all", "topic=law", "topic=rare"}
    assert {question for _, question in answers} == {"changed-tokens", "divergence"}
    assert all(one["mean"] < 0.05 for one in answers.values())
    assert failed.returncode == 3, failed.stdout
    assert "fail: above the limit in" in failed.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bf16", "--mlperf=99", "--reference-accuracy=0.9"), "--mlperf is not for language models"),
        (("bf16", "--margin=0.1"), "--margin is about changed answers"),
        (("nowhere",), "nowhere"),
    ],
)
async def test_what_is_not_for_language_models_is_refused(
    site: Site, arguments: tuple[str, ...], said: str
) -> None:
    """With exit code 2, before anything is recorded."""
    done = site.gate(*arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
