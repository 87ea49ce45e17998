"""The Grafana board: each query runs, and all panels fit beside each other. Grafana itself is not run."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml

from quantdrift.core import telemetry
from quantdrift.core.telemetry import Instrument

pytestmark = pytest.mark.integration

GRAFANA = Path(__file__).resolve().parents[2] / "deploy/grafana"


def _panels() -> list[dict[str, Any]]:
    board = json.loads((GRAFANA / "boards/quantdrift.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = board["panels"]
    return found


def _targets(kind: str) -> list[dict[str, Any]]:
    return [one for panel in _panels() for one in panel["targets"] if one["datasource"]["type"] == kind]


def test_each_panel_uses_a_data_source_that_is_provisioned() -> None:
    """Ids occur once, no panels overlap, and each has a title and a description."""
    path = GRAFANA / "provisioning/datasources/quantdrift.yaml"
    sources = {one["uid"]: one["type"] for one in yaml.safe_load(path.read_text())["datasources"]}
    taken: set[tuple[int, int]] = set()
    for panel in _panels():
        assert panel["title"]
        assert panel["description"]
        for one in (panel, *panel["targets"]):
            assert sources[one["datasource"]["uid"]] == one["datasource"]["type"]
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    assert len({panel["id"] for panel in _panels()}) == len(_panels())


async def test_each_sql_query_runs(record: asyncpg.Connection) -> None:
    """Against the schema of this release."""
    for one in _targets("postgres"):
        await record.fetch(one["rawSql"])


async def test_an_open_alert_leads_to_its_slice_on_the_live_page(record: asyncpg.Connection) -> None:
    """The link consists of numbers, which are columns of the query that the table does not show."""
    (panel,) = [one for one in _panels() if one["title"] == "Open alerts"]
    query = await record.prepare(panel["targets"][0]["rawSql"])
    columns = {attribute.name for attribute in query.get_attributes()}
    properties = {
        one["matcher"]["options"]: {given["id"]: given["value"] for given in one["properties"]}
        for one in panel["fieldConfig"]["overrides"]
    }
    assert set(properties) <= columns
    (link,) = properties["slice"]["links"]
    named = re.findall(r"\$\{__data\.fields\.(\w+)\}", link["url"])
    assert named == ["model_version_id", "slice_id"]
    assert all(properties[name]["custom.hidden"] for name in named)
    assert re.sub(r"\$\{[^}]+\}", "1", link["url"]) == "https://quantdrift.example.com/slice/1/1"


def test_each_promql_query_is_valid_and_names_metrics_that_exist(tmp_path: Path) -> None:
    """`promtool` parses each query as a recording rule."""
    queries = [one["expr"] for one in _targets("prometheus")]
    known = {one.name.replace(".", "_") for one in vars(telemetry).values() if isinstance(one, Instrument)}
    for query in queries:
        for name in re.findall(r"\bquantdrift_\w+", query):
            assert re.sub(r"_(total|seconds|bytes)$", "", name) in known, name
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    path = tmp_path / "rules.yaml"
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
