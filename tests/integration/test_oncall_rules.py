"""The alerts of deploy/prometheus, their runbooks and their metrics."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY, generate_latest

from quantdrift.core import telemetry
from quantdrift.core.telemetry import Instrument, InstrumentKind, Telemetry

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs/runbooks"
TESTS = ROOT / "deploy/prometheus/tests"


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _exposed() -> set[str]:
    """Return every name that /metrics can have."""
    meter = Telemetry("test")
    try:
        for one in vars(telemetry).values():
            if not isinstance(one, Instrument):
                continue
            if one.kind is InstrumentKind.COUNTER:
                meter.counter(one).add(1)
            elif one.kind is InstrumentKind.HISTOGRAM:
                meter.histogram(one).record(1.0)
            else:
                meter.observe(one, lambda: [(1.0, {})])
        return set(re.findall(r"^(quantdrift_\w+)", generate_latest(REGISTRY).decode(), flags=re.MULTILINE))
    finally:
        meter.close()


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    """The index of the runbooks names them all, with the severity of the rule."""
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in _rules()}
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == set(severities)
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \|", index, flags=re.MULTILINE)) == severities
    for name, severity in severities.items():
        page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
        assert f"Severity: {severity}." in page
        for heading in ("What it means", "First look", "Likely causes", "What to do", "How to silence it"):
            assert f"\n## {heading}\n" in page, (name, heading)
        assert f"alertname={name}" in page


def test_each_silence_names_what_its_alert_is_about() -> None:
    """By the labels that the rule keeps; a silence by `alertname` alone would be one of the whole fleet."""
    for rule in _rules():
        grouping = re.search(r"\bby \(([^)]*)\)", rule["expr"])
        kept = {label.strip() for label in grouping[1].split(",")} if grouping else set()
        wanted = kept & {"model", "slice", "instance", "child"}
        page = (RUNBOOKS / f"{rule['alert']}.md").read_text(encoding="utf-8")
        (command,) = re.findall(r"^amtool silence add .+$", page, flags=re.MULTILINE)
        assert set(re.findall(r"['\s](\w+)=", command.partition("--comment")[2])) == {"alertname", *wanted}, (
            rule["alert"]
        )


def test_each_alert_says_what_it_is_where_to_read_on_and_whom_it_wakes() -> None:
    """Summary, description, severity, runbook and a link to the live page."""
    for rule in _rules():
        notes = rule["annotations"]
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert {"summary", "description", "runbook_url", "page"} == set(notes), rule["alert"]
        assert notes["runbook_url"].endswith(f"/runbooks/{rule['alert']}.md")
        assert notes["page"].startswith("https://quantdrift.example.com/")


def test_each_metric_of_a_rule_or_of_its_test_exists_in_the_code() -> None:
    """A metric that was renamed would leave a rule that never fires."""
    texts = [rule["expr"] for rule in _rules()]
    texts += [path.read_text(encoding="utf-8") for path in TESTS.glob("*.yaml")]
    used = {name for text in texts for name in re.findall(r"\bquantdrift_\w+", text)}
    assert len(used) >= 10
    assert used <= _exposed()


@pytest.mark.release
def test_each_rule_fires_when_it_should_and_not_otherwise() -> None:
    """`promtool` runs the unit tests of the rules, and each alert occurs in them."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    files = sorted(TESTS.glob("*.yaml"))
    done = subprocess.run(
        [promtool, "test", "rules", *map(str, files)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = "".join(path.read_text(encoding="utf-8") for path in files)
    assert not [rule["alert"] for rule in _rules() if rule["alert"] not in tested]
